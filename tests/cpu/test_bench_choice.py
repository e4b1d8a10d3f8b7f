"""`bench.choice`: candidates take turns, and one that cannot be run leaves the others their figures."""

from __future__ import annotations

from typing import Any

import pytest

from bench import choice
from bench.choice import measured_s
from penstock.errors import DeviceFailed


def test_a_candidate_that_fails_does_not_come_again(capsys: pytest.CaptureFixture[str]) -> None:
    came: list[Any] = []

    def run(plan: Any) -> float:
        came.append(plan)
        if plan == "b" and came.count("b") == 2:
            raise DeviceFailed("no room")
        return float(len(came))

    plans: Any = ["a", "b", "c"]
    assert measured_s(plans, run, 3) == [[1.0, 4.0, 7.0], "DeviceFailed: no room", [3.0, 6.0, 8.0]]
    assert came == ["a", "b", "c", "a", "b", "c", "a", "c"] and "a candidate failed" in capsys.readouterr().err


def test_a_setting_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    def setting(model: Any, share: float, *_: object) -> dict[str, Any]:
        if share == choice.SETTINGS[0][1]:
            raise RuntimeError("the chosen plan could not be run: DeviceFailed: no room")
        return {"ratio": 1.0 + share}

    monkeypatch.setattr(choice, "setting", setting)
    monkeypatch.setattr(choice, "probe_apart", lambda *_, **__: None)
    monkeypatch.setattr(choice, "synth", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["bench", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="failed: "):
        choice.main()
    said = capsys.readouterr().out.splitlines()[-1]
    assert '"worst_ratio": 1.7' in said and "the chosen plan could not be run" in said
