"""The frontier of throughput, and FlexGen's claim that blocks of batches move at most twice what the best order does,
by trying all orders of small grids."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise, product

import pytest

from penstock.planner.explain import limits
from penstock.planner.frontier import (
    Point,
    frontier,
    least_bytes,
    moved_bytes,
    needed_bytes,
    point,
    smaller,
    table,
    to_json,
    unbeaten,
)
from penstock.planner.picture import svg
from penstock.planner.shorten import kv_moved, quick
from penstock.planner.solve import Solved, settle_context, solve
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.units import GIB, round_up
from tests.pure.machine import LLAMA_1B, MACHINE, WITH_DEVICE

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


SHARED = [(x, y, z) for x, y, z in product((1, 2, 3), (1, 2, 3), (1, 2)) if x * y * z < 7]  # layers, batches, tokens


@cache
def best_moves(layers: int, batches: int, tokens: int, near: int, kv: int) -> int | None:
    """The fewest bytes with which any order computes all squares, from an empty memory of `near`. A square needs its
    layer's weights, of 2 bytes, and its batch's KV of the layer, of `kv`. What goes out costs nothing. By the fewest
    bytes over all states. None: no square has the room."""
    if 2 + kv > near:
        return None
    sizes = {layer: 2 for layer in range(layers)}
    sizes |= {layers + batch * layers + layer: kv for batch in range(batches) for layer in range(layers)}
    squares, seen = layers * tokens, set[tuple[tuple[int, ...], frozenset[int]]]()
    waiting: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = [(0, (0,) * batches, ())]
    while waiting:
        moved, done, items = heappop(waiting)
        there = frozenset(items)
        if (done, there) in seen:
            continue
        seen.add((done, there))
        if all(n == squares for n in done):
            return moved
        for batch, n in enumerate(done):
            if n < squares and {n % layers, layers + batch * layers + n % layers} <= there:
                heappush(waiting, (moved, (*done[:batch], n + 1, *done[batch + 1 :]), items))
        free = near - sum(sizes[item] for item in there)
        for item in sizes.keys() - there:
            if sizes[item] <= free:
                heappush(waiting, (moved + sizes[item], done, tuple(sorted(there | {item}))))
        for item in there if free < max(2, kv) else ():
            heappush(waiting, (moved, done, tuple(sorted(there - {item}))))
    return None


@pytest.mark.parametrize(("layers", "batches", "tokens"), SHARED)
def test_no_order_is_below_the_bound_with_kv(layers: int, batches: int, tokens: int) -> None:
    """KV that has a home elsewhere comes to the same memory as weights."""
    for kv, near in product((1, 3), range(3, layers * (2 + 2 * batches))):
        best = best_moves(layers, batches, tokens, near, kv)
        if best is not None:
            assert best >= least_bytes(2 * layers, near, batches, layers * kv) * batches * tokens, (kv, near)


def test_the_bound_of_weights_and_kv() -> None:
    """Weights of 10 bytes, KV of 4 a sequence."""
    assert least_bytes(10, 6, 4) == least_bytes(10, 6, 4, 0) == 1
    assert least_bytes(10, 6, 4, 4) == (10 + 4 * 4 - 6) / 4  # all sequences share what comes of the weights
    assert least_bytes(10, 12, 4, 4) == 2  # one after the other: there is room for the weights and half a cache
    assert least_bytes(10, 14, 4, 4) == 0


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


def beside_a_device() -> tuple[Solved, Ask]:
    """More than device memory holds, and KV that is attended on either side."""
    ask = settle_context(replace(ASK, use_device=True, device_memory_bytes=GIB, host_memory_bytes=4 * GIB), LLAMA_1B)
    return solve(ask, LLAMA_1B, Format("bfloat16"), WITH_DEVICE, every=True), ask


def test_the_bound_is_of_what_each_executor_computes() -> None:
    """Weights that RAM has are near to the CPU, and not to the device."""
    found, ask = beside_a_device()
    memories = {limit.tier: limit.limit_bytes for limit in limits(found, ask, WITH_DEVICE)}
    crossing = 0
    for each in found.compared:
        plan = each.candidate.plan
        shown = point(each, ask, memories)
        assert 0 <= shown.least_bytes <= shown.moved_bytes
        weights, kv = needed_bytes(plan, ask)
        assert sum(weights.values()) <= sum(part.nbytes for part in plan.parts.values())
        assert set(kv) == {home.attend for home in plan.kv}
        if weights["gpu0"] > ask.device_memory_bytes:  # type: ignore[operator]
            crossing += 1
            assert shown.least_bytes > 0
    assert crossing


def test_kv_that_comes_counts_in_what_is_moved() -> None:
    """KV at home on the disk comes for every token: by short plans as by the whole plan."""
    ask = settle_context(replace(ASK, kv_home="disk", prompt_tokens=100), LLAMA_1B)
    solved = solve(ask, LLAMA_1B, Format("bfloat16"), MACHINE)
    plan = solved.plan
    seqs, layers = plan.at_once(ask.batch, ask.prompt_tokens + ask.output_tokens), LLAMA_1B.layers
    tokens = round_up(ask.prompt_tokens + ask.output_tokens // 2, plan.page_tokens)
    kv = sum(2 * tokens * a.kv_heads * plan.kv[0].format.kv_bytes(a.head_dim) for a in (x.attention for x in layers))
    assert kv_moved(plan, ask) == kv_moved(plan, ask, from_disk=True) == seqs * kv
    assert quick(plan, ask, MACHINE).disk_bytes_per_token >= kv
    assert moved_bytes(solved.compared[0], ask) == solved.prediction.disk_bytes_per_token


def test_the_picture_has_each_point() -> None:
    found, points = solved()
    ask = settle_context(ASK, LLAMA_1B)
    drawn, without = svg(found, ask, MACHINE, points=points), svg(found, ask, MACHINE)
    assert drawn.count("<circle") == len(points) and "<circle" not in without
    assert all(f"{each.seqs} sequence" in drawn for each in points) and "Frontier" not in without
