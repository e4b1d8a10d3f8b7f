"""The frontier of throughput, and FlexGen's claim that blocks of batches move at most twice what the best order does,
by trying all orders of small grids."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import pytest

from penstock.planner.frontier import Point, frontier, least_bytes, smaller, table, to_json, unbeaten
from penstock.planner.picture import svg
from penstock.planner.solve import Solved, settle_context, solve
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.units import GIB
from tests.pure.machine import LLAMA_1B, MACHINE

GRIDS = list(product((1, 2, 3), (1, 2, 3), (1, 2)))  # layers, batches, tokens
ASK = Ask(
    host_memory_bytes=GIB, batch=32, prompt_tokens=64, output_tokens=16, context=128, objective="throughput",
    use_device=False,
)  # fmt: skip


def held(done: int, layers: int, tokens: int, prompt: int) -> int:
    """KV that a batch holds in all layers, in tokens: from its first square to its last, of its prompt and of the
    tokens that it has begun."""
    return 0 if done in (0, layers * tokens) else layers * (prompt + -(-done // layers))


@cache
def best_loads(layers: int, batches: int, tokens: int, near: int, prompt: int, room: int) -> int | None:
    """The fewest loads of a layer with which any order computes all squares (layer, batch, token). A batch's squares
    come layer by layer, token by token. `near`: so many layers fit where squares are computed; `room`: for KV, which
    stays until its batch is done. None: no order has the room. By breadth over all states, a load being one step."""
    squares = layers * tokens
    begin = ((0,) * batches, frozenset[int]())
    seen, waiting = set[tuple[tuple[int, ...], frozenset[int]]](), deque([(begin, 0)])
    while waiting:
        state, loads = waiting.popleft()
        if state in seen:
            continue
        seen.add(state)
        done, there = state
        if all(n == squares for n in done):
            return loads
        for i, n in enumerate(done):
            if n < squares and n % layers in there and _fits(done, i, layers, tokens, prompt, room):
                after = tuple(sorted((*done[:i], n + 1, *done[i + 1 :])))  # batches are alike
                waiting.appendleft(((after, there), loads))
        for layer in set(range(layers)) - there:
            for gone in there if len(there) == near else (None,):
                waiting.append(((done, there - {gone} | {layer}), loads + 1))
    return None


def _fits(done: tuple[int, ...], i: int, layers: int, tokens: int, prompt: int, room: int) -> bool:
    """Whether there is room for KV while batch `i` computes its next square."""
    others = sum(held(n, layers, tokens, prompt) for j, n in enumerate(done) if j != i)
    return others + layers * (prompt + done[i] // layers + 1) <= room


def in_blocks(layers: int, batches: int, tokens: int, near: int, block: int) -> int:
    """Loads of our order: a block's batches go through each layer together, `near` - 1 layers stay, all others come
    through the place of one, once a token."""
    if near >= layers:
        return layers
    return near - 1 + -(-batches // block) * tokens * (layers - near + 1)


@pytest.mark.parametrize(("layers", "batches", "tokens"), GRIDS)
def test_within_two_of_the_best_order(layers: int, batches: int, tokens: int) -> None:
    """Every memory for layers, every room for KV, prompts shorter and longer than the answer."""
    for near, prompt in product(range(1, layers + 1), (1, 2, 4)):
        most = layers * (prompt + tokens)
        for room in range(most, most * batches + 1):
            best = best_loads(layers, batches, tokens, near, prompt, room)
            ours = in_blocks(layers, batches, tokens, near, min(batches, room // most))
            assert best is not None
            assert best <= ours <= 2 * best, (near, prompt, room)


@pytest.mark.parametrize(("layers", "batches", "tokens"), GRIDS)
def test_no_order_is_below_the_bound(layers: int, batches: int, tokens: int) -> None:
    """With room for all KV, which is where any order loads least."""
    for near in range(1, layers + 1):
        best = best_loads(layers, batches, tokens, near, 1, layers * (1 + tokens) * batches)
        assert best is not None and best >= least_bytes(layers, near, batches) * batches * tokens


def one(strategy: str, block_s: float, tokens_per_s: float) -> Point:
    return Point(strategy, 1, block_s, tokens_per_s, 2.0, 1.0)


def test_what_another_beats_is_left_out() -> None:
    points = [one("slow", 4, 2), one("short", 1, 1), one("same, slower", 1, 0.5), one("long", 8, 5), one("worse", 9, 5)]
    assert [each.strategy for each in unbeaten(points)] == ["short", "slow", "long"]
    assert unbeaten([]) == ()


def test_smaller_asks_end_at_one_sequence() -> None:
    assert [each.batch for each in smaller(replace(ASK, batch=10))] == [2, 1]
    assert len(list(smaller(replace(ASK, batch=1 << 14)))) == 4
    assert not list(smaller(replace(ASK, batch=1)))


@cache
def solved() -> tuple[Solved, tuple[Point, ...]]:
    def again(ask: Ask) -> Solved:
        return solve(ask, LLAMA_1B, Format("bfloat16"), MACHINE)

    found = solve(ASK, LLAMA_1B, Format("bfloat16"), MACHINE, every=True)
    return found, frontier(found, ASK, MACHINE, again)


def test_longer_blocks_are_faster_and_move_less_a_token() -> None:
    _, points = solved()
    assert len(points) > 1 and points[0].seqs < points[-1].seqs <= ASK.batch
    assert all(a.block_s < b.block_s and a.tokens_per_s < b.tokens_per_s for a, b in pairwise(points))
    assert points[0].moved_bytes > points[-1].moved_bytes
    assert all(0 < each.least_bytes <= each.moved_bytes for each in points)
    assert all(each.tokens_per_s == pytest.approx(each.seqs * 16 / each.block_s) for each in points)
    lines = table(points).splitlines()
    assert len(lines) == len(points) + 1 and len({len(line) for line in lines}) == 1
    assert [row["seqs"] for row in to_json(points)] == [each.seqs for each in points]


def test_the_picture_has_each_point() -> None:
    found, points = solved()
    ask = settle_context(ASK, LLAMA_1B)
    drawn, without = svg(found, ask, MACHINE, points=points), svg(found, ask, MACHINE)
    assert drawn.count("<circle") == len(points) and "<circle" not in without
    assert all(f"{each.seqs} sequence" in drawn for each in points) and "Frontier" not in without
