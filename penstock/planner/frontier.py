"""The frontier of throughput: seconds that a block of sequences takes, against tokens a second (FlexGen, Figure 1).

A larger block takes longer, and what streams crosses for more tokens. The points are those that no other point beats in
both. Beside each stand the bytes that cross into memories where the plan computes, a token, and the fewest bytes that
any order of computing could do with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.planner.bound import sequences
from penstock.planner.candidate import Compared
from penstock.planner.explain import limits, rate
from penstock.planner.shorten import streamed
from penstock.planner.solve import Solved
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.places import HOST, Tier
from penstock.spec.plan import KvHome, Plan
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
    spec, parts = plan.target.spec, plan.parts
    # Of FFNs whose neurons fire, no token needs all. A part that the plan computes in RAM is near there.
    whole = ("attn",) if spec.fires else ("attn", "ffn", "shared")
    weights_bytes = sum(part.nbytes for part in parts.values() if part.kind in whole)
    near = {plan.main, *(unit.executor("decode") for unit in plan.units if parts[unit.part].kind in whole)}
    near_bytes = sum(memories[executor] for executor in near)
    return Point(
        candidate.strategy, seqs, prediction.total_s, seqs * ask.output_tokens / prediction.total_s,
        moved_bytes(compared, ask), least_bytes(weights_bytes, near_bytes, ask.batch),
    )  # fmt: skip


def least_bytes(weights_bytes: int, near_bytes: int, seqs: int) -> float:
    """The fewest bytes of weights a token that any order of computing moves into a memory of `near_bytes`, if every
    token of `seqs` sequences needs all of the weights.

    Take any time in which fewer bytes are moved than the weights less the memory. The bytes that were in the memory
    then, and those that came, are fewer than all weights. So no sequence got through all layers of a token in that
    time, whatever the order.
    """
    return max(0, weights_bytes - near_bytes) / seqs


def moved_bytes(compared: Compared, ask: Ask) -> float:
    """Bytes that a decode pass moves into memories where the plan computes, a token: weights that stream, and KV that
    is attended elsewhere than at home."""
    plan = compared.candidate.plan
    if plan.main == HOST:
        return compared.prediction.disk_bytes_per_token
    seqs = sequences(plan, ask)
    tokens = min(ask.prompt_tokens + ask.output_tokens // 2, plan.context)
    kv = sum(_kv_bytes(plan, home, tokens) for home in plan.kv if home.attend != home.home)
    return sum(streamed(plan).values()) / seqs + kv


def _kv_bytes(plan: Plan, home: KvHome, tokens: int) -> float:
    """Bytes of KV of one sequence of so many tokens, in the layers of `home`. If `home` has only some of the sequences,
    it is the average over all."""
    lo, hi = home.layers
    attention = [layer.attention for layer in plan.target.spec.layers[lo:hi]]
    a_token = sum(2 * a.kv_heads * home.format.kv_bytes(a.head_dim) for a in attention)
    return tokens * a_token * (home.seqs[1] - home.seqs[0]) / (plan.batch_seqs * plan.batches_per_pass)


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
