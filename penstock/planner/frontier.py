"""The frontier of throughput: seconds that a block of sequences takes, against tokens a second (FlexGen, Figure 1).

A larger block takes longer, and what streams crosses for more tokens. The points are those that no other point beats in
both. Beside each stand the bytes of weights and KV that cross into memories where the plan computes, a token, and the
fewest bytes that any order could do with, where the same parts are computed by the same executors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.planner.bound import sequences
from penstock.planner.candidate import Compared
from penstock.planner.explain import limits, rate
from penstock.planner.predict import half_way
from penstock.planner.shorten import kv_moved, streamed
from penstock.planner.solve import Solved
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.part_keys import head_key
from penstock.spec.places import HOST, Executor, Tier
from penstock.spec.plan import Plan
from penstock.units import format_bytes, format_seconds

# Each further ask has so many times fewer sequences, and takes as long as a plan of its own.
_SMALLER, _MOST_ASKS = 4, 5


@dataclass(frozen=True, slots=True)
class Point:
    """One plan. `seqs`: sequences of its block; `block_s`: seconds until all their answers are there; `moved_bytes` and
    `least_bytes`: a token, of the plan and of any order (`least_bytes`)."""

    strategy: str
    seqs: int
    block_s: float
    tokens_per_s: float
    moved_bytes: float
    least_bytes: float


def smaller(ask: Ask) -> Iterator[Ask]:
    """The same ask for fewer sequences: a quarter, and so on down to one."""
    batch = ask.batch
    for _ in range(_MOST_ASKS - 1):
        if batch == 1:
            return
        batch = max(1, batch // _SMALLER)
        yield replace(ask, batch=batch)


def frontier(solved: Solved, ask: Ask, machine: MachineSpec, again: Callable[[Ask], Solved]) -> tuple[Point, ...]:
    """The points that no other one beats in both, the shortest block first. `ask`: what `solved` answers. `again`:
    solves for fewer sequences. Plans that this version cannot run are left out, and lossy ones."""
    memories = {limit.tier: limit.limit_bytes for limit in limits(solved, ask, machine)}
    asks = [(ask, solved.compared), *((fewer, again(fewer).compared) for fewer in smaller(ask))]
    return unbeaten(
        [
            point(each, asked, memories)
            for asked, compared in asks
            for each in compared
            if not each.candidate.lossy and not each.candidate.cannot_run
        ]
    )


def unbeaten(points: Sequence[Point]) -> tuple[Point, ...]:
    """Those of which no other is both as short and as fast, the shortest first."""
    best: list[Point] = []
    for each in sorted(points, key=lambda each: (each.block_s, -each.tokens_per_s)):
        if not best or each.tokens_per_s > best[-1].tokens_per_s:
            best.append(each)
    return tuple(best)


def point(compared: Compared, ask: Ask, memories: Mapping[Tier, int]) -> Point:
    """The point of a plan with its prediction. `memories`: tier → limit in bytes."""
    candidate, prediction = compared
    plan, seqs = candidate.plan, sequences(candidate.plan, ask)
    weights_bytes, kv_bytes = needed_bytes(plan, ask)
    least = 0.0
    for executor in {*weights_bytes, *kv_bytes}:
        near_bytes = memories[executor] - (plan.process_bytes if executor == HOST else plan.context_bytes)
        least += least_bytes(weights_bytes[executor], near_bytes, ask.batch, kv_bytes[executor])
    return Point(
        candidate.strategy, seqs, prediction.total_s, seqs * ask.output_tokens / prediction.total_s,
        moved_bytes(compared, ask), least,
    )  # fmt: skip


def needed_bytes(plan: Plan, ask: Ask) -> tuple[Counter[Executor], Counter[Executor]]:
    """(executor → bytes of weights that it needs for every token, executor → bytes of KV of one sequence that it
    attends to half-way through the output). Of FFNs whose neurons fire, and of experts, no token needs all, so they
    are left out."""
    spec, parts = plan.target.spec, plan.parts
    whole = ("attn",) if spec.fires else ("attn", "ffn", "shared")
    weights_bytes, kv_bytes = Counter[Executor](), Counter[Executor]()
    for unit in plan.units:
        part = parts[unit.part]
        if part.kind in whole or part.key == head_key(spec):
            weights_bytes[unit.executor("decode")] += (unit.hi - unit.lo) * part.granule_bytes
    tokens = half_way(plan, ask).batches[0].start[0]
    values = (1 + plan.value_share) / 2  # of sparse attention, all of K and a share of V
    for home in plan.kv:
        share = (home.seqs[1] - home.seqs[0]) / plan.sequences
        for layer in spec.layers[slice(*home.layers)]:
            a = layer.attention
            seen = min(tokens, a.window or tokens)
            kv_bytes[home.attend] += int(share * values * seen * 2 * a.kv_heads * home.format.kv_bytes(a.head_dim))
    return weights_bytes, kv_bytes


def least_bytes(weights_bytes: int, near_bytes: int, seqs: int, kv_bytes: int = 0) -> float:
    """The fewest bytes a token that any order of decoding moves into a memory of `near_bytes`, if every token of `seqs`
    sequences needs all of the weights there, and `kv_bytes` of its own sequence.

    Cut the time into pieces. A piece ends as soon as any sequence has got through as many layers as a token has. By
    then all weights were needed, and no sequence has got more than a token: together they got p tokens, from 1 to
    `seqs`, and needed p times the KV. What was there at the beginning is no more than the memory. So at least
    weights + p · KV - memory came, for p tokens. For a token that is least with all sequences if the weights alone are
    more than the memory, and else with one.
    """
    return min(max(0, weights_bytes + p * kv_bytes - near_bytes) / p for p in (1, seqs))


def moved_bytes(compared: Compared, ask: Ask) -> float:
    """Bytes that a decode pass moves into memories where the plan computes, a token: weights that stream, experts that
    caches miss, and KV that is attended elsewhere than at home."""
    plan, prediction = compared.candidate.plan, compared.prediction
    if plan.main == HOST:
        return prediction.disk_bytes_per_token
    experts = prediction.experts.loaded_bytes if prediction.experts is not None else 0.0
    return (sum(streamed(plan).values()) + kv_moved(plan, ask)) / sequences(plan, ask) + experts


def table(points: Sequence[Point]) -> str:
    """A line for each point. It has no newline at its end."""
    width = max(28, *(len(each.strategy) for each in points))
    lines = [f"{'frontier, the shortest first':{width}}{'sequences':>11}{'a block':>10}{'tokens/s':>10}"
             f"{'moved a token':>15}{'any order':>12}"]  # fmt: skip
    lines += [
        f"{each.strategy:{width}}{each.seqs:>11}{format_seconds(each.block_s):>10}{rate(each.tokens_per_s):>10}"
        f"{format_bytes(each.moved_bytes):>15}{'≥ ' + format_bytes(each.least_bytes):>12}"
        for each in points
    ]
    return "\n".join(lines)


def to_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The points as they stand in `plan --json`."""
    return [asdict(each) for each in points]
