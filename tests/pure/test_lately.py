"""Rates as the runs of the last days show them: bounded, forgetting, hardly moved by one run, never mixed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.solve import solve
from penstock.serve.calibration import calibrated
from penstock.serve.generation import Generation
from penstock.serve.history import Phase, Run, band, note_run, runs
from penstock.serve.lately import MOST_TIMES, MOST_TIMES_ROUGH, RECENT, Lately, as_runs_show, lately, why
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import Figure, MachineSpec, Rate
from tests.pure.histories import ALPHA, BYTES, DISK, a_run, large_run, phase, tiny_run
from tests.pure.machine import LLAMA_1B, MACHINE

DAY, NOW = 86400.0, 1.8e9
INT4 = Figure("host", "ffn", "int4", 0, "s_per_byte")
FORMATS = replace(MACHINE, rates=(*MACHINE.rates, Rate("host", "ffn", "int4", 1e-6, 1 / 30e9, 1 / 1e12),
                                  Rate("host", "head", "int4", 1e-6, 1 / 35e9, 1 / 1e12)))  # fmt: skip


def ago(run: Run, days: float = 0.0) -> Run:
    return replace(run, at_s=NOW - days * DAY)


def from_disk(ratio: float, days: float = 0.0, weights: str = "bfloat16") -> Run:
    first = phase(2.0, ratio, "disk0", DISK)
    return ago(a_run(phase(0.5, ratio, "disk0", DISK), first, weights), days)


def taken(*seen: Run, machine: MachineSpec = MACHINE, weights: str = "bfloat16", sparsity: str = "off") -> Lately:
    return lately(machine, seen, weights, sparsity, NOW)


def times(found: Lately, figure: Figure = DISK) -> float:
    return found.machine.value(figure) / found.measured.value(figure)


def test_a_disk_that_became_slower() -> None:
    """As in the round that went from 3.66 to 3.2 GB/s: three runs say so, and the plan takes it."""
    found = taken(*[from_disk(1.14)] * 3)
    assert times(found) == pytest.approx(1.14) and times(found, BYTES) == 1
    assert [str(each) for each in found.taken] == [
        "the disk: measured as 2.90 GB/s, taken as 2.54 GB/s: 3 runs of the last day took × 1.14"
    ]
    (report,) = found.report()
    assert (report["lane"], report["per"], report["times"], report["runs"]) == ("disk0", "byte", pytest.approx(1.14), 3)
    assert report["taken_s"] == found.machine.value(DISK) and report["measured_s"] == MACHINE.value(DISK)
    assert taken().taken == () and taken().machine is MACHINE
    ask = Ask(host_memory_bytes=1 << 30, context=512)
    before, after = (solve(ask, LLAMA_1B, Format("bfloat16"), m).prediction for m in (MACHINE, found.machine))
    assert before.decode_tokens_per_s / after.decode_tokens_per_s == pytest.approx(1.14, rel=0.02)


def test_one_run_alone_changes_nothing() -> None:
    assert taken(from_disk(1.4)).taken == () and taken(*[from_disk(1.4)] * 2).taken == ()
    assert times(taken(*[from_disk(1.4)] * 3)) == pytest.approx(1.4)
    assert taken(*[from_disk(1.02)] * 9).taken == ()  # a smaller factor is none


@given(st.lists(st.floats(0.7, 1.4), min_size=3, max_size=RECENT - 1), st.floats(1e-6, 1e6))
def test_one_disturbed_run_beside_others_changes_little(ratios: list[float], wild: float) -> None:
    """The median stays among what the others say, and the measurement."""
    found = times(taken(*map(from_disk, ratios), from_disk(wild)))
    assert min(1.0, *ratios) * 0.999 <= found <= max(1.0, *ratios) * 1.001
    if len(set(ratios)) == 1 and len(ratios) > 3:
        assert found == pytest.approx(ratios[0], abs=0.031)


RATIOS = st.lists(st.tuples(st.floats(1e-9, 1e9), st.floats(-2, 40)), max_size=40)


@given(RATIOS, st.booleans())
def test_bounded(seen: list[tuple[float, float]], rough: bool) -> None:
    machine = replace(MACHINE, rough=rough)
    found = taken(*(from_disk(ratio, days) for ratio, days in seen), machine=machine)
    most = MOST_TIMES_ROUGH if rough else MOST_TIMES
    assert 1 / most * 0.999999 <= times(found) <= most * 1.000001
    assert all(math.isfinite(each.now) and each.now > 0 for each in found.taken)
    for each in found.taken:
        assert ("the most that they can do" in str(each)) == each.bounded


@given(RATIOS, st.floats(0, 20))
def test_forgetting(seen: list[tuple[float, float]], days: float) -> None:
    """The more time passes without a run, the nearer to what was measured; after two weeks nothing is left."""
    of = [from_disk(ratio, abs(age)) for ratio, age in seen]
    now, later, last = (taken(*(replace(run, at_s=run.at_s - d * DAY) for run in of)) for d in (0, days, 15))
    assert abs(math.log(times(later))) <= abs(math.log(times(now))) + 1e-9
    assert last.taken == ()


@given(st.permutations([1.3] * 5 + [0.8] * 3 + [1.1] * 2))
def test_the_order_of_runs_of_one_age_says_nothing(ratios: list[float]) -> None:
    assert times(taken(*map(from_disk, ratios))) == times(taken(*map(from_disk, sorted(ratios))))


def test_a_bad_hour_is_outvoted() -> None:
    bad = [from_disk(1.5, 0.2)] * 300
    assert times(taken(*bad)) == pytest.approx(1.5)
    assert taken(*bad, *[from_disk(1.0)] * (RECENT // 2)).taken == ()


def test_formats_are_not_mixed_on_the_processor() -> None:
    """Bytes of a disk are bytes. A kernel of int4 says nothing of one of bfloat16, though both read the RAM."""
    int4 = [ago(a_run(phase(0.07, 1.3, figure=INT4), weights="int4"))] * 4
    assert taken(*int4, machine=FORMATS, weights="bfloat16").taken == ()
    assert taken(*int4, machine=FORMATS, weights="q4_k").taken == ()  # whose rate is int4's
    found = taken(*int4, machine=FORMATS, weights="int4")
    head = replace(INT4, op="head")
    assert times(found, INT4) == times(found, head) == pytest.approx(1.3) and times(found, BYTES) == 1
    assert "the processor, ffn in int4: measured as 30.00 GB/s, taken as 23.08 GB/s" in str(found.taken[0])
    disk = [from_disk(1.3, weights="int4")] * 4
    assert times(taken(*disk, weights="bfloat16")) == pytest.approx(1.3)


def test_what_is_left_out_is_kept_apart() -> None:
    exact = [replace(from_disk(1.3), sparsity=mode) for mode in ("exact", "exact, asked") * 2]
    assert taken(*exact).taken == () and times(taken(*exact, sparsity="exact")) == pytest.approx(1.3)
    assert taken(*[from_disk(1.3)] * 4, sparsity="exact").taken == ()


def test_what_tells_nothing() -> None:
    """Beginnings of calls, runs that hang on several rates, short ones, and bytes that a cache may have held."""
    calls = ago(a_run(phase(0.07, 1.3, figure=ALPHA), phase(0.3, 1.3, figure=ALPHA)))
    mixed = ago(a_run(phase(0.5, 1.3, "disk0", DISK, share=0.4), phase(2.0, 1.3, "disk0", DISK, share=0.4)))
    short = ago(a_run(phase(1e-3, 1.3, "disk0", DISK), phase(1e-3, 1.3, "disk0", DISK), steps=9))
    small = ago(a_run(phase(1e-3, 1.3), phase(1e-3, 1.3), steps=900))
    gone = ago(a_run(phase(0.5, 1.3, "disk0", replace(DISK, op="load"))))
    old = replace(from_disk(1.3), at_s=0.0)  # of a version that did not keep it
    for run in (calls, mixed, short, small, gone, old, ago(tiny_run(3.0))):
        assert taken(*[run] * 9).taken == (), run


def test_a_run_counts_once_for_a_rate() -> None:
    """Whatever phases it has: two runs whose prompts stream too do not outvote the measurement."""
    assert taken(*[from_disk(1.3)] * 2).taken == ()
    both = replace(from_disk(1.2), first=phase(2.0, 1.4, "disk0", DISK))
    assert times(taken(*[both] * 3)) == pytest.approx(math.sqrt(1.2 * 1.4))


def test_what_was_taken_then_is_not_taken_twice(tmp_path: Path) -> None:
    """Promises that were kept with a shifted rate confirm it, and a calibration is of the rate as measured."""
    right = replace(from_disk(1.0), step=replace(phase(0.5, 1.0, "disk0", DISK), taken=1.2))
    right = replace(right, first=replace(right.first, taken=1.2))
    assert times(taken(*[right] * 4)) == pytest.approx(1.2)
    (change,) = calibrated(MACHINE, MACHINE, [right] * 4)[1]
    assert change.now == pytest.approx(1.2)

    slower, file = taken(*[from_disk(1.2)] * 4), tmp_path / "here.json"
    solved = solve(Ask(host_memory_bytes=1 << 30, context=512), LLAMA_1B, Format("bfloat16"), slower.machine)
    speed = solved.prediction.decode_tokens_per_s
    generation = Generation(64, 1, 512, batch_ttft_s=solved.prediction.ttft_s, decode_s=40 / speed, decode_tokens=40,
                            decode_steps=40)  # fmt: skip
    for _ in range(4):
        note_run(file, MACHINE, solved.plan, solved.prediction, generation, taken=slower.machine)
    kept = runs(file, MACHINE)
    assert [run.step.taken for run in kept] == [pytest.approx(1.2)] * 4 and kept[0].at_s > NOW / 2
    again = as_runs_show(file, MACHINE, "bfloat16", "off")
    assert times(again) == pytest.approx(1.2)
    assert band(kept, solved.prediction, solved.plan, 1).decode.factor == pytest.approx(1.1)


def test_why_names_what_the_prediction_hangs_on() -> None:
    ask = Ask(host_memory_bytes=1 << 30, context=512)
    for seen, says in (([], "the disk: measured as 2.90 GB/s, and taken so"), ([from_disk(1.2)] * 4, "taken as 2.42")):
        found = taken(*seen)
        lines = why(found, solve(ask, LLAMA_1B, Format("bfloat16"), found.machine), ask)
        assert any(says in line for line in lines) and len({line.partition(":")[0] for line in lines}) == len(lines)


PHASES = st.builds(
    lambda s, ratio, figure, share, then: replace(phase(s, ratio, figure.lane, figure, share), taken=then),
    st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.sampled_from([BYTES, ALPHA, DISK, INT4]), st.floats(0, 1),
    st.floats(1e-3, 1e3),
)  # fmt: skip


def drawn_run(step: Phase, first: Phase, weights: str, days: float, mode: str) -> Run:
    """No run in bfloat16 hangs on a figure of int4."""
    weights = "int4" if INT4 in (step.dominant.figure, first.dominant.figure) else weights
    return replace(a_run(step, first, weights), at_s=NOW - days * DAY, sparsity=mode)


RUNS = st.builds(
    drawn_run, PHASES, PHASES, st.sampled_from(["bfloat16", "int4"]), st.floats(-1e9, 1e9) | st.floats(0, 3),
    st.sampled_from(["off", "exact"]),
)  # fmt: skip


@given(st.lists(RUNS, max_size=30))
def test_whatever_was_seen_makes_a_machine(seen: list[Run]) -> None:
    found = taken(*seen, machine=FORMATS)
    assert {(each.lane, each.term) for each in found.taken} <= {
        (lane, term) for lane in ("host", "disk0") for term in ("s_per_byte", "s_per_flop")
    }
    assert all(each.format in ("*", "bfloat16") for each in found.taken)
    assert found.lines([BYTES, DISK]) and len(found.report()) == len(found.taken)


def test_runs_of_the_large_kind_shift_the_ram() -> None:
    found = taken(*[ago(large_run(1.2))] * 4)
    assert times(found, BYTES) == pytest.approx(1.2) and len(found.taken) == 1
