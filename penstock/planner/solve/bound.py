"""How fast a plan could be at best: each lane's bytes and flops at its rate, and every lane at work all the time.

Takes a thousandth of what lowering and simulating take, so most candidates need not be simulated to know that another
one is better.
"""

from __future__ import annotations

from collections import defaultdict

from penstock.graph import ops
from penstock.planner.cost import Cost
from penstock.planner.predict import Prediction
from penstock.planner.shorten import streamed
from penstock.spec.ask import Ask
from penstock.spec.plan import DEVICE, Plan


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


def _alike(plan: Plan) -> dict[tuple[str, str, str, str, float], list[int]]:
    """Granules, and their rows, of units that differ in their layer alone: a large model has thousands, of few kinds.
    By part (the first that is like it), home, executors and the share that is active."""
    spec, first = plan.target.spec, dict[tuple[str, int], str]()
    kinds = {
        key: (part, first.setdefault((part.kind, id(spec.layers[part.layer]) if part.layer >= 0 else 0), key))
        for key, part in plan.parts.items()
        if part.kind in _OPS and (part.kind != "embed" or spec.tied)
    }
    found: dict[tuple[str, str, str, str, float], list[int]] = {}
    for unit in plan.units:
        if unit.part in kinds:
            part, like = kinds[unit.part]
            sums = found.setdefault((like, unit.home, unit.decode, unit.prefill, unit.active), [0, 0])
            sums[0] += unit.hi - unit.lo
            sums[1] += part.rows_of(unit.lo, unit.hi)
    return found


def _pass_s(plan: Plan, cost: Cost, purpose: str, batches: int, rows: int) -> float:
    """Of the busiest lane, in a pass of `batches` batches of `rows` rows each: units cross lanes once, and are computed
    once a batch. Norms, attention's reading of KV and copies are left out."""
    lanes: defaultdict[str, float] = defaultdict(float)
    for (key, home, decode, prefill, share), (granules, granule_rows) in _alike(plan).items():
        part = plan.parts[key]
        if purpose == "prefill" and part.layer < 0:
            continue  # the head
        executor, active = (prefill, 1.0) if purpose == "prefill" else (decode, share)
        fmt, nbytes = part.format.kind, granules * part.granule_bytes
        for op, blocks in _OPS[part.kind]:
            read_bytes, flops = ops.matrix_cost(part, 0, 1, blocks, rows)
            all_flops = active * flops * granule_rows / part.rows_of(0, 1)
            lanes[executor] += batches * cost.least_s(
                executor, op, fmt, rows, active * granules * read_bytes, all_flops
            )
        if home.startswith("disk") and home != executor:
            lanes[home] += cost.least_s(home, "load", fmt, 1, nbytes)
        if executor == DEVICE != home:
            lanes["h2d0"] += cost.least_s("h2d0", "lift", fmt, 1, nbytes)
    return max(lanes.values(), default=0.0)


_OPS = {
    "attn": (("qkv", ops.QKV_BLOCKS), ("out", ops.OUT_BLOCKS)),
    "ffn": (("ffn", ops.FFN_BLOCKS),),
    "embed": (("head", ops.VOCAB_BLOCKS),),
    "head": (("head", ops.VOCAB_BLOCKS),),
}
