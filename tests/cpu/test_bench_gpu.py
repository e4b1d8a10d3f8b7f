"""bench.gpu's arithmetic, on the processor: every setting's bytes and bounds, with ceilings made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import gpu
from penstock.runtime.device.choose import choose
from penstock.spec.machine import MachineSpec
from tests.cpu.engines import make_model
from tests.cpu.test_device_choice import a_gpu, measured  # noqa: F401 (fixtures)
from tests.pure.machine import MACHINE

LIMITS = {"memory_bytes_per_s": 1e12, "link_bytes_per_s": 1e10, "flops_per_s": 1e12, "disk_bytes_per_s": 1e9}


@pytest.mark.parametrize("setting", gpu.SETTINGS, ids=lambda setting: setting.name)
def test_settings(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    a_gpu: MachineSpec,  # noqa: F811
    setting: gpu.Setting,
) -> None:
    monkeypatch.setattr(gpu, "ceilings", lambda _: LIMITS)
    monkeypatch.setattr(gpu, "SECONDS", 0.01)
    context = a_gpu.context_bytes
    small = setting.ask.device_memory_bytes and context + (20 << 20)
    stays = setting.ask.resident_bytes and 4096
    ask = replace(setting.ask, context=128, prompt_tokens=32, device_memory_bytes=small, resident_bytes=stays)
    model = make_model(tmp_path, "llama", setting.weights)
    chosen = choose("cuda", MACHINE, None, tmp_path)
    row = gpu.measure(replace(setting, ask=ask, strategy=None), model, MACHINE, chosen, tmp_path, 1)
    assert row["share_of_bound"] > 0 and row["bound"] == setting.bound
    assert row["peak_device_bytes"] == row["planned_device_bytes"] <= (small or 1 << 31)
