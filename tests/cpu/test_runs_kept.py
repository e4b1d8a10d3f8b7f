"""Runs are kept beside the machine's figures: they give the error band, `bench --calibrate` corrects the figures by
them, and `--undo` gives the probe's own back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.runtime.probe import load_or_probe, machine_file, probed_file
from penstock.serve.history import Run, figures_id, history_file, runs
from penstock.spec import codec
from penstock.spec import machine as machines
from penstock.spec.machine import Figure
from tests.cpu.commands import MACHINE, Call, here, machine_cache, refused

FLAGS = ("--raw", "--max-tokens", "12", "--ignore-eos", "--json")
PER_BYTE = Figure("host", "*", "*", 0, "s_per_byte")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return machine_cache(tmp_path / "cache")


@pytest.fixture
def calibrate(cache: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """`penstock bench --calibrate` with more flags."""
    return lambda *flags: here(capsys, "bench", "--calibrate", *flags, "--cache", cache)


def write_runs(cache: Path, *wanted: Run) -> None:
    history_file(machine_file(cache)).write_text("".join(f"{json.dumps(codec.to_json(run))}\n" for run in wanted))


def long_run(run: Run, ratio: float, figures: str = "") -> Run:
    """As if it had been of a large model: a minute, on the bytes of its weights."""
    dominant = replace(run.step.dominant, figure=PER_BYTE, share=1.0)
    step = replace(run.step, predicted_s=0.1, measured_s=0.1 * ratio, dominant=dominant)
    return replace(run, figures=figures or run.figures, decode_steps=600, decode_s=60 * ratio, step=step)


def test_runs_give_the_band_and_short_ones_no_calibration(
    model: Path, cache: Path, calibrate: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    file = machine_file(cache)
    assert "assumed: no runs" in here(capsys, "plan", model, "--why", "--cache", cache).out
    reports = [here(capsys, "run", model, "ab", *FLAGS, "--cache", cache).report for _ in range(4)]
    kept = runs(file, MACHINE)
    assert [1 / run.step.measured_s for run in kept] == pytest.approx([r["decode_tokens_per_s"] for r in reports])
    assert {(run.decode_steps, run.output_tokens, run.weights) for run in kept} == {(11, 12, "float32")}
    assert len({run.plan for run in kept}) == 1
    plan = here(capsys, "plan", model, "--why", "--cache", cache)
    assert "from the last 4 runs like this one on this machine" in plan.out
    band = here(capsys, "plan", model, "--cache", cache, "--json").report["band"]
    assert band["runs"] == 4 and not band["assumed"]["decode"] and band["decode_tokens_per_s"][0] > 0
    # A model of a thousand times the size has its own band.
    other = here(capsys, "plan", "llama-3.2-1b", "--why", "--cache", cache)
    assert "error band × or ÷ 1.25, assumed: no runs like this one" in other.out
    before = file.read_bytes()
    done = calibrate()
    assert done.code == 0 and "4 runs with these figures, 0 of them of 16 decode steps and 1 s or more" in done.out
    assert file.read_bytes() == before and len(runs(file, MACHINE)) == 4


def test_a_calibration_and_its_undoing(
    model: Path, cache: Path, calibrate: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    file = machine_file(cache)
    own = file.read_bytes()
    assert here(capsys, "run", model, "ab", *FLAGS, "--cache", cache).code == 0
    (run,) = runs(file, MACHINE)
    write_runs(cache, *[long_run(run, 1.3)] * 3)
    done = calibrate()
    assert done.code == 0 and "s_per_byte × 1.30 of what the probe measured" in done.out
    assert f"written to {file}" in done.out
    after = load_or_probe(cache)
    assert "calibrated" in after.source and after.rate("host", "ffn", "int4").s_per_byte == pytest.approx(1.3e-10)
    assert after.rate("disk0", "load", "int4") == MACHINE.rate("disk0", "load", "int4")

    # Those runs were predicted with other figures: again changes nothing, and later runs start from here.
    once = file.read_bytes()
    assert calibrate("--json").report == {"runs": 0, "changes": [], "machine_file": None}
    assert file.read_bytes() == once
    write_runs(cache, *[long_run(run, 1.3)] * 3, *[long_run(run, 1.2, figures_id(after))] * 4)
    report = calibrate("--json").report
    assert report["runs"] == 4 and len(report["changes"]) == 1 and report["machine_file"] == str(file)
    assert load_or_probe(cache).rate("host", "ffn", "int4").s_per_byte == pytest.approx(1.3 * 1.2e-10)

    undone = calibrate("--undo")
    assert undone.code == 0 and "s_per_byte back from × 1.56" in undone.out
    assert file.read_bytes() == own and not probed_file(file).exists()
    assert len(runs(file, MACHINE)) == 3  # predicted with these figures
    assert "nothing to undo" in here(capsys, "bench", "--undo", "--cache", cache).out
    assert file.read_bytes() == own


def test_another_probe_is_no_calibration_to_undo(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures kept beside are of the probe before; a damaged file beside is said, and nothing is built on it."""
    file = machine_file(cache)
    probed_file(file).write_text(machines.dumps(replace(MACHINE, name="of an earlier probe")))
    file.unlink()
    monkeypatch.setattr("penstock.runtime.probe.probe_apart", lambda *_: MACHINE)
    load_or_probe(cache)
    assert file.exists() and not probed_file(file).exists()


@pytest.mark.parametrize("flag", ["--calibrate", "--undo"])
def test_a_damaged_file_of_the_probes_own_figures(flag: str, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = machine_file(cache)
    own = file.read_bytes()
    probed_file(file).write_text("{")
    refused(here(capsys, "bench", flag, "--cache", cache, "--json"), "penstock probe --again")
    assert file.read_bytes() == own


def test_other_threads_and_machines_say_nothing(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (("--threads", "1"), ("--exact",)):
        assert here(capsys, "run", model, "ab", *FLAGS, *flag, "--cache", cache).code == 0
    assert runs(machine_file(cache), MACHINE) == []


def test_a_family_of_kernels_has_figures_of_its_own(
    model: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    isa, flags = "portable", ("--isa", "portable", "--cache", cache)
    file = machine_file(cache, isa)
    assert file != machine_file(cache)
    file.write_text(machines.dumps(MACHINE))
    told = here(capsys, "plan", model, "--why", *flags)
    assert "portable kernels: asked for" in told.out and "portable kernels: asked for, of " in told.err
    told = here(capsys, "run", model, "ab", "--why", *FLAGS, *flags)
    assert told.code == 0 and "portable kernels: asked for" in told.err
    assert len(runs(file, MACHINE)) == 1 and runs(machine_file(cache), MACHINE) == []
    for command in (("plan", model), ("run", model, "ab"), ("bench", "ops", model)):
        refused(
            here(capsys, *command, "--isa", "sse", "--json", "--cache", cache),
            "--isa sse: this processor and build have",
        )


@pytest.mark.parametrize("args", [(), ("ops",), ("nothing",), ("ops", "--calibrate"), ("ops", "--undo")])
def test_bench_says_what_it_wants(args: tuple[str, ...], call: Call) -> None:
    refused(call("bench", *args))
