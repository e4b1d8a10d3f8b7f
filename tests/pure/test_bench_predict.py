"""What bench.predict says of the quick probe and of renewed promises, from rows, and which settings come when."""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from bench import predict
from bench.predict_quick import Hasty, keep_machine, kept_machine, line, summary
from bench.report import Report
from tests.pure.machine import MACHINE

NO_MACHINE: Any = None  # where nothing is measured


def row(quick: float, learnt: float, renewed: float | None, runs: int, drift: float = 0.0) -> dict[str, Any]:
    """A run of 10 tokens a second, whose first token took 1 s."""

    def figures(decode: float) -> dict[str, float]:
        return {"decode_tokens_per_s": decode, "ttft_s": 1.0}

    return {
        "decode_tokens_per_s": 10.0, "ttft_s": 1.0, "decode_error": 0.10, "quick": figures(quick),
        "learnt": figures(learnt), "renewed": None if renewed is None else figures(renewed), "runs_before": runs,
        "drift_in_run": drift,
    }  # fmt: skip


def told(*rows: dict[str, Any]) -> dict[str, Any]:
    return summary(rows, lambda each: each["drift_in_run"] <= 0.1)


def test_medians_and_bars() -> None:
    found = told(row(11.9, 20, 10.3, 0), row(11, 11, 9.8, 10), row(13, 11.1, 10.0, 15), row(8, 9, 20, 20, drift=0.5))
    assert round(found["quick_decode_tokens_per_s_error_median"], 6) == 0.195
    assert round(found["learnt_decode_tokens_per_s_error_median"], 6) == 0.1 and found["learnt_settings"] == 3
    assert found["renewed_settings"] == 3 and found["renewed_left_out"] == 1
    assert round(found["renewed_decode_tokens_per_s_error_worst"], 6) == 0.03
    assert found["within"]["learnt"] is True and found["within"]["renewed"] is False  # a quarter was left out
    assert found["within"]["quick"] is True


def test_where_nothing_can_be_said() -> None:
    assert told(row(12.1, 12, None, 0))["within"] == {"quick": False, "learnt": None, "renewed": None}
    assert line(row(12, 11, None, 3)) == "quick +20%, after 3 runs +10%, renewed –"


def test_a_part_ends_and_the_next_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that were not reached have no row, and none that was comes twice unless it was disturbed."""
    came: list[tuple[float, int]] = []

    def measured(
        model: Path, share: float, prompt: int, batch: int, machine: object, repeat_s: float
    ) -> dict[str, Any]:
        came.append((share, batch))
        return {"prompt": prompt, "batch": batch, "disturbed": 2.0 if len(came) == 1 else 0.5}

    monkeypatch.setattr(predict, "measure", measured)
    monkeypatch.setattr(predict, "line", lambda row: "")
    settings = [("1b", share, 64, batch) for share in (1.0, 0.5) for batch in (1, 4)]

    def part(known: list[dict[str, Any]], part: int | None) -> list[dict[str, Any]]:
        rows: predict.Rows = {}
        predict.in_turns(settings, {"1b": Path()}, NO_MACHINE, 2, 60, None, known, 1, Report(), rows, part)
        return [rows[setting] for setting in settings if setting in rows]

    first = part([], 3)
    assert [(row["share"], row["batch"]) for row in first] == came == [(1.0, 1), (1.0, 4), (0.5, 1)]
    rows = part(first, None)
    assert came[3:] == [(0.5, 4), (1.0, 1)]  # what was left, then what was disturbed
    assert [row["disturbed"] for row in rows] == [0.5] * 4 and rows[0]["attempts"] == 2


def test_a_setting_that_fails_has_no_row_and_does_not_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model: Path, share: float, prompt: int, batch: int, *_: object) -> dict[str, Any]:
        if batch == 4:
            raise MemoryError("no room")
        return {"prompt": prompt, "batch": batch, "disturbed": 0.5}

    monkeypatch.setattr(predict, "measure", measured)
    monkeypatch.setattr(predict, "line", lambda row: "")
    rows: predict.Rows = {}
    report, settings = Report(), [("1b", 1.0, 64, batch) for batch in (4, 1)]
    predict.in_turns(settings, {"1b": Path()}, NO_MACHINE, 2, 60, None, [], 1, report, rows)
    assert list(rows) == settings[1:] and report.failed == {"1b 1.0 64 4": "MemoryError: no room"}
    assert predict.summary([]) == {}


ABOUT: dict[str, Any] = {"bench": "predict", "build": 1, "machine": {"cpu": "Zen 4"}}
OTHERS = [ABOUT | {"build": 2}, ABOUT | {"machine": {"cpu": "Zen 3"}}]


def refused() -> AbstractContextManager[Any]:
    return pytest.raises(SystemExit, match="not those of")


def test_rows_that_are_kept_come_back_for_the_same_bench_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows"
    monkeypatch.setattr(predict, "measure", lambda *_: {"prompt": 64, "batch": 1, "disturbed": 0.5})
    monkeypatch.setattr(predict, "line", lambda row: "")
    settings = [("1b", 1.0, 64, 1)]
    kept: predict.Rows = {}
    predict.in_turns(settings, {"1b": Path()}, NO_MACHINE, 1, 60, file, [], 1, Report(), kept, None, ABOUT)
    rows = list(kept.values())
    assert predict.known_rows(file, ABOUT) == rows and "about" not in rows[0]
    for other in OTHERS:
        with refused():
            predict.known_rows(file, other)
    with file.open("a") as torn:
        torn.write(file.read_text()[:30])
    assert predict.known_rows(file, ABOUT) == rows
    file.write_text(json.dumps(rows[0]) + "\n")  # of a version that kept no more
    with refused():
        predict.known_rows(file, ABOUT)


def test_probes_are_taken_back_for_the_same_bench_alone(tmp_path: Path) -> None:
    whole, quick = tmp_path / "whole-machine.json", tmp_path / "quick-machine.json"
    keep_machine(whole, MACHINE, ABOUT)
    keep_machine(quick, MACHINE, ABOUT)
    assert kept_machine(whole, ABOUT) == MACHINE
    assert Hasty(tmp_path, ABOUT, goes_on=True).runs == 0
    for other in OTHERS:
        with refused():
            Hasty(tmp_path, other, goes_on=True)
        keep_machine(quick, MACHINE, other)
        with refused():
            predict.Machine(tmp_path, None, other, once=True, goes_on=True)  # type: ignore[arg-type]
        keep_machine(quick, MACHINE, ABOUT)
    machine = predict.Machine(tmp_path, None, ABOUT, once=True, goes_on=True)  # type: ignore[arg-type]
    assert machine.figures() == MACHINE and machine.probes == 0


def test_what_rows_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = argparse.Namespace(probe="each", readings=5, repeat_seconds=12.0, shapes=None)
    about = predict.about_of(wanted)
    assert json.loads(json.dumps(about)) == about == predict.about_of(wanted)
    wanted.probe = "once"
    assert predict.about_of(wanted) != about
    wanted.probe, wanted.shapes = "each", [("1b", predict.DEFAULT_SHAPES["1b"])]
    assert predict.about_of(wanted) == about  # parts may have fewer shapes
    wanted.shapes = [("1b", predict.DEFAULT_SHAPES["8b"])]
    assert predict.about_of(wanted) != about
    wanted.shapes = None
    monkeypatch.setattr(predict, "build", lambda: 1)
    assert predict.about_of(wanted) != about
