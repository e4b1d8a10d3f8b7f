"""--device and --device-memory, as users type them; the device is the emulated one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.runtime.device import choose as choosing
from tests.cpu.commands import ROOT, Call, here

GREEDY = ("--ignore-eos", "--max-tokens", "12", "--context", "64")


SMALL = ("--device-memory", "14MiB")


@pytest.mark.parametrize("memory", [(), SMALL, ("--device-memory", "1GiB"), (*SMALL, "--kv-home", "disk")], ids=str)
def test_the_same_tokens_as_without(call: Call, model: Path, memory: tuple[str, ...]) -> None:
    alone = call("run", model, "once", "--device", "none", *GREEDY).report
    beside = call("run", model, "once", "--device", "emulated", *memory, *GREEDY).report
    assert beside["token_ids"] == alone["token_ids"]
    assert alone["peak_device_bytes"] == 0 < beside["peak_device_bytes"] <= 1 << 30
    assert beside["bytes_moved"]["d2h0"] > 0 and "d2h0" not in alone["bytes_moved"]
    assert ("disk_write0" in beside["bytes_moved"]) == ("disk" in memory)  # KV


def test_too_little_is_refused_with_the_minimum(call: Call, model: Path) -> None:
    error = call("run", model, "once", "--device", "emulated", "--device-memory", "1MiB", *GREEDY).report["error"]
    assert (error["type"], error["tier"]) == ("DoesNotFit", "gpu0")
    least = str(error["minimum_bytes"])
    assert call("run", model, "once", "--device", "emulated", "--device-memory", least, *GREEDY).code == 0


def test_a_plan_for_a_device_needs_one(call: Call, model: Path, tmp_path: Path) -> None:
    made = call("plan", model, "--device", "emulated", "--context", "64").report
    assert made["predicted"]["peak_device_bytes"] > 0 and made["limits"]["gpu0"]["used_bytes"] > 0
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(made))
    error = call("run", model, "once", "--plan", file, "--device", "none", "--max-tokens", "4").report["error"]
    assert "this plan computes on a device" in error["message"]
    assert call("run", model, "once", "--plan", file, "--device", "emulated", "--max-tokens", "4").code == 0


def test_cuda_that_is_not_here_is_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choosing, "_DRIVERS", ("/nowhere",))
    for command in (("run", model, "once", *GREEDY), ("plan", model), ("bench", model), ("probe",)):
        done = here(capsys, *command, "--cache", cache, "--device", "cuda")
        assert done.code == 2
        assert done.err == "penstock: --device cuda: no driver of a GPU is here; --device none computes on the CPU\n"
    done = here(capsys, "run", model, "once", "--cache", cache, "--device-memory", "1GiB", *GREEDY)
    assert done.code == 0
    assert "--device-memory limits nothing: no device, the CPU computes: no driver of a GPU is here" in done.err
    assert "no device" not in here(capsys, "run", model, "once", "--cache", cache, *GREEDY).err


def test_a_trace_and_a_bench_beside_a_device(call: Call, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    small = ("--device", "emulated", "--device-memory", "14MiB", "--context", "64")
    assert call("run", model, "once", *small, "--max-tokens", "4", "--trace", file).code == 0
    names = {event["args"]["name"] for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "M"}
    assert "gpu0" in names
    done = call("bench", model, *small, "--prompt-tokens", "8", "--output-tokens", "8", "--repeats", "1")
    assert done.code == 0 and done.report["peak_device_bytes"] > 0


def test_plans_of_other_systems(call: Call) -> None:
    model = ROOT / "penstock" / "assets" / "tale-llama"
    short = (
        "--device",
        "emulated",
        "--context",
        "64",
        "--prompt-tokens",
        "8",
        "--output-tokens",
        "4",
        "--repeats",
        "1",
    )
    for family in ("layer-split", "r-cg-0.5"):
        done = call("bench", model, *short, "--device-memory", "16MiB", "--family", family)
        assert done.code == 0 and done.report["peak_device_bytes"] > 0
    error = call("bench", model, *short, "--device", "none", "--family", "all-cg").report["error"]
    assert "--family all-cg has no plan here" in error["message"]
    error = call("bench", model, *short, "--family", "nonsense").report["error"]
    assert "--family nonsense should be layer-split, all-cg" in error["message"]
