"""A lower bound of the time that a plan takes: the seconds of its busiest lane, if that lane never waits.

The bound takes a thousandth of the time of lowering and simulating. `solve` does not simulate a candidate whose bound
is worse than the simulated time of another one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.graph import ops
from penstock.planner.cost import Cost
from penstock.planner.predict import Prediction
from penstock.planner.shorten import staying, streamed
from penstock.planner.sizes import prompt_and_half_way
from penstock.spec.ask import Ask
from penstock.spec.part_keys import head_key
from penstock.spec.parts import FFNS
from penstock.spec.places import GPU, HOST, Lane, disk_of, is_disk, kernels_of
from penstock.spec.plan import Plan, Unit


class _PassSize(NamedTuple):
    """The size of a pass, averaged over all passes of its kind.

    purpose         "prefill" or "decode"
    batches         batches in the pass
    rows            rows of a batch
    seqs            sequences of a batch
    pairs           (row, position) pairs of a sequence: each row attends to all positions before it
    """

    purpose: str
    batches: int
    rows: int
    seqs: int
    pairs: float


def score_s(prediction: Prediction, plan: Plan, ask: Ask) -> float:
    """The seconds that the ask's objective minimises. For latency, these are the seconds of all answers; a plan that
    holds fewer sequences than were asked for takes several rounds. For throughput, they are the seconds of one
    generated token, with its share of the prompts' time."""
    return _score_s(prediction.total_s, plan, ask)


