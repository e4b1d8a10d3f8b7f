"""Which device is chosen, why, and what it is said to do: a GPU is played by torch on the processor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.errors import BadRequest, DoesNotFit
from penstock.runtime import probe_ops
from penstock.runtime.device import choose as choosing
from penstock.runtime.device.choose import choose, without_device
from penstock.runtime.device.cuda import card, measure
from penstock.runtime.device.cuda import device as cuda_device
from penstock.runtime.device.cuda import probe as cuda_probe
from penstock.runtime.device.cuda.card import Card
from penstock.runtime.device.cuda.pinned import Pinned
from penstock.runtime.device.cuda.probe import probe_device
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from tests.cpu.engines import make_model
from tests.pure.machine import MACHINE, WITH_DEVICE

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
CARD = Card("cpu", "A Card 3000", 1 << 31)


@pytest.fixture(scope="module")
def measured() -> MachineSpec:
    """The machine with figures of the processor as torch uses it, of few bytes."""
    with pytest.MonkeyPatch.context() as smaller:
        smaller.setattr(cuda_probe, "probe_plan", lambda weights, kv, *_: probe_ops._plan(256, 1, weights, kv))
        smaller.setattr(cuda_probe, "_ROWS", ((1,), (8,), (64, 128)))
        smaller.setattr(cuda_probe, "CONTEXT", 256)
        smaller.setattr(probe_ops, "ONE_ROW_TIMED", ((1, 63), (1, 255)))
        smaller.setattr(probe_ops, "MANY_ROWS_TIMED", ((128, 0), (128, 128)))
        figures = probe_device(
            torch.device("cpu"), lambda: 1e-3, lambda _: None, formats=("int4",), kv_formats=("float16",),
            copies=(1 << 12, 1 << 16),
        )  # fmt: skip
    return measure.with_device(MACHINE, CARD, figures, 100 << 20, 300 << 20)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, measured: MachineSpec) -> MachineSpec:
    monkeypatch.setattr(choosing, "_missing", lambda: None)
    monkeypatch.setattr(card, "find", lambda: CARD)
    monkeypatch.setattr(choosing, "_figures", lambda *_: measured)
    return measured


def test_a_device_of_another_name_is_refused() -> None:
    with pytest.raises(BadRequest, match="'tpu' should be one of auto, cuda, none, emulated"):
        choose("tpu", WITH_DEVICE, None)


def test_no_driver_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_DRIVERS", ("/nowhere/nvidiactl",))
    chosen = choose("auto", WITH_DEVICE, None)
    assert (chosen.name, chosen.open) == ("none", None)
    assert "no driver of a GPU is here" in chosen.reason
    assert chosen.machine == without_device(WITH_DEVICE)
    with pytest.raises(BadRequest, match="--device cuda: no driver of a GPU is here"):
        choose("cuda", WITH_DEVICE, None)


def test_a_driver_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choosing, "_DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(choosing.importlib.util, "find_spec", lambda _: None)
    assert "pip install 'penstock[gpu]'" in choose("auto", MACHINE, None).reason


def test_torch_that_sees_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As with CUDA_VISIBLE_DEVICES empty, or a driver that is too old."""
    monkeypatch.setattr(choosing, "_DRIVERS", (str(tmp_path),))
    chosen = choose("auto", MACHINE, None, tmp_path)
    assert chosen.name == "none" and "torch finds no GPU that it can use" in chosen.reason
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(BadRequest, match=r"--device cuda: the GPU cannot be used: [^\n]*$"):
        choose("cuda", MACHINE, None, tmp_path)


def test_figures_are_measured_once_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: MachineSpec
) -> None:
    from penstock.spec import machine as machines

    calls = []

    class Done:
        returncode, stderr = 0, ""
        stdout = machines.dumps(measured)

    def run(*args: object, **_: object) -> Done:
        calls.append(args)
        return Done()

    monkeypatch.setattr(choosing, "_missing", lambda: None)
    monkeypatch.setattr(card, "find", lambda: CARD)
    monkeypatch.setattr(choosing.child, "run", run)
    first = choose("auto", MACHINE, None, tmp_path)
    assert first.name == "cuda" and "A Card 3000" in first.reason
    assert choose("auto", MACHINE, None, tmp_path).machine == first.machine and len(calls) == 1
    assert first.machine.tier("gpu0").bytes == CARD.free_bytes + measured.context_bytes
    other = replace(MACHINE, rates=MACHINE.rates[:-1] + (replace(MACHINE.rates[-1], alpha_s=1e-3),))
    choose("auto", other, None, tmp_path)
    assert len(calls) == 2
    Done.returncode, Done.stderr = 1, "a\nno such card"
    failed = choose("auto", replace(MACHINE, rates=MACHINE.rates * 1, sharing=()), None, tmp_path / "other")
    assert failed.name == "none" and failed.reason.endswith("measuring A Card 3000 failed: no such card")


