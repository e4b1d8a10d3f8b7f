"""Chooses the device that computes, and says why. Where `auto` finds no device the CPU computes; a device that the user
named has to be there."""

from __future__ import annotations

import ctypes.util
import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import BadRequest
from penstock.runtime import child
from penstock.runtime.device import LANES, Device
from penstock.runtime.device.emulated import LINK_BYTES_PER_S, EmulatedDevice
from penstock.runtime.host import Progress
from penstock.runtime.probe import keep, kept, machine_file
from penstock.spec import machine as machines
from penstock.spec.ask import check_device
from penstock.spec.machine import Capacity, MachineSpec, Rate
from penstock.spec.places import CPU, GPU, HOST

_EMULATED_SHARE = 4  # 1/4 of RAM stands in for device memory, unless the user says how much
# Device files of drivers: NVIDIA's and AMD's on Linux, WSL2's. They are looked for first, for torch takes seconds to
# import.
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True)
class ChosenDevice:
    """The device that computes, or none.

    `name`: cuda, emulated or none. `reason`: a sentence. `machine`: has the device's tier and lanes where there is a
    device. `open(limit_bytes)`: takes the device, with a cap on its memory, once a plan is made; None without a
    device."""

    name: str
    reason: str
    machine: MachineSpec
    open: Callable[[int], Device] | None = None


def choose(
    name: str, machine: MachineSpec, device_memory_bytes: int | None, cache: Path | None = None,
    on_progress: Progress | None = None,
) -> ChosenDevice:  # fmt: skip
    """Chooses a device by `name`, one of `spec.ask.DEVICES`. `machine`: as probed. `cache`: the folder that keeps the
    device's figures; with None nothing is measured, and a GPU is not chosen. Raises BadRequest for another name, and
    for `cuda` where no GPU can be used."""
    check_device(name)
    if name == "emulated":
        return _emulated(machine, device_memory_bytes)
    if name == "none":
        return ChosenDevice("none", "no device: asked for", without_device(machine))
    require_present(name)
    why_not = _missing()
    if why_not is None:
        gpu = _gpu(machine, cache, on_progress)
        if isinstance(gpu, ChosenDevice):
            return gpu
        why_not = gpu
        if name == "cuda":
            raise _absent(why_not)
    return ChosenDevice("none", f"no device, the CPU computes: {why_not}", without_device(machine))


def require_present(name: str) -> None:
    """Refuses `cuda` where no driver or no torch is here, without loading torch. Raises BadRequest."""
    if name == "cuda" and (why_not := _missing()) is not None:
        raise _absent(why_not)


def _absent(why_not: str) -> BadRequest:
    return BadRequest(f"--device cuda: {why_not}; --device none computes on the CPU")


def without_device(machine: MachineSpec) -> MachineSpec:
    """The same machine without its device: the CPU computes."""
    if not any(tier.name == GPU.executor for tier in machine.tiers):
        return machine
    return replace(machine, tiers=tuple(tier for tier in machine.tiers if tier.name != GPU.executor))


def _missing() -> str | None:
    """Why there can be no GPU, as half a sentence. None where torch has to be asked."""
    windows = sys.platform == "win32"
    if not (ctypes.util.find_library("nvcuda") if windows else any(Path(node).exists() for node in _DRIVERS)):
        return "no driver of a GPU is here"
    if importlib.util.find_spec("torch") is None:
        return "a GPU may be here, but torch is not (pip install 'penstock[gpu]')"
    return None


def _gpu(machine: MachineSpec, cache: Path | None, on_progress: Progress | None) -> ChosenDevice | str:
    """The GPU that torch finds; or why it cannot be used, as half a sentence."""
    from penstock.runtime.device.cuda.card import find

    card = find()
    if isinstance(card, str):
        return card
    figures = _figures(machine, card.name, cache, on_progress)
    if isinstance(figures, str):
        return figures
    # Free memory changes from run to run. The context of this process is taken already, so it is added.
    free_bytes = card.free_bytes + figures.context_bytes
    tiers = tuple(replace(t, bytes=max(1, free_bytes)) if t.name == GPU.executor else t for t in figures.tiers)
    device, context_bytes = card.device, figures.context_bytes

    def take(limit_bytes: int) -> Device:
        from penstock.runtime.device.cuda.device import TorchDevice

        return TorchDevice(device, limit_bytes, context_bytes)

    return ChosenDevice("cuda", f"device: {card.name}", replace(figures, tiers=tiers), take)


def _figures(machine: MachineSpec, card: str, cache: Path | None, on_progress: Progress | None) -> MachineSpec | str:
    """The machine's figures with the device's, as kept or measured now; or why there are none, as half a sentence."""
    if cache is None:
        return "its speed is not known yet (penstock probe)"
    host_file = machine_file(cache)
    # The name has a hash of the CPU's figures, which are in the file too: when these change, all are measured again.
    cpu_hash = hashlib.sha256(repr((machine.rates, machine.sharing)).encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9]+", "-", card).strip("-").lower()
    path = host_file.with_name(f"{host_file.stem}-{name}-{cpu_hash}.json")
    if (known := kept(path)) is not None:
        memory = {tier.name: tier for tier in machine.tiers}
        return replace(known, tiers=tuple(memory.get(tier.name, tier) for tier in known.tiers))
    if on_progress:
        on_progress(f"measuring {card}, once", 0, 0)
    done = child.run("penstock.runtime.device.cuda.measure", stdin=machines.dumps(machine))
    if done.returncode:
        return f"measuring {card} failed: {child.last_words(done)}"
    figures = machines.loads(done.stdout, "the probe's answer")
    keep(path, figures)
    return figures


def _emulated(machine: MachineSpec, device_memory_bytes: int | None) -> ChosenDevice:
    """A part of RAM stands in for the device's memory. The rates of its kernels are the CPU's, for the CPU computes."""
    machine = without_device(machine)
    ram_bytes = machine.tier(HOST).bytes
    limit_bytes = ram_bytes // _EMULATED_SHARE if device_memory_bytes is None else device_memory_bytes
    rates = [rate for rate in machine.rates if rate.lane not in LANES]
    rates += [replace(rate, lane=GPU.kernels) for rate in machine.rates if rate.lane == CPU and rate.op != "pass"]
    rates += [Rate(lane, "*", "*", 5e-5, 1 / LINK_BYTES_PER_S, source="as emulated") for lane in LANES[1:]]
    tiers = [replace(t, bytes=max(1, t.bytes - limit_bytes)) if t.name == HOST else t for t in machine.tiers]
    machine = replace(
        machine, tiers=(*tiers, Capacity(GPU.executor, max(1, limit_bytes), "emulated")), rates=tuple(rates),
        device_process_bytes=0, context_bytes=0,
    )  # fmt: skip
    return ChosenDevice("emulated", "device: emulated, for tests; its speed means nothing", machine, EmulatedDevice)
