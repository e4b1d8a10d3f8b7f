"""Which device computes, and why. Where `auto` finds none the CPU computes; a device that was named has to be there."""

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

_EMULATED_SHARE = 4  # of RAM, so small a part stands in for device memory unless the user says how much
# What a driver leaves behind: NVIDIA's and AMD's on Linux, WSL2's. Looked at first, for torch takes seconds to import.
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True)
class Chosen:
    """`name`: cuda, emulated or none. `reason`: a sentence. `machine`: with the device's tier and lanes, or without.
    `open`: takes the device with a cap in bytes, once a plan is made for it; None where there is none."""

    name: str
    reason: str
    machine: MachineSpec
    open: Callable[[int], Device] | None = None


def choose(
    name: str, machine: MachineSpec, device_memory_bytes: int | None, cache: Path | None = None,
    on_progress: Progress | None = None,
) -> Chosen:  # fmt: skip
    """`name`: one of `spec.ask.DEVICES`. `machine`: as probed. `cache`: keeps the device's figures; None measures
    nothing, and a device without figures is none. Raises BadRequest for another name, and for `cuda` where no GPU can
    be used."""
    check_device(name)
    if name == "emulated":
        return _emulated(machine, device_memory_bytes)
    if name == "none":
        return Chosen("none", "no device: asked for", without_device(machine))
    require_present(name)
    why = _missing()
    if why is None:
        found = _gpu(machine, cache, on_progress)
        if isinstance(found, Chosen):
            return found
        why = found
        if name == "cuda":
            raise _absent(why)
    return Chosen("none", f"no device, the CPU computes: {why}", without_device(machine))


def require_present(name: str) -> None:
    """Refuses `cuda` where a look at this machine tells that it cannot be, without loading torch. Raises BadRequest."""
    if name == "cuda" and (why := _missing()) is not None:
        raise _absent(why)


def _absent(why: str) -> BadRequest:
    return BadRequest(f"--device cuda: {why}; --device none computes on the CPU")


def without_device(machine: MachineSpec) -> MachineSpec:
    """The same machine, the CPU computes."""
    if not any(tier.name == GPU.executor for tier in machine.tiers):
        return machine
    return replace(machine, tiers=tuple(tier for tier in machine.tiers if tier.name != GPU.executor))


def _missing() -> str | None:
    """Why torch need not be asked, as half a sentence."""
    windows = sys.platform == "win32"
    if not (ctypes.util.find_library("nvcuda") if windows else any(Path(node).exists() for node in _DRIVERS)):
        return "no driver of a GPU is here"
    if importlib.util.find_spec("torch") is None:
        return "a GPU may be here, but torch is not (pip install 'penstock[gpu]')"
    return None


def _gpu(machine: MachineSpec, cache: Path | None, on_progress: Progress | None) -> Chosen | str:
    from penstock.runtime.device.cuda.found import find

    card = find()
    if isinstance(card, str):
        return card
    figures = _figures(machine, card.name, cache, on_progress)
    if isinstance(figures, str):
        return figures
    # What is free changes from run to run; this process's context is taken already.
    free = card.free_bytes + figures.context_bytes
    tiers = tuple(replace(t, bytes=max(1, free)) if t.name == GPU.executor else t for t in figures.tiers)
    device, context_bytes = card.device, figures.context_bytes

    def take(limit_bytes: int) -> Device:
        from penstock.runtime.device.cuda.device import TorchDevice

        return TorchDevice(device, limit_bytes, context_bytes)

    return Chosen("cuda", f"device: {card.name}", replace(figures, tiers=tiers), take)


def _figures(machine: MachineSpec, card: str, cache: Path | None, on_progress: Progress | None) -> MachineSpec | str:
    """The machine's with the device's, as kept or measured now; or why there are none."""
    if cache is None:
        return "its speed is not known yet (penstock probe)"
    of_host = machine_file(cache)
    # The CPU's figures are among them: measured again, so are these.
    base = hashlib.sha256(repr((machine.rates, machine.sharing)).encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9]+", "-", card).strip("-").lower()
    path = of_host.with_name(f"{of_host.stem}-{name}-{base}.json")
    if (known := kept(path)) is not None:
        memory = {tier.name: tier for tier in machine.tiers}
        return replace(known, tiers=tuple(memory.get(tier.name, tier) for tier in known.tiers))
    if on_progress:
        on_progress(f"measuring {card}, once", 0, 0)
    done = child.run("penstock.runtime.device.cuda.measure", stdin=machines.dumps(machine))
    if done.returncode:
        return f"measuring {card} failed: {child.last_words(done)}"
    found = machines.loads(done.stdout, "the probe's answer")
    keep(path, found)
    return found


def _emulated(machine: MachineSpec, device_memory_bytes: int | None) -> Chosen:
    """A part of RAM stands in for the device's memory; its rates are the CPU's, since that computes."""
    machine = without_device(machine)
    have = machine.tier(HOST).bytes
    limit = have // _EMULATED_SHARE if device_memory_bytes is None else device_memory_bytes
    rates = [rate for rate in machine.rates if rate.lane not in LANES]
    rates += [replace(rate, lane=GPU.kernels) for rate in machine.rates if rate.lane == CPU and rate.op != "pass"]
    rates += [Rate(lane, "*", "*", 5e-5, 1 / LINK_BYTES_PER_S, source="as emulated") for lane in LANES[1:]]
    tiers = [replace(t, bytes=max(1, t.bytes - limit)) if t.name == HOST else t for t in machine.tiers]
    made = replace(
        machine, tiers=(*tiers, Capacity(GPU.executor, max(1, limit), "emulated")), rates=tuple(rates),
        device_process_bytes=0, context_bytes=0,
    )  # fmt: skip
    return Chosen("emulated", "device: emulated, for tests; its speed means nothing", made, EmulatedDevice)
