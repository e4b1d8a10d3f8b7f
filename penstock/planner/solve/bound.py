"""How fast a plan could be at best: each lane's bytes and flops at its rate, and every lane at work all the time.

Takes a thousandth of what lowering and simulating take, so most candidates need not be simulated to know that another
one is better.
"""

from __future__ import annotations

from penstock.graph import ops
from penstock.planner.cost import Cost
from penstock.planner.predict import Prediction
from penstock.planner.shorten import streamed
from penstock.spec.ask import Ask
from penstock.spec.parts import Part
from penstock.spec.plan import DEVICE, Plan, Unit

_MATRICES = ("attn", "ffn")


def score_s(prediction: Prediction, plan: Plan, ask: Ask) -> float:
    """Seconds to bring down: of all answers, or, where throughput is wanted, of a generated token, the prompts' time
    counted. A plan for fewer sequences than were asked for takes several rounds."""
    return _score_s(prediction.total_s, plan, ask)


def least_score_s(plan: Plan, ask: Ask, cost: Cost) -> float:
    """The same, at best."""
    seqs = sequences(plan, ask)
    batches = -(-seqs // plan.batch_seqs)
    together = min(seqs, plan.batch_seqs)
    prompt = max(1, min(ask.prompt_tokens, plan.context - 1))
    passes = -(-together * prompt // plan.chunk_rows)
    prompts_s = passes * _pass_s(plan, cost, "prefill", batches, together * prompt // passes)
    return _score_s(prompts_s + ask.output_tokens * _pass_s(plan, cost, "decode", batches, together), plan, ask)


def reads_bytes(plan: Plan) -> int:
    """What a decode pass reads from disks."""
    return sum(streamed(plan, from_disk=True).values())


def sequences(plan: Plan, ask: Ask) -> int:
    """Of a pass."""
    return min(ask.batch, plan.batch_seqs * plan.batches_per_pass)


def _score_s(total_s: float, plan: Plan, ask: Ask) -> float:
    rounds = -(-ask.batch // sequences(plan, ask))
    return total_s * rounds if ask.objective == "latency" else total_s / (sequences(plan, ask) * ask.output_tokens)


def _pass_s(plan: Plan, cost: Cost, purpose: str, batches: int, rows: int) -> float:
    """Of the busiest lane, in a pass of `batches` batches of `rows` rows each: units cross lanes once, and are computed
    once a batch. Norms, attention's reading of KV and copies are left out."""
    parts = plan.parts
    lanes: dict[str, float] = {}
    for unit in plan.units:
        part = parts[unit.part]
        if part.kind not in _MATRICES and not (purpose == "decode" and _is_head(plan, part)):
            continue
        executor, fmt, nbytes = unit.executor(purpose), part.format.kind, (unit.hi - unit.lo) * part.granule_bytes
        active = unit.active if purpose == "decode" else 1.0
        lanes[executor] = lanes.get(executor, 0.0) + batches * _compute_s(cost, unit, part, executor, rows, active)
        if unit.home != executor:
            if unit.home.startswith("disk"):
                lanes[unit.home] = lanes.get(unit.home, 0.0) + cost.least_s(unit.home, "load", fmt, 1, nbytes)
            if executor == DEVICE:
                lanes["h2d0"] = lanes.get("h2d0", 0.0) + cost.least_s("h2d0", "lift", fmt, 1, nbytes)
    return max(lanes.values(), default=0.0)


def _is_head(plan: Plan, part: Part) -> bool:
    return part.kind == "head" or (part.kind == "embed" and plan.target.spec.tied)


def _compute_s(cost: Cost, unit: Unit, part: Part, executor: str, rows: int, active: float) -> float:
    if part.kind == "attn":
        return sum(
            cost.least_s(executor, op, part.format.kind, rows, *ops.matrix_cost(part, unit.lo, unit.hi, blocks, rows))
            for op, blocks in (("qkv", ops.QKV_BLOCKS), ("out", ops.OUT_BLOCKS))
        )
    op, blocks = ("ffn", ops.FFN_BLOCKS) if part.kind == "ffn" else ("head", ops.VOCAB_BLOCKS)
    nbytes, flops = ops.matrix_cost(part, unit.lo, unit.hi, blocks, rows)
    return cost.least_s(executor, op, part.format.kind, rows, active * nbytes, active * flops)
