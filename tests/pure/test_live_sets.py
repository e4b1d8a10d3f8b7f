"""Sets of neurons that count: packed and read back, against sets of Python; files that make no sense."""

from __future__ import annotations

from array import array
from base64 import b64encode
from dataclasses import replace
from typing import Any
from zlib import compress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest
from penstock.graph import ops
from penstock.graph.batch import Batch
from penstock.graph.tasks import Call, Slot
from penstock.models import spec_from_config
from penstock.planner import recorded_sets
from penstock.planner.firing import expected
from penstock.planner.recorded_sets import firing_of, require_kind, trace_of
from penstock.planner.routing import Replay
from penstock.spec.answers import Recorder, RouterAnswers, dumps, loads
from penstock.spec.format import parse_format
from penstock.spec.live_sets import MOST_BYTES, LiveSets, most_tokens, numbers, row_bytes, shares_together
from penstock.spec.profile import FIRED_TOGETHER
from tests.plans import resident_plan
from tests.pure.real_models import TINY

SPEC = spec_from_config(TINY["opt"], "tiny")
NEURONS = SPEC.layers[0].ffns[0].neurons
sets_of = st.lists(st.sets(st.integers(0, NEURONS - 1), max_size=12), min_size=1, max_size=40)


def bits(live: set[int], neurons: int = NEURONS) -> bytes:
    return sum(1 << n for n in live).to_bytes(row_bytes(neurons), "little")


def recorded(sets: list[set[int]], foretold: bool = False) -> RouterAnswers:
    """The same of each layer, two rows at a time."""
    recorder = Recorder(SPEC, "m", foretold)
    for layer in range(len(SPEC.layers)):
        for lo in range(0, len(sets), 2):
            recorder.live(layer, [bits(live) for live in sets[lo : lo + 2]])
    return loads(dumps(recorder.answers()), "here")


@given(sets_of)
def test_a_record_has_the_neurons_of_each_token(sets: list[set[int]]) -> None:
    answers = recorded(sets)
    answers.check(SPEC, "here")
    for layer in answers.live:
        assert [set(numbers(row)) for row in layer.rows()] == sets
        assert all(list(numbers(row)) == sorted(numbers(row)) for row in layer.rows())


@given(sets_of)
def test_so_many_fire_together(sets: list[set[int]]) -> None:
    found = list(shares_together([bits(live) for live in sets], NEURONS, FIRED_TOGETHER))
    assert found == sorted(found) and found[0] == pytest.approx(sum(map(len, sets)) / len(sets) / NEURONS)
    windows = [set().union(*sets[i : i + 2]) for i in range(0, len(sets) - 1, 2)]
    if windows:
        assert found[1] == pytest.approx(max(found[0], sum(map(len, windows)) / len(windows) / NEURONS))
    firing = firing_of(recorded(sets), SPEC, None, "here")
    assert firing.shares == pytest.approx(found) and firing.source == "as recorded in here"
    told = firing_of(recorded(sets, foretold=True), SPEC, None, "here")
    assert told.foretold is not None and told.foretold.shares == pytest.approx(found)
    assert told.shares == expected(SPEC).shares


@given(sets_of, st.permutations(range(NEURONS)))
def test_a_replay_says_what_was_recorded(sets: list[set[int]], order: list[int]) -> None:
    """By the places of a packed model, in each unit's range, for one row and for two; and again from the first one."""
    trace = trace_of(recorded(sets), {0: array("I", order)}, "here")
    by_place = [[i for i, n in enumerate(order) if n in live] for live in sets]
    for i, rate in enumerate(memoryview(trace.fires[0]).cast("f")):
        assert rate == pytest.approx(sum(order[i] in live for live in sets) / len(sets), abs=1e-5)
    plan = resident_plan(SPEC, parse_format("int4-neurons"))
    u = next(i for i, unit in enumerate(plan.units) if unit.part == "0.ffn")
    replay, slot = Replay(plan, trace), Slot("host.act", 0, 64)

    def said(rows: int) -> list[list[int]]:
        batch = Batch(0, (0,) * rows, (0,) * rows, (1,) * rows, ())
        fire = ops.Fire(slot, slot, slot, slot, layer=0)
        return [list(row) for row in replay.answer(Call(fire, u, batch, "*", 0, 0))]

    heard = said(1) + said(2) + said(len(sets))
    assert heard == [by_place[i % len(sets)] for i in range(len(heard))]
    assert trace.of_layers([1]).live == (trace.live[1],)


def test_no_more_is_taken_of_a_record_than_its_many_neurons_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    sets, layers = [set(range(NEURONS))] * 9, len(SPEC.layers)
    for most, tokens in ((1, 1), (4 * layers * NEURONS, 4), (5 * layers * NEURONS - 1, 4), (99 * layers * NEURONS, 9)):
        monkeypatch.setattr(recorded_sets, "_NEURONS", most)
        trace = trace_of(recorded(sets), {}, "here")
        assert {len(of_layer) for of_layer in trace.live} == {tokens}
        assert all(rate == pytest.approx(1) for rates in trace.fires for rate in memoryview(rates).cast("f"))


def test_a_record_is_bounded() -> None:
    assert most_tokens([16384] * 32) == 512 and most_tokens([16384] * 32) * 32 * 2048 == MOST_BYTES
    recorder = Recorder(SPEC, "m")
    recorder._most_live = 3
    for layer in range(len(SPEC.layers)):
        recorder.live(layer, [bits({layer})] * (2 + layer))
        recorder.live(layer, [bits({layer})] * 2)
    assert {each.tokens for each in recorder.answers().live} == {3}


def test_tokens_that_broke_off_are_left_out() -> None:
    recorder = Recorder(SPEC, "m")
    for layer in range(len(SPEC.layers)):
        recorder.live(layer, [bits({1})] * (2 if layer else 3))
    assert {each.tokens for each in recorder.answers().live} == {2}


def spoilt(**changes: Any) -> RouterAnswers:
    answers = recorded([{1, 2}, {3}])
    return replace(answers, live=(replace(answers.live[0], **changes), *answers.live[1:]))


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": 1}, {"neurons": 8}, {"tokens": 3}, {"tokens": 0}, {"tokens": 2**40}, {"sets": "x"}, {"sets": ""},
        {"sets": b64encode(compress(bytes(1 << 24))).decode()},
        {"sets": b64encode(compress(b"\xff" * (2 * row_bytes(NEURONS)))).decode()} if NEURONS % 8 else {"sets": "AA=="},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"here|make no sense"):
        spoilt(**changes).check(SPEC, "here")
    with pytest.raises(BadRequest, match="its neurons differ"):
        replace(recorded([{1}]), live=()).check(SPEC, "here")


def test_a_plan_goes_by_what_it_asks_for() -> None:
    fired, foretold = recorded([{1}]), recorded([{1}], foretold=True)
    require_kind(fired, "auto", "here")
    require_kind(foretold, "predict", "here")
    with pytest.raises(BadRequest, match=r"which neurons fired; .*--sparsity predict --record"):
        require_kind(fired, "predict", "here")
    with pytest.raises(BadRequest, match=r"predictors called active; .*without predictors"):
        require_kind(foretold, "auto", "here")


def test_bits_beyond_the_last_neuron_are_refused() -> None:
    LiveSets.of(0, 9, [b"\xff\x01"]).rows()
    with pytest.raises(BadRequest, match="make no sense"):
        LiveSets.of(0, 9, [b"\xff\x02"]).rows()
