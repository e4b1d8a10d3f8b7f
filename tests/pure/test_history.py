"""What runs showed: kept, read back, and the error band that follows from them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph.resident import resident_plan
from penstock.planner.explain import Band, Width, spread
from penstock.planner.predict import Prediction, predict
from penstock.serve.generation import Generation
from penstock.serve.history import Run, band, figures_id, history_file, note_run, plan_hash, runs, step_s
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import Rate
from tests.pure.histories import a_run, large_run, phase, tiny_run
from tests.pure.machine import LLAMA_1B, MACHINE, WITH_DEVICE, model

BF16 = Format("bfloat16")
TINY = resident_plan(model(), Format("float32"), kv=Format("float32"), context=256)
LARGE = resident_plan(LLAMA_1B, BF16, kv=BF16, context=512, rows=64)
PREDICTED = predict(LARGE, Ask(context=512), MACHINE)  # 0.07 s a pass


def generation(steps: int = 20, **changes: object) -> Generation:
    found = Generation(64, 1, 256, batch_ttft_s=0.5, decode_s=2.0, decode_tokens=steps, decode_steps=steps)
    return replace(found, **changes)  # type: ignore[arg-type]


def large_band(*seen: Run) -> Band:
    return band(seen, PREDICTED, LARGE, 1)


# -- kept -----------------------------------------------------------------------------------------------------


def test_a_run_is_kept_and_read_back(tmp_path: Path) -> None:
    prediction = predict(TINY, Ask(context=256), MACHINE)
    file = tmp_path / "machines" / "here.json"
    note_run(file, MACHINE, TINY, prediction, generation())
    (run,) = runs(file, MACHINE)
    assert (run.first.measured_s, run.step.measured_s, run.plan) == (0.5, 0.1, plan_hash(TINY))
    assert (run.decode_steps, run.decode_s, run.weights) == (20, 2.0, "float32")
    assert (run.first.predicted_s, run.step.predicted_s) == (prediction.ttft_s, 1 / prediction.decode_tokens_per_s)
    assert run.step.bound_by == run.first.bound_by == "host"
    assert run.step.dominant.figure.lane == "host" and 0 < run.step.dominant.share <= 1
    note_run(file, MACHINE, TINY, prediction, generation(steps=1))  # one token says nothing
    assert len(runs(file, MACHINE)) == 1


def test_a_batch_is_counted_in_passes(tmp_path: Path) -> None:
    plan = resident_plan(model(), Format("float32"), kv=Format("float32"), context=256, seqs=4, logits_rows=4)
    prediction = predict(plan, Ask(context=256, batch=4), MACHINE)
    note_run(tmp_path / "here.json", MACHINE, plan, prediction, generation(batch=4, decode_tokens=80))
    (run,) = runs(tmp_path / "here.json", MACHINE)
    assert run.step.measured_s == 0.1 and run.step.predicted_s == 4 / prediction.decode_tokens_per_s
    assert step_s(prediction, plan, 4) == step_s(prediction, plan, 9) == run.step.predicted_s


def test_lines_that_nobody_can_read_are_passed_over(tmp_path: Path) -> None:
    """Also those of the version before, whose fields were others."""
    file = tmp_path / "here.json"
    old = {"plan": "0" * 16, "prompt_tokens": 512, "batch": 1, "predicted_ttft_s": 1.0, "ttft_s": 1.0,
           "predicted_tokens_per_s": 10.0, "tokens_per_s": 10.0, "bound_by": "host", "bound_share": 1.0}  # fmt: skip
    note_run(file, MACHINE, TINY, predict(TINY, Ask(context=256), MACHINE), generation())
    good = history_file(file).read_text()
    assert '"decode_steps": ' in good and '"taken": 1.0' in good
    never = good.replace('"decode_s": 2.0', '"decode_s": NaN')
    never += good.replace('"measured_s": 0.5', '"measured_s": 1e999') + good.replace(
        '"measured_s": 0.5', '"measured_s": 0'
    )
    never += re.sub(r'"decode_steps": \d+', f'"decode_steps": {10**400}', good)
    never += good.replace('"taken": 1.0', '"taken": 1e-320')
    bad = '{"plan": "x"}\nnot json\n[]\n' + "[" * 10_000 + '\n{"plan": 1, "half'
    history_file(file).write_text(f"{json.dumps(old)}\n{never}{good}{bad}")
    assert len(runs(file, MACHINE)) == 1
    history_file(file).write_bytes(b"\xff\xfe")
    assert runs(file, MACHINE) == []
    assert runs(tmp_path / "nowhere.json", MACHINE) == []


def test_only_the_last_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serve.history._KEPT", 5)
    prediction = predict(TINY, Ask(context=256), MACHINE)
    for i in range(8):
        note_run(tmp_path / "here.json", MACHINE, TINY, prediction, generation(batch_ttft_s=1.0 + i))
    assert [run.first.measured_s for run in runs(tmp_path / "here.json", MACHINE)] == [4.0, 5.0, 6.0, 7.0, 8.0]


def test_runs_of_other_figures_wait(tmp_path: Path) -> None:
    """Of those in force before a calibration, say; they count again when it is undone. Memory is no figure, nor is a
    device that the plan leaves alone."""
    other = replace(MACHINE, rates=(*MACHINE.rates, Rate("host", "ffn", "int4", 0.0, 1 / 30e9)))
    file, prediction = tmp_path / "here.json", predict(TINY, Ask(context=256), MACHINE)
    note_run(file, MACHINE, TINY, prediction, generation())
    note_run(file, other, TINY, prediction, generation())
    note_run(file, MACHINE, TINY, prediction, generation())
    assert (len(runs(file, MACHINE)), len(runs(file, other))) == (2, 1)
    assert figures_id(WITH_DEVICE) == figures_id(replace(MACHINE, name="b", source="c")) == figures_id(MACHINE)


# -- the band -------------------------------------------------------------------------------------------------


def test_the_band_is_what_this_machine_has_shown() -> None:
    assert large_band() == Band() and large_band(large_run(1.0)).decode == Width(1.25, 1, False)
    assert (large_band().decode.known, large_band(*[large_run(1.0)] * 3).decode.known) == (False, True)
    right = large_band(*[large_run(1.0)] * 10)
    assert right.decode.factor == right.ttft.factor == pytest.approx(1.1)
    wrong = large_run(1.5)
    assert large_band(*[large_run(1.0)] * 2, *[wrong] * 8).decode == Width(pytest.approx(1.5), 10, True)
    assert large_band(*[large_run(1.0)] * 9, wrong).decode.factor == pytest.approx(1.1)  # a busy neighbour
    assert large_band(*[wrong] * 10, *[large_run(1.0)] * 50).decode == Width(pytest.approx(1.1), 50, True)


def test_half_and_twice_are_as_far() -> None:
    slow, fast = (large_band(*[large_run(ratio)] * 5).decode.factor for ratio in (3.0, 1 / 3.0))
    assert slow == pytest.approx(fast) == pytest.approx(3.0)
    assert spread(6.0, 3.0) == (2.0, 18.0)


def test_a_tiny_model_says_nothing_of_a_large_one() -> None:
    """Six times slower than predicted, fifty times: the large one's band is its own runs', or the usual one."""
    tiny = [tiny_run(6.26)] * 50
    assert large_band(*tiny) == Band()
    ours = [large_run(1.05), large_run(0.97), large_run(1.15)]
    assert large_band(*ours, *tiny) == large_band(*ours)
    assert large_band(*ours, *tiny).decode.factor == pytest.approx(1.15)
    prediction = predict(TINY, Ask(context=256), MACHINE)
    assert band(ours, prediction, TINY, 1) == Band()


def test_what_is_left_out_is_kept_apart() -> None:
    """Runs that leave neurons out, and how, say nothing of runs that leave out others."""
    off, exact = [large_run(1.5)] * 5, [replace(large_run(1.2), sparsity="exact")] * 4
    assert large_band(*exact) == Band()
    assert large_band(*off, *exact) == large_band(*off) != Band()
    skipping = band([*off, *exact], PREDICTED, replace(LARGE, sparsity="exact"), 1)
    assert skipping.decode.factor == pytest.approx(1.2) and skipping.decode.runs == 4
    asks = replace(LARGE, sparsity="exact", units=(replace(LARGE.units[0], asked=True), *LARGE.units[1:]))
    assert band([*off, *exact], PREDICTED, asks, 1) == Band()


def test_another_lane_binds_another_regime() -> None:
    from_disk = a_run(phase(0.07, 4.0, "disk0"), phase(0.5, 4.0, "disk0"))
    assert large_band(*[from_disk] * 20) == Band()


def test_the_likest_weigh_most() -> None:
    """Twenty runs of steps four times as long, half as fast as predicted, beside ten of its own."""
    near, far = [large_run(1.0)] * 10, [a_run(phase(0.28, 2.0))] * 10
    assert large_band(*far, *near).decode.factor == pytest.approx(2.0)  # three of ten, by weight
    assert large_band(*far[:4], *near).decode.factor == pytest.approx(1.1)
    other_format = [replace(run, weights="int4") for run in [large_run(2.0)] * 5]
    assert large_band(*other_format, *near).decode.factor == pytest.approx(1.1)
    assert large_band(*other_format).decode == Width(pytest.approx(2.0), 5, True)
    assert large_band(*other_format[:3]).decode == Width(1.25, 3, False)  # alike by half each: too little


SECONDS = st.floats(1e-300, 1e300) | st.floats(1e-4, 10.0)
PHASES = st.builds(
    lambda s, measured_s, lane: replace(phase(s, bound_by=lane), measured_s=measured_s),
    SECONDS, SECONDS, st.sampled_from(["host", "disk0", "gpu0"]),
)  # fmt: skip
RUNS = st.builds(a_run, PHASES, PHASES, st.sampled_from(["bfloat16", "int4"]))


@given(st.lists(RUNS | st.builds(large_run, st.floats(1e-3, 1e3)), max_size=60), SECONDS, SECONDS)
def test_a_band_holds_its_promise(seen: list[Run], ttft_s: float, per_s: float) -> None:
    """Whatever was seen: finite, above zero, around what is promised, and as wide above as below by ratio."""
    promise: Prediction = replace(PREDICTED, ttft_s=ttft_s, decode_tokens_per_s=per_s)
    found = band(seen, promise, LARGE, 1)
    for width, value in ((found.decode, per_s), (found.ttft, ttft_s)):
        assert 1.1 - 1e-9 <= width.factor <= 100 + 1e-9 and 0 <= width.runs <= 50
        lo, hi = spread(value, width.factor)
        assert 0 < lo < value < hi and math.isfinite(hi)


@given(st.lists(st.floats(0.05, 20.0), min_size=3, max_size=49))
def test_four_of_five_are_within(ratios: list[float]) -> None:
    found = large_band(*map(large_run, ratios)).decode.factor * (1 + 1e-9)
    assert sum(1 / found <= ratio <= found for ratio in ratios) >= 0.8 * len(ratios)


@given(st.lists(RUNS, max_size=20), st.lists(st.floats(0.1, 10.0), max_size=20))
def test_runs_that_are_nothing_alike_change_nothing(others: list[Run], ratios: list[float]) -> None:
    ours = list(map(large_run, ratios))
    far = [run for run in others if not run.step.likeness(step_s(PREDICTED, LARGE, 1), PREDICTED.bound_by)]
    assert large_band(*far, *ours).decode == large_band(*ours).decode
