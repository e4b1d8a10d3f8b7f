"""A scheduler on a virtual clock, whose passes take what the planner predicts; `bench.serve` has a server beside it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.foretold import Arrival, PassTimes, foretell
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
@settings(max_examples=50)
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