def least_score_s(plan: Plan, ask: Ask, cost: Cost) -> float:
    """A lower bound of `score_s`, in seconds."""
    seqs = sequences(plan, ask)
    batches = -(-seqs // plan.batch_seqs)
    together = min(seqs, plan.batch_seqs)
    prompt, _ = prompt_and_half_way(ask, plan.context)
    passes = -(-together * prompt // plan.chunk_rows)
    wanted = (
        _PassSize("prefill", batches, together * prompt // passes, together, prompt * (prompt + 1) / 2 / passes),
        _PassSize("decode", batches, together, together, prompt),
    )
    prompt_s, token_s = _busiest_s(plan, cost, wanted, staying(plan, ask))
    return _score_s(passes * prompt_s + ask.output_tokens * token_s, plan, ask)


def reads_bytes(plan: Plan, ask: Ask) -> int:
    """Bytes that a decode pass half-way through the output reads from disks."""
    return sum(streamed(plan, from_disk=True, without=staying(plan, ask)).values())


def sequences(plan: Plan, ask: Ask) -> int:
    """How many of the sequences that were asked for go through one pass of the plan."""
    return plan.at_once(ask.batch, ask.sequence_tokens)


def _score_s(total_s: float, plan: Plan, ask: Ask) -> float:
    rounds = -(-ask.batch // sequences(plan, ask))
    return total_s * rounds if ask.objective == "latency" else total_s / (sequences(plan, ask) * ask.output_tokens)


def _busiest_s(plan: Plan, cost: Cost, wanted: Sequence[_PassSize], there: Collection[int]) -> list[float]:
    """For each of the passes `wanted`, the seconds of its busiest lane. A unit crosses a lane once a pass, and is
    computed once a batch. Norms, moves of KV and copies are left out, so the sum stays a lower bound. `there`: units
    that are not loaded, since they stay in KV pages."""
    spec, lanes = plan.target.spec, [defaultdict[str, float](float) for _ in wanted]
    kinds = {
        key: (part.kind, id(spec.layers[part.layer]), part.granules, part.granule_bytes, part.kinds())
        for key, part in plan.parts.items()
        if part.kind in ("attn", *FFNS) or key == head_key(spec)
    }
    # Most of a plan's thousands of units are alike, so their seconds are known already.
    known: dict[tuple[object, ...], list[tuple[dict[str, float], str, float]]] = {}
    for u, unit in enumerate(plan.units):
        kind = kinds.get(unit.part)
        if kind is not None:
            tail = unit.hi == kind[2]  # the last granule may have fewer rows
            home = unit.decode if u in there else unit.home
            alike = (kind, unit.hi - unit.lo, tail, home, unit.decode, unit.prefill, unit.active, unit.asked)
            if alike not in known:
                known[alike] = [
                    (into, *each)
                    for into, p in zip(lanes, wanted, strict=True)
                    for each in _unit_s(plan, replace(unit, home=home), cost, p)
                ]
            for into, lane, seconds in known[alike]:
                into[lane] += seconds
    for into, p in zip(lanes, wanted, strict=True):
        for lane, seconds in _attention_s(plan, cost, p):
            into[lane] += seconds
    return [max(each.values(), default=0.0) for each in lanes]


def _attention_s(plan: Plan, cost: Cost, p: _PassSize) -> Iterator[tuple[Lane, float]]:
    """(lane, seconds) of attention to all positions before. It is most of the work of a prompt of 131,072 tokens.
    Layers with a window are left out, and so are layers whose attention is not computed where the activations are."""
    for home in plan.kv:
        if home.attend != plan.main:
            continue
        layers = Counter(layer.attention for layer in plan.target.spec.layers[slice(*home.layers)])
        for a, count in layers.items():
            if not a.window:
                flops = (2 + 2 * plan.value_share) * p.seqs * p.pairs * a.heads * a.head_dim
                rows = max(1, p.rows // p.seqs)
                lane = kernels_of(home.attend)
                yield lane, count * p.batches * cost.least_s(lane, "attend", home.format.kind, rows, 0, flops)


def _unit_s(plan: Plan, unit: Unit, cost: Cost, p: _PassSize) -> Iterator[tuple[Lane, float]]:
    """(lane, seconds) that a unit takes in a pass: of its products, of its load and of its lift."""
    part, executor, home, rows = plan.parts[unit.part], unit.executor(p.purpose), unit.home, p.rows
    cached = {f"{cache.layer}.experts" for cache in plan.caches}
    there = {f"{cache.layer}.experts" for cache in plan.caches if cache.executor != HOST}
    if p.purpose == "prefill" and part.layer < 0:
        return  # the head, which is computed for the last row of a prompt only
    if p.purpose == "prefill" and plan.device_rows and unit.decode != unit.prefill:
        return  # its rows may be shared, or all the CPU's
    lane = kernels_of(executor)
    nbytes, active = plan.unit_bytes(unit), unit.active if p.purpose == "decode" else 1.0
    routed = plan.target.spec.layers[part.layer].routed
    if p.purpose == "decode" and part.key in there:
        return  # at best all are in the device's cache, or the CPU computes them all
    if part.kind == "experts" and routed is not None:
        read, flops, expert_rows = ops.experts_cost(part, routed, unit.lo, unit.hi, ops.FFN_BLOCKS, rows)
        fmt = part.kinds(ops.FFN_BLOCKS)
        yield lane, p.batches * cost.least_s(lane, "experts", fmt, expert_rows, read, flops)
    else:
        calls = [
            (op, part.kinds(blocks), ops.matrix_cost(part, unit.lo, unit.hi, blocks, rows))
            for op, blocks in ((op, ops.PRODUCTS[op]) for op in _PRODUCTS_OF[part.kind])
        ]
        if active < 1 and plan.activates_all(part):
            activated = ops.matrix_cost(part, unit.lo, unit.hi, (part.blocks[0].name,), rows)
            calls = [(op, fmt, ops.fired_cost(whole, activated, active)) for op, fmt, whole in calls]
            active = 1.0
        # By neurons' rows, bytes come as those of one row do (`Cost`).
        like = 1 if part.by_neurons and p.purpose == "decode" else rows
        seconds = (cost.least_s(lane, op, fmt, like, active * read, active * flops) for op, fmt, (read, flops) in calls)
        yield lane, p.batches * sum(seconds)
    asks = unit.part in cached or unit.asked
    if is_disk(home) and not (
        p.purpose == "decode" and asks
    ):  # at best all wanted experts are cached, and nobody fires
        reads = disk_of(home).reads
        yield reads, cost.least_s(reads, "load", part.kinds(), 1, nbytes)
    if executor == GPU.executor != home:
        yield GPU.to_device, cost.least_s(GPU.to_device, "lift", part.kinds(), 1, nbytes)


# Kind of a part → the products that are computed with it.
_PRODUCTS_OF = {"attn": ("qkv", "out"), "ffn": ("ffn",), "shared": ("ffn",), "embed": ("head",), "head": ("head",)}
