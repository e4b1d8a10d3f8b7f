"""Runs are kept beside the machine's figures: they give the error band, and `bench --calibrate` uses them up."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.runtime.probe import machine_file
from penstock.serve.history import history_file, runs
from penstock.spec import machine as machines
from tests.cpu.commands import MACHINE, Call, here, machine_cache, refused

FLAGS = ("--raw", "--max-tokens", "12", "--ignore-eos", "--json")


def test_runs_give_the_band_and_a_calibration(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = machine_cache(tmp_path / "cache")
    file = machine_file(cache)
    assert "assumed: no runs" in here(capsys, "plan", model, "--cache", cache).out
    reports = [here(capsys, "run", model, "ab", *FLAGS, "--cache", cache).report for _ in range(4)]
    kept = runs(file)
    assert [run.tokens_per_s for run in kept] == [report["decode_tokens_per_s"] for report in reports]
    assert len({run.plan for run in kept}) == 1
    assert "from the last 4 runs on this machine" in here(capsys, "plan", model, "--cache", cache).out
    done = here(capsys, "bench", "--calibrate", "--cache", cache)
    assert done.code == 0, done
    assert "4 runs decoded" in done.out and f"written to {file}" in done.out
    after = machines.loads(file.read_text(), "the file")
    assert "calibrated" in after.source
    assert after.rate("host", "ffn", "float32").s_per_byte != MACHINE.rate("host", "ffn", "float32").s_per_byte
    assert not history_file(file).exists()
    again = here(capsys, "bench", "--calibrate", "--cache", cache, "--json").report
    assert again == {"runs": 0, "changes": [], "machine_file": None}


def test_other_threads_and_machines_say_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = machine_cache(tmp_path / "cache")
    for flag in (("--threads", "1"), ("--exact",)):
        assert here(capsys, "run", model, "ab", *FLAGS, *flag, "--cache", cache).code == 0
    assert runs(machine_file(cache)) == []


@pytest.mark.parametrize("args", [(), ("ops",), ("nothing",), ("ops", "--calibrate")])
def test_bench_says_what_it_wants(args: tuple[str, ...], call: Call) -> None:
    refused(call("bench", *args))
