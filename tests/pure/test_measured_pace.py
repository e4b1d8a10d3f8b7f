"""Rows of prompts beside answers, corrected by what passes take. Passes are made up here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from penstock.planner.measured_pace import MeasuredPace
from penstock.planner.pace import LONGEST_GAP, room_for_prompts
from penstock.planner.solve import solve
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.plan import Plan
from tests.pure.machine import LLAMA_1B, MACHINE

SPEAKING = 7


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(Ask(batch=8, context=256, prompt_tokens=128), LLAMA_1B, parse_format("int4"), MACHINE).plan


def bound_by_arithmetic(speaking: int, rows: int) -> float:
    return 0.030 + 0.003 * (speaking + rows)


def streamed(speaking: int, rows: int) -> float:
    """Weights take 0.3 s to come, and arithmetic is hidden behind that at first."""
    return max(0.3, 0.006 * (speaking + rows))


def serve(pace: MeasuredPace, pass_s: Callable[[int, int], float], prompts: int = 40, speaking: int = SPEAKING) -> None:
    """Prompts of 20 passes and one that is not full, with as many passes without one between them."""
    for _ in range(prompts):
        for _ in range(20):
            pace.note(speaking, 0, pass_s(speaking, 0))
        for _ in range(20):
            pace.note(speaking, pace.rows, pass_s(speaking, pace.rows))
        if pace.rows > 1:
            pace.note(speaking, pace.rows - 1, 100.0)


@pytest.mark.parametrize("pass_s", [bound_by_arithmetic, streamed])
@pytest.mark.parametrize("begin", [1, 2, 6, 17, 60])
def test_rows_come_to_what_the_longest_gap_leaves(plan: Plan, begin: int, pass_s: Callable[[int, int], float]) -> None:
    pace = MeasuredPace(plan, begin)
    serve(pace, pass_s)
    longer = pass_s(SPEAKING, pace.rows) / pass_s(SPEAKING, 0) - 1
    assert longer <= 1.2 * (LONGEST_GAP - 1)
    one_more = pass_s(SPEAKING, pace.rows * 5 // 4 + 1) / pass_s(SPEAKING, 0) - 1
    assert one_more >= 0.6 * (LONGEST_GAP - 1) or pace.rows == room_for_prompts(plan)
    assert (pace.reason is None) == (pace.rows == begin)
    if pace.reason is not None:
        assert f"now {pace.rows} are read" in pace.reason


def test_rows_that_are_about_right_stay(plan: Plan) -> None:
    """1.44 times the gap is within the limit, and so is 1.53 in the machine's next spell."""
    for times in (1.35, 1.44, 1.53):
        pace = MeasuredPace(plan, 6)
        serve(pace, lambda speaking, rows, times=times: 0.05 * (times if rows else 1.0))  # type: ignore[misc]
        assert (pace.rows, pace.reason) == (6, None)


def test_passes_that_tell_nothing_change_nothing(plan: Plan) -> None:
    few = MeasuredPace(plan, 2)
    serve(few, bound_by_arithmetic, speaking=2)  # a row is a larger share of a small pass
    unknown = MeasuredPace(plan, 2)
    for _ in range(100):
        unknown.note(SPEAKING, 2, 0.05)  # no pass was without a prompt
    assert few.rows == unknown.rows == 2


def test_one_slow_spell_is_forgotten(plan: Plan) -> None:
    pace = MeasuredPace(plan, 6)
    serve(pace, lambda speaking, rows: 0.05 * (3.0 if rows else 1.0), prompts=2)
    assert pace.rows < 3
    serve(pace, bound_by_arithmetic, prompts=200)
    assert pace.rows >= 5


def test_a_slow_spell_of_the_fewest_rows_does_not_keep_them(plan: Plan) -> None:
    pace = MeasuredPace(plan, 1)
    serve(pace, lambda speaking, rows: 0.05 * (3.0 if rows else 1.0), prompts=4)
    assert pace.rows == 1
    serve(pace, bound_by_arithmetic, prompts=8)
    assert pace.rows > 4


class Routed(NamedTuple):
    """What is asked of a plan that keeps experts."""

    sequences: int = 8
    batch_seqs: int = 8
    chunk_rows: int = 64
    asking_rows: int = 16


@pytest.mark.parametrize("begin", [1, 4, 9, 10, 30])
def test_units_are_asked_for_rows_as_before(begin: int) -> None:
    """What a pass foretells of the next one depends on which side of `asking_rows` both are."""
    for pass_s in (lambda speaking, rows: 1.0, lambda speaking, rows: 1.0 + rows):
        pace = MeasuredPace(Routed(), begin)  # type: ignore[arg-type]
        serve(pace, pass_s)
        assert (pace.rows + 7 <= 16) == (begin + 7 <= 16)
        assert 1 <= pace.rows <= 57
