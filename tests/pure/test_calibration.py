"""Figures of a machine corrected by runs: by which, by how much, and that a second time adds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.predict import predict
from penstock.planner.solve import solve
from penstock.serve.calibration import calibrated, counts, undone
from penstock.serve.history import Run, figures_id
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import TERMS, Figure, MachineSpec, Rate
from tests.pure.histories import ALPHA, BYTES, DISK, a_run, large_run, phase, tiny_run
from tests.pure.machine import LLAMA_1B, MACHINE

BF16 = Format("bfloat16")
LARGE = solve(Ask(context=512), LLAMA_1B, BF16, MACHINE).plan


def after(*seen: Run, machine: MachineSpec = MACHINE, probed: MachineSpec = MACHINE) -> MachineSpec:
    return calibrated(machine, probed, seen)[0]


def value(machine: MachineSpec, figure: Figure) -> float:
    (rate,) = [r for r in machine.rates if r.figure(figure.term) == figure]
    found: float = getattr(rate, figure.term)
    return found


def factor(machine: MachineSpec, figure: Figure) -> float:
    return value(machine, figure) / value(MACHINE, figure)


def differing(machine: MachineSpec) -> set[Figure]:
    figures = [rate.figure(term) for rate in MACHINE.rates for term in TERMS]
    return {figure for figure in figures if value(machine, figure) != value(MACHINE, figure)}


def test_a_figure_changes_by_what_runs_that_it_dominated_were_off() -> None:
    """A pass took 1.2 times as long, and all of it hangs on one figure. Where eight tenths do, the rest of the
    difference is other figures'."""
    found, changes = calibrated(MACHINE, MACHINE, [a_run(phase(0.07, 1.2))] * 3)
    assert factor(found, BYTES) == pytest.approx(1.2) and differing(found) == {BYTES}
    assert "calibrated" in found.source and MACHINE.source in found.source
    said = (
        "host * *: s_per_byte × 1.20 of what the probe measured (was × 1.00): 3 runs that it dominated took 1.2 times"
    )
    assert [str(change).startswith(said) for change in changes] == [True]
    assert factor(after(*[a_run(phase(0.07, 1.2, share=0.8))] * 3), BYTES) == pytest.approx(1.2)
    assert factor(after(*[a_run(phase(0.07, 0.8, share=0.8))] * 3), BYTES) == pytest.approx(0.8)
    disk = a_run(phase(0.5, 0.6, "disk0", DISK))
    assert differing(after(*[disk] * 3)) == {DISK} and factor(after(*[disk] * 3), DISK) == pytest.approx(0.6)


def test_a_prompt_counts_where_it_takes_a_second() -> None:
    flops = replace(BYTES, term="s_per_flop")
    for seconds, changed in ((0.5, set()), (2.0, {flops})):
        prompt = a_run(phase(0.07), phase(seconds, 1.5, figure=flops))
        assert differing(after(*[prompt] * 3)) == changed


def test_short_runs_and_mixed_ones_change_nothing() -> None:
    short = a_run(phase(0.07, 1.5), steps=15)
    quick = a_run(phase(0.001, 1.5), steps=64)
    mixed = a_run(phase(0.07, 1.5, share=0.49))
    assert [counts(run) for run in (short, quick, mixed)] == [False, False, True]
    for run in (short, quick, mixed):
        assert calibrated(MACHINE, MACHINE, [run] * 50) == (MACHINE, [])
    assert calibrated(MACHINE, MACHINE, [large_run(1.5)] * 2) == (MACHINE, [])
    assert calibrated(MACHINE, MACHINE, [large_run(1.01)] * 9) == (MACHINE, [])


@pytest.mark.parametrize("ratio", [0.1, 6.26, 400.0])
def test_a_tiny_models_runs_leave_a_large_one_alone(ratio: float) -> None:
    """Also long ones, which do correct what they hang on: the beginning of calls."""
    ask = Ask(context=512)
    before = predict(LARGE, ask, MACHINE)
    short = [tiny_run(ratio, steps=1)] * 5 + [tiny_run(ratio, steps=12)] * 50
    assert calibrated(MACHINE, MACHINE, short) == (MACHINE, [])
    found = after(*short, *[tiny_run(ratio, steps=100_000)] * 50)
    assert differing(found) == {ALPHA}
    then = predict(LARGE, ask, found)
    assert then.decode_tokens_per_s == pytest.approx(before.decode_tokens_per_s, rel=0.02)
    assert then.ttft_s == pytest.approx(before.ttft_s, rel=0.02)
    ours = [large_run(1.3)] * 3
    both, alone = (after(*seen) for seen in ([*short, *ours], ours))
    assert predict(LARGE, ask, both) == predict(LARGE, ask, alone)