def test_the_probe_of_a_device(measured: MachineSpec) -> None:
    """Every op has a rate of its own for any number of rows."""
    assert measured.context_bytes > 100 << 20 and measured.device_process_bytes == (300 - 80) << 20
    for op in ("qkv", "out", "ffn", "head"):
        for rows in (1, 4, 64, 512):
            rate = measured.rate("gpu0", op, "int4", rows)
            assert rate.op == op and rate.alpha_s + rate.s_per_byte + rate.s_per_flop > 0
    assert measured.rate("gpu0", "attend", "float16", 1).rows == 1
    assert {"*", "pageable"} == {rate.op for rate in measured.rates if rate.lane == "h2d0"}
    assert measured.overhead_s("gpu0", "task") > 0 < measured.overhead_s("gpu0", "call")


@pytest.mark.parametrize("memory_mib", [None, 272, 324])
def test_an_engine_on_it(tmp_path: Path, a_gpu: MachineSpec, memory_mib: int | None) -> None:
    """The same greedy tokens on cuda (played by the processor), emulated and none."""
    folder, found = make_model(tmp_path, "llama", "float32"), {}
    for device in ("none", "emulated", "cuda"):
        memory = None if memory_mib is None else memory_mib << 20
        if device == "emulated" and memory is not None:
            memory -= 164 << 20  # it has no context
        ask = Ask(prompt_tokens=20, output_tokens=8, context=64, device_memory_bytes=memory, use_device=True)
        engine = Engine.load(folder, ask, Loading(machine=MACHINE, device=device, cache=tmp_path))
        found[device] = engine.generate_ids(list(range(20)), GREEDY)
        assert ("gpu0" in engine.plan.tier_bytes()) == (device != "none")
        assert engine.last is not None and (engine.last.peak_device_bytes > 0) == (device != "none")
        engine.close()
    assert found["cuda"] == found["emulated"] == found["none"]


def test_a_cap_that_is_too_small(tmp_path: Path, a_gpu: MachineSpec) -> None:
    folder = make_model(tmp_path, "llama", "float32")
    with pytest.raises(DoesNotFit, match="--device none") as caught:
        Engine.load(
            folder,
            Ask(context=64, device_memory_bytes=1 << 20),
            Loading(machine=MACHINE, device="cuda", cache=tmp_path),
        )
    assert caught.value.numbers["tier"] == "gpu0"


def test_memory_that_others_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between planning and loading: one line, not a crash."""
    device = cuda_device.TorchDevice(torch.device("cpu"), 1 << 30, 0)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB\nmore lines")

    monkeypatch.setattr(cuda_device.torch, "empty", refuse)
    with pytest.raises(cuda_device.DeviceFailed, match="another process has taken memory") as caught:
        device.allocate("gpu0.kv", 2 << 20)
    assert "\n" not in caught.value.message


def test_pinning_that_is_refused_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows is not tried; copies are cut where pieces end."""
    pinned = Pinned(torch.device("cpu"))
    monkeypatch.setattr("penstock.runtime.device.cuda.pinned.PIECE_BYTES", 100)
    monkeypatch.setattr(pinned, "_pin", lambda address, nbytes: address < 1200)
    pinned.register("host.weights", 1000, 350)
    pinned.register("host.stage", 0, 50)
    assert pinned.note.startswith("only 200 B of 400 B of RAM could be pinned")
    assert pinned.cut("host.weights", 90, 310) == [(90, 100), (100, 200), (200, 300), (300, 310)]
    assert pinned.cut("elsewhere", 3, 9) == [(3, 9)]
