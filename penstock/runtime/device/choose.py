"""Which device computes, and why. What a machine lacks is said in one line, and the CPU does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.runtime.device import Device
from penstock.runtime.device.emulated import LINK_BYTES_PER_S, EmulatedDevice
from penstock.spec.machine import MachineSpec, Rate, Tier
from penstock.spec.plan import DEVICE

DEVICES = ("auto", "cuda", "none", "emulated")
_EMULATED_SHARE = 4  # of RAM, so small a part stands in for device memory unless the user says how much


@dataclass(frozen=True)
class Chosen:
    """`name`: cuda, emulated or none. `reason`: a sentence. `machine`: with the device's tier and lanes, or without.
    `open`: takes the device, once a plan is made for it; None where there is none."""

    name: str
    reason: str
    machine: MachineSpec
    open: Callable[[int], Device] | None = None


def choose(name: str, machine: MachineSpec, device_memory_bytes: int | None) -> Chosen:
    """`name`: one of DEVICES. `machine`: as probed."""
    if name == "emulated":
        return _emulated(machine, device_memory_bytes)
    if name == "none":
        return Chosen("none", "no device: asked for", without_device(machine))
    return Chosen("none", "no device: this version has none but the emulated one", without_device(machine))


def without_device(machine: MachineSpec) -> MachineSpec:
    """The same machine, the CPU computes."""
    if not any(tier.name == DEVICE for tier in machine.tiers):
        return machine
    return replace(machine, tiers=tuple(tier for tier in machine.tiers if tier.name != DEVICE))


def _emulated(machine: MachineSpec, device_memory_bytes: int | None) -> Chosen:
    """A part of RAM stands in for the device's memory; its rates are the CPU's, since that computes."""
    machine = without_device(machine)
    have = machine.tier("host").bytes
    limit = have // _EMULATED_SHARE if device_memory_bytes is None else device_memory_bytes
    lanes = (DEVICE, "h2d0", "d2h0")
    rates = [rate for rate in machine.rates if rate.lane not in lanes]
    rates += [replace(rate, lane=DEVICE) for rate in machine.rates if rate.lane == "host" and rate.op != "pass"]
    rates += [Rate(lane, "*", "*", 5e-5, 1 / LINK_BYTES_PER_S, source="as emulated") for lane in lanes[1:]]
    tiers = [replace(t, bytes=max(1, t.bytes - limit)) if t.name == "host" else t for t in machine.tiers]
    made = replace(machine, tiers=(*tiers, Tier(DEVICE, max(1, limit), "emulated")), rates=tuple(rates))
    return Chosen("emulated", "an emulated device: for tests, its speed means nothing", made, EmulatedDevice)