def test_what_a_cache_holds_says_nothing_of_the_ram() -> None:
    """20 MB a pass, at 40 GB/s; of a disk any size counts."""
    cached = a_run(phase(0.0005, 0.6, share=1.0), steps=10_000)
    assert counts(cached) and calibrated(MACHINE, MACHINE, [cached] * 9) == (MACHINE, [])
    disk = a_run(phase(0.0005, 0.6, "disk0", DISK), steps=10_000)
    assert differing(after(*[disk] * 3)) == {DISK}


def test_factors_are_bounded() -> None:
    for ratio, most in ((50.0, 2.0), (0.01, 0.5)):
        found, (change,) = calibrated(MACHINE, MACHINE, [large_run(ratio, steps=10_000)] * 3)
        assert factor(found, BYTES) == pytest.approx(most) and "the most that a calibration does" in str(change)


def test_twice_is_no_more_than_once() -> None:
    """Factors are of the probe's own: what the runs after a calibration show corrects it, within the same bounds, and
    figures that they say nothing of stay as calibrated."""
    once = after(*[a_run(phase(0.07, 1.5))] * 3)
    assert calibrated(once, MACHINE, []) == (once, [])
    assert calibrated(once, MACHINE, [a_run(phase(0.1, 1.0))] * 9) == (once, [])
    found, (change,) = calibrated(once, MACHINE, [a_run(phase(0.1, 0.8))] * 3)
    assert factor(found, BYTES) == pytest.approx(1.2) and (change.before, change.now) == pytest.approx((1.5, 1.2))
    further = found
    for _ in range(5):
        further = after(*[a_run(phase(0.1, 1.9))] * 3, machine=further)
    assert factor(further, BYTES) == pytest.approx(2.0)
    disk = after(*[a_run(phase(0.5, 0.6, "disk0", DISK))] * 3, machine=further)
    assert differing(disk) == {BYTES, DISK} and disk.source.count("calibrated") == 1
    assert figures_id(disk) != figures_id(further) != figures_id(MACHINE)


def test_what_an_undo_says() -> None:
    found = after(*[a_run(phase(0.07, 1.5))] * 3)
    assert undone(found, MACHINE) == ["host * *: s_per_byte back from × 1.50"] and undone(MACHINE, MACHINE) == []


def test_only_the_rate_that_was_used_changes() -> None:
    """Kernels for one row, not those for many; a figure that no machine has is none."""
    one, many = (Rate("host", "ffn", "int4", 1e-6, 1e-11, 1e-12, rows=rows) for rows in (1, 64))
    machine = replace(MACHINE, rates=(*MACHINE.rates, one, many))
    found, (change,) = calibrated(machine, machine, [a_run(phase(0.07, 1.3, figure=one.figure("s_per_byte")))] * 3)
    assert str(change).startswith("host ffn int4, up to 1 row: s_per_byte × 1.30")
    changed = found.rate("host", "ffn", "int4", 1)
    assert changed.s_per_byte == pytest.approx(1.3e-11) and replace(changed, s_per_byte=1e-11) == one
    assert found.rate("host", "ffn", "int4", 2) == many
    gone = Figure("host", "ffn", "int8", 1, "s_per_byte")
    assert calibrated(machine, machine, [a_run(phase(0.07, 1.3, figure=gone))] * 3) == (machine, [])
    nothing = replace(MACHINE.rates[2].figure("s_per_flop"))  # 0 on a disk
    assert calibrated(MACHINE, MACHINE, [a_run(phase(0.07, 1.3, figure=nothing))] * 3) == (MACHINE, [])


RATIOS = st.floats(1e-300, 1e300) | st.floats(0.1, 10.0)
PHASES = st.builds(phase, st.floats(1e-6, 1e3), RATIOS, st.just("host"), st.sampled_from([BYTES, ALPHA, DISK]),
                   st.floats(0.0, 1.0))  # fmt: skip
SEEN = st.lists(st.builds(a_run, PHASES, PHASES, st.just("int4"), st.integers(1, 10**6)), max_size=30)


@given(SEEN, SEEN)
def test_a_calibrated_machine_is_a_machine(first: Sequence[Run], second: Sequence[Run]) -> None:
    """Whatever runs say, once and again: every figure within a factor of two of the probe's own."""
    once = after(*first)
    twice = after(*second, machine=once)
    for rate, own in zip(twice.rates, MACHINE.rates, strict=True):
        assert replace(rate, alpha_s=own.alpha_s, s_per_byte=own.s_per_byte) == own
        assert 0.499 * own.alpha_s <= rate.alpha_s <= 2.001 * own.alpha_s
        assert 0.499 * own.s_per_byte <= rate.s_per_byte <= 2.001 * own.s_per_byte
