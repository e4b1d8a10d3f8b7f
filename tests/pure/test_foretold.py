"""A scheduler on a virtual clock, whose passes take what the planner predicts; `bench.serve` has a server beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.graph.arenas import with_arenas
from penstock.planner.pass_times import LEAST_PASSES, PassTimes
from penstock.serve.foretold import Arrival, foretell, newcomer
from penstock.serve.pages import Ids
from penstock.serve.scheduler import Scheduler
from penstock.serve.steps import Rows
from penstock.spec.format import parse_format
from tests.plans import resident_plan
from tests.pure.machine import MACHINE, model

SPEC, WEIGHTS = model(layers=2), parse_format("float32")
PLAN = resident_plan(SPEC, WEIGHTS, batch_seqs=3, batches_per_pass=1, chunk_rows=16, logits_rows=3, context=64)
TIMES = PassTimes(PLAN, MACHINE)


def test_one_request_alone_takes_its_passes() -> None:
    (found,) = foretell(PLAN, TIMES, 8, [Arrival(5.0, 20, 4)])
    assert found.wait_s == 0
    reading = TIMES.seconds(0, 16) + TIMES.seconds(0, 4)  # alone a prompt has the plan's chunks
    assert abs(found.ttft_s - reading) < 1e-9
    assert abs(found.all_s - found.ttft_s - 3 * TIMES.seconds(1, 0)) < 1e-9


ARRIVALS = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=30)


@given(gaps=ARRIVALS)
@settings(max_examples=max(500, settings().max_examples))
def test_traces_end_and_who_waits_has_a_reason(gaps: list[tuple[float, int, int]]) -> None:
    scale = TIMES.seconds(3, 0) * 4
    arrivals, at_s = [], 0.0
    for gap, prompt, output in gaps:
        at_s += gap * scale
        arrivals.append(Arrival(at_s, prompt, output))
    found = foretell(PLAN, TIMES, 8, arrivals)
    for each in found:
        assert 0 <= each.wait_s < each.ttft_s <= each.all_s
    for i, (arrival, each) in enumerate(zip(arrivals, found, strict=True)):
        others = sum(
            other.at_s + o.all_s > arrival.at_s
            for j, (other, o) in enumerate(zip(arrivals, found, strict=True)) if j < i
        )  # fmt: skip
        if others == 0:
            assert each.wait_s == 0


def duration_s(rows: list[Rows]) -> float:
    return TIMES.seconds(sum(not r.reads for r in rows), sum(r.tokens for r in rows if r.reads))


REQUESTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 20)), min_size=0, max_size=12)


@settings(max_examples=max(500, settings().max_examples))
@given(before=REQUESTS, passes=st.integers(0, 30), prompt=st.integers(1, 40), output=st.integers(1, 24))
def test_a_newcomer_finds_what_was_foretold(
    before: list[tuple[int, int, int]], passes: int, prompt: int, output: int
) -> None:
    """Some requests, of which some share their prompt, are answered for a while. Then one more comes in the middle of a
    pass. The scheduler goes on as its twin did."""
    plan = with_arenas(replace(PLAN, page_tokens=8, kv_pages=10))
    prompts = {i: np.full(tokens, -1 - kind, np.int32) for i, (kind, tokens, _) in enumerate(before)}
    new = len(before)
    prompts[new] = np.full(prompt, -1 - new, np.int32)

    def ids(number: int, start: int, count: int) -> Ids:
        known = prompts[number][start : start + count]
        return np.concatenate([known, np.full(count - len(known), -1 - number, np.int32)])

    scheduler = Scheduler(plan, 8, 20, ids)
    left = {i: tokens for i, (_, _, tokens) in enumerate(before)}
    for i in left:
        scheduler.submit(i, prompts[i], 0, 0.0)
    now_s, ends, first_s, begun_s = 0.0, list[int](), dict[int, float](), dict[int, float]()

    def step() -> tuple[list[Rows], float]:
        nonlocal ends
        scheduler.end(ends)
        found = scheduler.next(now_s)
        rows = [each for members in found.rows for each in members] if found else []
        for each in rows:
            begun_s.setdefault(each.request, now_s)
            left[each.request] -= each.says
            if each.says:
                first_s.setdefault(each.request, now_s + duration_s(rows))
        ends = [each.request for each in rows if left[each.request] <= 0]
        return rows, duration_s(rows) if rows else 0.0

    took_s = 0.0
    for _ in range(passes):
        now_s += took_s
        _, took_s = step()
    came_s = now_s + took_s / 2
    twin = scheduler.twin()
    told = newcomer(twin, TIMES, dict(left), prompt, min(output, 64 - prompt + 1), came_s)
    left[new] = min(output, 64 - prompt + 1)
    for request in ends:
        left.pop(request)
    scheduler.end(ends)
    ends = []
    scheduler.submit(new, prompts[new], 0, came_s)
    assert told.place == scheduler.place(new, came_s)
    now_s += took_s
    end_s = now_s
    while left.get(new, 0) > 0:
        _, took_s = step()
        now_s = end_s = now_s + took_s
    assert told.wait_s == pytest.approx(begun_s[new] - came_s)
    assert told.ttft_s == pytest.approx(first_s[new] - came_s)
    if end_s > first_s[new]:
        assert told.tokens_per_s == pytest.approx((min(output, 64 - prompt + 1) - 1) / (end_s - first_s[new]))


def test_passes_that_were_measured_correct_those_like_them() -> None:
    plain, times = PassTimes(PLAN, MACHINE), PassTimes(PLAN, MACHINE)
    for _ in range(LEAST_PASSES - 1):
        times.note(2, 0, 7.0)
    assert times.seconds(2, 0) == plain.seconds(2, 0)  # too few
    times.note(2, 0, 9.0)
    assert times.seconds(2, 0) == pytest.approx(7.5)  # the mean
    assert times.seconds(3, 0) / plain.seconds(3, 0) == pytest.approx(7.5 / plain.seconds(2, 0))
    assert times.seconds(1, 5) == plain.seconds(1, 5) and times.seconds(0, 0) == 0.0
    for _ in range(LEAST_PASSES):
        times.note(1, 8, 2 * plain.seconds(1, 8))
    assert times.seconds(1, 5) == pytest.approx(2 * plain.seconds(1, 5))
    for rows in range(1, 200):
        for _ in range(LEAST_PASSES):
            times.note(1, rows, 1.0)
    assert len(times.measured) == len(times._took) == 64 and times.measured[1, 199] == (1.0, LEAST_PASSES)


def test_a_kind_that_came_often_says_more_than_one_like_it_and_a_standstill_little() -> None:
    """Both kinds take twice as long as predicted; the second one's first passes came in a moment of three times."""
    plain, times = PassTimes(PLAN, MACHINE), PassTimes(PLAN, MACHINE)
    for _ in range(32):
        times.note(2, 0, 2 * plain.seconds(2, 0))
    for _ in range(LEAST_PASSES):
        times.note(3, 0, 3 * plain.seconds(3, 0))
    few = times.seconds(3, 0) / plain.seconds(3, 0)
    assert 2 < few < 3 and times.seconds(2, 0) / plain.seconds(2, 0) < 2.2
    for _ in range(40):
        times.note(3, 0, 2 * plain.seconds(3, 0))
    assert times.seconds(3, 0) / plain.seconds(3, 0) == pytest.approx(2)
    times.note(3, 0, 1000 * plain.seconds(3, 0))
    assert times.seconds(3, 0) / plain.seconds(3, 0) < 2.2
