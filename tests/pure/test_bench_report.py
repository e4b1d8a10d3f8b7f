"""The last line of a bench comes whatever fails, and says what did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.report import last_line, model_folder


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_nothing_failed(capsys: pytest.CaptureFixture[str]) -> None:
    results: dict[str, Any] = {}
    with last_line(lambda: {"bench": "toy", **results}) as report, report.part("one"):
        results["one"] = 1
    assert printed(capsys) == {"bench": "toy", "one": 1}


@pytest.mark.parametrize("error", [ValueError("no room"), SystemExit("the worker ended")])
def test_a_part_that_fails_leaves_the_others(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    results: dict[str, Any] = {}
    with pytest.raises(SystemExit, match=r"^failed: one$"), last_line(lambda: results) as report:
        with report.part("one"):
            results["before"] = 0
            raise error
        with report.part("two"):
            results["two"] = 2
    failed = {"one": f"{type(error).__name__}: {error}"}
    assert printed(capsys) == {"before": 0, "two": 2, "failed": failed}


def test_ctrl_c_ends_the_bench_with_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), last_line(lambda: {"one": 1}) as report, report.part("two"):
        raise KeyboardInterrupt
    assert printed(capsys) == {"one": 1, "failed": {"bench": "KeyboardInterrupt: "}}


def test_sigterm_ends_the_bench_with_what_there_is() -> None:
    code = """
import time
from bench.report import last_line
with last_line(lambda: {"one": 1}) as report, report.part("two"):
    print("ready", flush=True)
    time.sleep(600)
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root) as bench:
        assert bench.stdout is not None and bench.stdout.readline() == "ready\n"
        os.kill(bench.pid, signal.SIGTERM)
        last = json.loads(bench.stdout.read())
    assert last == {"one": 1, "failed": {"bench": "Stopped: stopped by SIGTERM"}} and bench.returncode == 1


def test_a_folder_that_is_kept_and_one_that_is_not(tmp_path: Path) -> None:
    with model_folder(tmp_path / "kept") as kept, model_folder(None) as temporary:
        assert kept.is_dir() and temporary.is_dir() and temporary.is_relative_to("/var/tmp")
    assert kept.is_dir() and not temporary.exists()
