"""The names of a machine's places: tiers hold bytes, executors compute, lanes begin tasks one after the other.

Plans, machine files and tasks name places by short strings. No other module spells them:

    tier        holds bytes: RAM `host`, a device's memory `gpu0`, a disk `disk0`
    executor    computes, on bytes in the tier that it is named after: `host` (the CPU), `gpu0`
    lane        an executor's kernels (named after it); a disk's reads `disk0` and writes `disk_write0`; the link to a
                device `h2d0` and back `d2h0`

The types are strings at run time. An executor may stand wherever its tier is asked for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, NewType

Tier = NewType("Tier", str)
Executor = NewType("Executor", Tier)
Lane = NewType("Lane", str)

HOST = Executor(Tier("host"))  # the CPU, and the tier that it computes on: RAM
CPU = Lane("host")  # the CPU's kernels


class DevicePlaces(NamedTuple):
    """The names of a device's places. `executor`: also the tier of its memory. `kernels`: the lane of its kernels.
    `to_device`, `to_host`: the lanes of the two directions of its link to RAM."""

    executor: Executor
    kernels: Lane
    to_device: Lane
    to_host: Lane


class DiskPlaces(NamedTuple):
    """The names of a disk's places: its tier, the lane of its reads and the lane of its writes."""

    tier: Tier
    reads: Lane
    writes: Lane


@lru_cache
def device(index: int) -> DevicePlaces:
    """The places of the `index`-th device, from 0."""
    name = f"gpu{index}"
    return DevicePlaces(Executor(Tier(name)), Lane(name), Lane(f"h2d{index}"), Lane(f"d2h{index}"))


@lru_cache
def disk(index: int) -> DiskPlaces:
    """The places of the `index`-th disk, from 0. Where there is only one disk, the model and KV lie on disk 0."""
    return DiskPlaces(Tier(f"disk{index}"), Lane(f"disk{index}"), Lane(f"disk_write{index}"))


def is_device(place: str) -> bool:
    """Whether a name is that of a device: of its memory (a tier), of itself (an executor) or of its kernels (a
    lane)."""
    number = place.removeprefix("gpu")
    return number != place and number.isdecimal() and len(number) < 4  # a machine file may name anything


def is_disk(tier: str) -> bool:
    """Whether a tier is a disk, or a lane reads or writes a disk."""
    return tier.startswith("disk")


def is_link(lane: str) -> bool:
    """Whether a lane is one direction of a device's link."""
    return lane.startswith(("h2d", "d2h"))


def device_of(executor: Tier) -> DevicePlaces:
    """The places of the device that an executor, or a tier of device memory, belongs to."""
    return device(int(executor.removeprefix("gpu")))


def disk_of(tier: Tier) -> DiskPlaces:
    """The places of the disk that a tier is."""
    return disk(int(tier.removeprefix("disk")))


def kernels_of(executor: Executor) -> Lane:
    """The lane on which an executor computes."""
    return Lane(executor)


def tier_of(arena: str) -> Tier:
    """The tier of an arena: `host` for `host.ring`."""
    return Tier(arena.partition(".")[0])


def executor_of(memory: Tier) -> Executor:
    """The executor that computes on a tier of memory."""
    assert not is_disk(memory), "nobody computes on a disk"
    return Executor(memory)


def lane_between(source: Tier, target: Tier) -> Lane:
    """The lane that carries bytes from one tier to another, one of which is RAM."""
    if source == HOST:
        return disk_of(target).writes if is_disk(target) else device_of(target).to_device
    assert target == HOST, f"nothing goes from {source} to {target} without crossing RAM"
    return disk_of(source).reads if is_disk(source) else device_of(source).to_host


def reads_disk(lane: Lane) -> bool:
    """Whether a lane is that of a disk's reads."""
    return lane.removeprefix("disk").isdigit()


def nearness(tier: Tier) -> tuple[int, str]:
    """A key to sort tiers by, the fastest first: devices, RAM, disks."""
    return 0 if is_device(tier) else 2 if is_disk(tier) else 1, tier


# The device and the disk that the planner places on, and that a machine's figures are measured for.
GPU, DISK = device(0), disk(0)
