"""What a batch is foretold: lengths, beginnings that lines share, and how it goes on."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.pass_times import PassTimes
from penstock.planner.predict import predict
from penstock.serve.batch import foretelling
from penstock.serve.batch.foretelling import foretell, in_passes
from penstock.serve.batch.survey import Todo, _Beginnings
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from tests.plans import resident_plan
from tests.pure.machine import MACHINE, model

SPEC, WEIGHTS = model(layers=2), parse_format("float32")
PLAN = resident_plan(SPEC, WEIGHTS, batch_seqs=3, batches_per_pass=1, chunk_rows=16, logits_rows=3, context=256)
TIMES = PassTimes(PLAN, MACHINE, "prefill")


def line(prompt: int, output: int, beginning: int = -1, shared: int = 0, answers: int = 1) -> Todo:
    return Todo(0, answers, prompt * answers, output, beginning, 1, shared)


def test_one_line_takes_its_passes() -> None:
    found = in_passes(PLAN, TIMES, [line(20, 4)], 3)
    assert found.seconds == pytest.approx(TIMES.seconds(0, 16) + TIMES.seconds(0, 4) + 3 * TIMES.seconds(1, 0))
    assert found.ttft_s == pytest.approx(TIMES.seconds(0, 16) + TIMES.seconds(0, 4))
    assert found.left_s(0) == found.seconds and found.left_at_pace_s(0, 1.0) is None
    assert found.left_s(1) == 0 == found.left_at_pace_s(1, 1.0)


def test_what_lines_share_is_read_once() -> None:
    """Three lines with 128 tokens in common, and two answers to one prompt."""
    apart = in_passes(PLAN, TIMES, [line(160, 2)] * 3, 3)
    alike = in_passes(PLAN, TIMES, [line(160, 2, 7), line(160, 2, 7, 128), line(160, 2, 7, 128)], 3)
    assert alike.seconds < 0.8 * apart.seconds
    assert in_passes(PLAN, TIMES, [line(160, 2, answers=2)], 3).seconds < 0.9 * in_passes(
        PLAN, TIMES, [line(160, 2)] * 2, 3
    ).seconds  # fmt: skip


LINES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 14), st.integers(1, 2)), min_size=1, max_size=30)


@given(lengths=LINES)
@settings(max_examples=30)
def test_all_answers_end_in_order(lengths: list[tuple[int, int, int]]) -> None:
    todo = [line(prompt, output, answers=answers) for prompt, output, answers in lengths]
    found = in_passes(PLAN, TIMES, todo, 3)
    assert len(found.ends_s) == sum(each.answers for each in todo)
    assert all(0 < a <= b for a, b in zip(found.ends_s, found.ends_s[1:], strict=False))
    assert 0 < found.ttft_s <= found.ends_s[0]
    left = [found.left_s(n) for n in range(len(found.ends_s) + 1)]
    assert left == sorted(left, reverse=True) and left[-1] == 0


@st.composite
def of_several_prompts(draw: st.DrawFn) -> Todo:
    """A line of several prompts of any lengths, of which the first shares what it may."""
    lengths = draw(st.lists(st.integers(1, 120), min_size=1, max_size=6))
    copies, shared = draw(st.integers(1, 2)), draw(st.integers(0, lengths[0]))
    prompts = len(lengths)
    return Todo(0, prompts * copies, sum(lengths) * copies, draw(st.integers(1, 9)), 7, prompts, shared)


@given(todo=st.lists(of_several_prompts(), min_size=1, max_size=6))
@settings(max_examples=30)
def test_a_line_of_several_prompts_shares_of_its_first_alone(todo: list[Todo]) -> None:
    for each in todo:
        found = [ids for ids, _ in foretelling._requests([each])]
        assert sum(map(len, found)) == each.prompt_tokens and all(len(ids) for ids in found)
        copies = each.answers // each.prompts
        alike = sum(int((ids < 0).sum()) for ids in found[::copies])
        rows = each.prompt_tokens // copies - each.shared_tokens + each.answers * (each.output_tokens - 1)
        assert foretelling._rows(each) == rows >= 0
        assert alike == (each.shared_tokens or len(found[0]))
    ends_s = in_passes(PLAN, TIMES, todo, 3).ends_s
    assert len(ends_s) == sum(each.answers for each in todo)
    assert all(0 < a <= b for a, b in pairwise(ends_s))


def test_no_batch_is_foretold_less_than_no_time() -> None:
    """One prompt of a hundred shares 1,000 tokens, and the others have 20 each: less than it shares."""
    todo = Todo(1, 100, 2990, 1, 7, 100, 1000)
    ask = Ask(prompt_tokens=16, output_tokens=6, batch=6, context=256)
    plan = resident_plan(SPEC, WEIGHTS, batch_seqs=3, batches_per_pass=2, chunk_rows=16, logits_rows=3, context=256)
    assert foretell(plan, predict(plan, ask, MACHINE), ask, MACHINE, [todo]).seconds > 0


def test_the_rest_goes_on_at_the_same_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    todo = [line(16, 6)] * 90
    whole = in_passes(PLAN, TIMES, todo, 3)
    monkeypatch.setattr(foretelling, "_MOST_PASSES", 40)
    short = in_passes(PLAN, TIMES, todo, 3)
    assert len(short.ends_s) == 90 and short.seconds == pytest.approx(whole.seconds, rel=0.1)
    monkeypatch.setattr(foretelling, "_MOST_PASSES", 1)  # before any answer is whole
    assert len(in_passes(PLAN, TIMES, todo, 3).ends_s) == 90


def test_a_block_of_several_batches_goes_as_its_plan_is_predicted() -> None:
    ask = Ask(prompt_tokens=16, output_tokens=6, batch=6, context=256)
    plan = resident_plan(SPEC, WEIGHTS, batch_seqs=3, batches_per_pass=2, chunk_rows=16, logits_rows=3, context=256)
    prediction = predict(plan, ask, MACHINE)
    found = foretell(plan, prediction, ask, MACHINE, [line(16, 6)] * 12)
    assert found.seconds == pytest.approx(2 * prediction.total_s)
    half = foretell(plan, prediction, ask, MACHINE, [line(16, 3)] * 12)
    assert found.seconds / 2 < half.seconds < found.seconds
    shared = [line(16, 6, 7), *[line(16, 6, 7, shared=8)] * 11]
    assert foretell(plan, prediction, ask, MACHINE, shared).seconds < found.seconds


def test_beginnings() -> None:
    known = _Beginnings()
    first = list(range(100))
    assert known.shared(-1, first) == known.shared(5, first) == 0
    assert known.shared(5, [*first[:70], 3, 4]) == 70 and known.shared(5, first) == 100
    assert known.shared(6, [*first[:70], 3]) == 0
    assert known.shared(5, [2**40]) == 0


def test_it_says_how_far_it_is() -> None:
    told: list[tuple[int, int]] = []
    in_passes(PLAN, TIMES, [line(30, 5)] * 40, 3, lambda _, done, total: told.append((done, total)))
    assert len(told) > 3 and told[0] == (0, 40)
    assert all(a[0] <= b[0] <= 40 == b[1] for a, b in pairwise(told))
