"""How fast a plan could be at best: each lane's bytes and flops at its rate, and every lane at work all the time.

Takes a thousandth of what lowering and simulating take, so most candidates need not be simulated to know that another
one is better.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.graph import ops
from penstock.planner.cost import Cost
from penstock.planner.predict import Prediction
from penstock.planner.shorten import streamed
from penstock.spec.ask import Ask
from penstock.spec.parts import FFNS, head_key
from penstock.spec.places import GPU, HOST, Lane, disk_of, is_disk, kernels_of
from penstock.spec.plan import Plan, Unit


class _Pass(NamedTuple):
    """Of `batches` batches of `rows` rows each. `seqs`: of a batch. `seq_rows`: at most so many rows of a sequence,
    which together see `pairs` positions, on average of all passes."""

    purpose: str
    batches: int
    rows: int
    seqs: int
    seq_rows: int
    pairs: float


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
    wanted = (
        _Pass(
            *("prefill", batches, together * prompt // passes, together),
            seq_rows=min(prompt, plan.chunk_rows),
            pairs=prompt * (prompt + 1) / 2 / passes,
        ),
        _Pass("decode", batches, together, together, 1, prompt),
    )
    prompt_s, token_s = _busiest_s(plan, cost, wanted)
    return _score_s(passes * prompt_s + ask.output_tokens * token_s, plan, ask)


def reads_bytes(plan: Plan) -> int:
    """What a decode pass reads from disks."""
    return sum(streamed(plan, from_disk=True).values())


def sequences(plan: Plan, ask: Ask) -> int:
    """Of a pass."""
    return min(ask.batch, plan.batch_seqs * plan.batches_per_pass)


def _score_s(total_s: float, plan: Plan, ask: Ask) -> float:
    rounds = -(-ask.batch // sequences(plan, ask))
    return total_s * rounds if ask.objective == "latency" else total_s / (sequences(plan, ask) * ask.output_tokens)


def _busiest_s(plan: Plan, cost: Cost, wanted: Sequence[_Pass]) -> list[float]:
    """Of the busiest lane, in each of some passes: units cross lanes once, and are computed once a batch. Norms, moves
    of KV and copies are left out."""
    spec, lanes = plan.target.spec, [defaultdict[str, float](float) for _ in wanted]
    kinds = {
        key: (part.kind, id(spec.layers[part.layer]), part.granules)
        for key, part in plan.parts.items()
        if part.kind in ("attn", *FFNS) or key == head_key(spec)
    }
    known: dict[tuple[object, ...], list[tuple[dict[str, float], str, float]]] = {}  # of thousands of units few differ
    for unit in plan.units:
        kind = kinds.get(unit.part)
        if kind is not None:
            tail = unit.hi == kind[2]  # the last granule may have fewer rows
            alike = (kind, unit.hi - unit.lo, tail, unit.home, unit.decode, unit.prefill, unit.active)
            if alike not in known:
                known[alike] = [
                    (into, *each)
                    for into, p in zip(lanes, wanted, strict=True)
                    for each in _unit_s(plan, unit, cost, p)
                ]
            for into, lane, seconds in known[alike]:
                into[lane] += seconds
    for into, p in zip(lanes, wanted, strict=True):
        for lane, seconds in _attention_s(plan, cost, p):
            into[lane] += seconds
    return [max(each.values(), default=0.0) for each in lanes]


def _attention_s(plan: Plan, cost: Cost, p: _Pass) -> Iterator[tuple[Lane, float]]:
    """(lane, seconds) of attention over all that came before, which is most of a prompt of 131,072 tokens. Left out are
    layers with a window, and those whose attention is somewhere else than the activations."""
    for home in plan.kv:
        if home.attend != plan.main:
            continue
        layers = Counter(layer.attention for layer in plan.target.spec.layers[slice(*home.layers)])
        for a, count in layers.items():
            if not a.window:
                flops = 4 * p.seqs * p.pairs * a.heads * a.head_dim
                rows = max(1, p.rows // p.seqs)
                lane = kernels_of(home.attend)
                yield lane, count * p.batches * cost.least_s(lane, "attend", home.format.kind, rows, 0, flops)


def _unit_s(plan: Plan, unit: Unit, cost: Cost, p: _Pass) -> Iterator[tuple[Lane, float]]:
    """(lane, seconds) of a unit."""
    part, executor, home, rows = plan.parts[unit.part], unit.executor(p.purpose), unit.home, p.rows
    cached = {f"{cache.layer}.experts" for cache in plan.caches}
    there = {f"{cache.layer}.experts" for cache in plan.caches if cache.executor != HOST}
    if p.purpose == "prefill" and part.layer < 0:
        return  # the head: few of a prompt's rows need it
    lane = kernels_of(executor)
    fmt, nbytes, active = part.format.kind, plan.unit_bytes(unit), unit.active if p.purpose == "decode" else 1.0
    routed = plan.target.spec.layers[part.layer].routed
    if p.purpose == "decode" and part.key in there:
        return  # at best all are in the device's cache, or the CPU computes them all
    if part.kind == "experts" and routed is not None:
        read, flops, expert_rows = ops.experts_cost(part, routed, unit.lo, unit.hi, ops.FFN_BLOCKS, rows)
        yield lane, p.batches * cost.least_s(lane, "experts", fmt, expert_rows, read, flops)
    else:
        calls = ((op, ops.matrix_cost(part, unit.lo, unit.hi, blocks, rows)) for op, blocks in _CALLS[part.kind])
        seconds = (cost.least_s(lane, op, fmt, rows, active * read, active * flops) for op, (read, flops) in calls)
        yield lane, p.batches * sum(seconds)
    if is_disk(home) and not (p.purpose == "decode" and unit.part in cached):  # at best nothing is missing
        reads = disk_of(home).reads
        yield reads, cost.least_s(reads, "load", fmt, 1, nbytes)
    if executor == GPU.executor != home:
        yield GPU.to_device, cost.least_s(GPU.to_device, "lift", fmt, 1, nbytes)


_CALLS = {
    "attn": (("qkv", ops.QKV_BLOCKS), ("out", ops.OUT_BLOCKS)),
    "ffn": (("ffn", ops.FFN_BLOCKS),),
    "shared": (("ffn", ops.FFN_BLOCKS),),
    "embed": (("head", ops.VOCAB_BLOCKS),),
    "head": (("head", ops.VOCAB_BLOCKS),),
}
