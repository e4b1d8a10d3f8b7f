"""What runs showed: the error band, and the calibration that follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.graph.resident import resident_plan
from penstock.planner.predict import predict
from penstock.serve.generation import Generation
from penstock.serve.history import Run, band, calibrated, history_file, note_run, plan_hash, runs
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from tests.pure.machine import MACHINE, model

RUN = Run("0" * 16, 512, 1, 1.0, 1.0, 10.0, 10.0, "host", 1.0)


def test_a_run_is_kept_and_read_back(tmp_path: Path) -> None:
    plan = resident_plan(model(), Format("float32"), kv=Format("float32"), context=256)
    prediction = predict(plan, Ask(context=256), MACHINE)
    generation = Generation(64, 1, 256, batch_ttft_s=0.5, decode_s=2.0, decode_tokens=20)
    file = tmp_path / "machines" / "here.json"
    note_run(file, plan, prediction, generation)
    (run,) = runs(file)
    assert (run.ttft_s, run.tokens_per_s, run.plan) == (0.5, 10.0, plan_hash(plan))
    assert run.predicted_tokens_per_s == prediction.decode_tokens_per_s
    note_run(file, plan, prediction, replace(generation, decode_tokens=1))  # one token says nothing
    assert len(runs(file)) == 1


def test_lines_that_nobody_can_read_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    history_file(file).write_text('{"plan": "x"}\nnot json\n[]\n{"plan": 1, "half')
    assert runs(file) == []
    history_file(file).write_bytes(b"\xff\xfe")
    assert runs(file) == []
    assert runs(tmp_path / "nowhere.json") == []


def test_only_the_last_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serve.history._KEPT", 5)
    plan = resident_plan(model(), Format("float32"), kv=Format("float32"), context=256)
    prediction = predict(plan, Ask(context=256), MACHINE)
    for i in range(8):
        generation = Generation(64, 1, 256, batch_ttft_s=1.0 + i, decode_s=2.0, decode_tokens=20)
        note_run(tmp_path / "here.json", plan, prediction, generation)
    assert [run.ttft_s for run in runs(tmp_path / "here.json")] == [4.0, 5.0, 6.0, 7.0, 8.0]


def test_the_band_is_what_this_machine_has_shown() -> None:
    assert band([]).decode == band([RUN]).decode == 0.25
    assert band([RUN] * 10).decode == band([RUN] * 10).ttft == 0.1
    wrong = replace(RUN, predicted_tokens_per_s=15.0)
    assert band([RUN] * 2 + [wrong] * 8).decode == pytest.approx(0.5)
    assert band([RUN] * 9 + [wrong]).decode == 0.1  # one run in ten beside a busy neighbour
    assert band([wrong] * 10 + [RUN] * 50).runs == 50


def test_calibration_takes_what_is_shown_where_it_is_shown() -> None:
    slow = replace(RUN, predicted_tokens_per_s=12.0)
    after, lines = calibrated(MACHINE, [slow] * 4)
    assert len(lines) == 2 and "0.83 times as fast" in lines[0]
    before_rate, rate = MACHINE.rate("host", "ffn", "int4"), after.rate("host", "ffn", "int4")
    assert rate.s_per_byte == pytest.approx(1.2 * before_rate.s_per_byte)
    assert after.rate("disk0", "load", "int4") == MACHINE.rate("disk0", "load", "int4")
    assert "calibrated" in after.source
    disk = replace(RUN, bound_by="disk0", predicted_tokens_per_s=5.0)
    after, lines = calibrated(MACHINE, [disk] * 3)
    assert after.rate("disk0", "load", "int4").s_per_byte == pytest.approx(
        0.5 * MACHINE.rate("disk0", "load", "int4").s_per_byte
    )
    assert after.rate("host", "ffn", "int4") == before_rate
    prompt = replace(RUN, ttft_s=1.5)
    after, lines = calibrated(MACHINE, [prompt] * 3)
    assert after.rate("host", "ffn", "int4").s_per_flop == pytest.approx(1.5 * before_rate.s_per_flop)


def test_too_little_changes_nothing() -> None:
    assert calibrated(MACHINE, [RUN] * 2) == (MACHINE, [])
    mixed = replace(RUN, bound_share=0.5, prompt_tokens=8)
    assert calibrated(MACHINE, [mixed] * 20) == (MACHINE, [])
    wild = replace(RUN, predicted_tokens_per_s=1e9)
    assert calibrated(MACHINE, [wild] * 3)[0].rate("host", "ffn", "int4").s_per_byte == pytest.approx(
        4 * MACHINE.rate("host", "ffn", "int4").s_per_byte
    )
