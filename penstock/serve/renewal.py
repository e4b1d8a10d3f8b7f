"""Renews a promise by what disk and RAM give today, after the weights are loaded and before the first word.

Loading reads the weights that stay with the very reader that streams the others later. Its speed, beside the speed that
the machine's figures foretell for the same loads, says what the disk gives today. Where loading took less than half a
second, weights that stream are read for the rest of it. The weights that stay are then read once more, for some 20 ms,
which says the same of the RAM. The plan is predicted again for a machine whose lanes move bytes so many times as fast:
no other formula turns bytes into seconds.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError
from penstock.planner.cost import Cost
from penstock.planner.explain import Band, rate, spread
from penstock.planner.predict import Prediction
from penstock.planner.routing import RouterTrace
from penstock.planner.shorten import quick
from penstock.runtime.device import uses_device
from penstock.runtime.reread import Read
from penstock.serve.history import LEAST_RAM_BYTES
from penstock.serve.session import Session
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.places import CPU, Lane, reads_disk
from penstock.spec.plan import Plan
from penstock.units import MIB, format_rate, format_seconds

# Reading tells the disk's speed if it had either. Less is over before the disk is at its speed, and on a busy machine a
# model of a few MiB may wait for a processor as long as for the disk. Where a decode pass streams so many bytes,
# reading goes on until it had so many seconds: a tenth of a second measures a burst. By loading alone, promises were
# 18 % off at the median and 62 % at worst, and after half a second of reading 6 and 16 %.
_LEAST_READ_BYTES, _LEAST_READ_S = 64 * MIB, 0.5
# RAM that seems slower is read so many times more, 20 ms each, and the best of them counts. On a shared machine one
# such reading gave 0.6 of the speed that the run then had.
_MORE_RAM = 3
_DISK, _RAM = "disk", "RAM"
# The least and most times of a shift: beyond them the measurement was disturbed. RAM that reads faster than it did for
# the probe raises no promise: beside other processes 20 ms of reading gave 13 to 83 GB/s, while runs became no faster.
_TIMES = {_DISK: (0.25, 4.0), _RAM: (0.5, 1.0)}
_SAME = 0.03  # a smaller relative change is none
# What a disk gives is taken to change by a tenth from day to day, or by as much as it seems to have changed; and a
# reading of half a second to be off by so much, and by as much as its quarters differ. In an hour in which passes of
# 4 s were within 6 % of their mean, 24 readings were off by 8 % where quarters differed by 2 %, by 10 and 12 % where
# they differed by 5 and 9 %. In calmer hours they are off by 3 % (docs/LOG.md, 2026-11-29).
_USUAL_CHANGE, _OFF, _OFF_BY_SWING = 0.1, 0.04, 1.0


@dataclass(frozen=True)
class Shift:
    """What a tier gives today. `what`: disk or RAM. `foretold_bytes_per_s`: by the machine's figures, for what was
    read. `swing`: by how much the quarters of the reading differ."""

    what: str
    foretold_bytes_per_s: float
    measured_bytes_per_s: float
    swing: float = 0.0

    @property
    def times(self) -> float:
        """Today's speed over the foretold one, bounded. 1 where they hardly differ. Of a disk a part of the change
        counts: as much as makes the expected error least."""
        times = self.measured_bytes_per_s / self.foretold_bytes_per_s
        if self.what == _DISK and times > 0:
            change = math.log(times)
            usual, off = max(_USUAL_CHANGE, abs(change)) ** 2, _OFF**2 + (_OFF_BY_SWING * self.swing) ** 2
            times = math.exp(change * usual / (usual + off))
        least, most = _TIMES[self.what]
        return 1.0 if abs(times - 1) < _SAME else min(most, max(least, times))

    def __str__(self) -> str:
        today, foretold = map(format_rate, (self.measured_bytes_per_s, self.foretold_bytes_per_s))
        swings = f"; it swings by {self.swing:.0%}, so less of the change counts" if self.swing >= _SAME else ""
        return f"{self.what} gives {today} today, where {foretold} were foretold (× {self.times:.2f}{swings})"

    def moves(self, lane: Lane) -> bool:
        """Whether the tasks of a lane take their bytes from this tier."""
        return reads_disk(lane) if self.what == _DISK else lane == CPU


@dataclass(frozen=True)
class Renewed:
    """A prediction for today, and what it follows from."""

    prediction: Prediction
    shifts: tuple[Shift, ...]

    def line(self, promised: Prediction, band: Band) -> str | None:
        """'promised 1.23 tok/s, with today's disk 1.08'; None where today's lies within the band of what was
        promised."""
        now = self.prediction
        lo, hi = spread(promised.decode_tokens_per_s, band.decode.factor)
        first_lo, first_hi = spread(promised.ttft_s, band.ttft.factor)
        names = " and ".join(shift.what for shift in self.shifts if shift.times != 1)
        if not lo <= now.decode_tokens_per_s <= hi:
            was, now_s = rate(promised.decode_tokens_per_s), rate(now.decode_tokens_per_s)
            return f"promised {was} tok/s, with today's {names} {now_s}"
        if not first_lo <= now.ttft_s <= first_hi:
            was, now_s = format_seconds(promised.ttft_s), format_seconds(now.ttft_s)
            return f"promised the first word after {was}, with today's {names} {now_s}"
        return None

    def report(self) -> dict[str, Any]:
        """The JSON fields."""
        return {
            "ttft_s": self.prediction.ttft_s,
            "decode_tokens_per_s": self.prediction.decode_tokens_per_s,
            "today": {
                shift.what.lower(): {
                    "foretold_bytes_per_s": shift.foretold_bytes_per_s,
                    "measured_bytes_per_s": shift.measured_bytes_per_s,
                    "times": shift.times,
                }
                for shift in self.shifts
            },
        }


def shifts(session: Session, machine: MachineSpec) -> tuple[Shift, ...]:
    """What disk and RAM give now, each where that can be told: weights were read for long enough, from one disk, and no
    device computes. `machine`: whose figures the plan was predicted with. Reads the disk for up to half a second, if
    decoding streams and loading took less, and RAM for some 20 ms, or some 80 where it seems slow."""
    if uses_device(session.plan):
        return ()
    cost, shifts = Cost(machine), list[Shift]()
    read = session.loading
    if read.seconds < _LEAST_READ_S:
        # A disk that fails now, or a damaged granule, is met by the pass that wants it, which says what to do.
        with suppress(PenstockError):
            read = read.beside(session.read_streamed(_LEAST_READ_S - read.seconds, _LEAST_READ_BYTES))
    disks = [lane for lane, nbytes in session.reader.bytes_by_disk.items() if nbytes]
    if len(disks) == 1 and tells(read):
        lane = disks[0]
        foretold_s = read.loads * cost.call_s(lane, "load", "*") + cost.least_s(lane, "load", "*", 1, read.bytes)
        shifts.append(Shift(_DISK, read.bytes / foretold_s, read.bytes_per_s, read.swing))
    resident, foretold = session.read_resident(), _foretold_ram(session.plan, cost)
    for _ in range(_MORE_RAM):
        if resident.bytes < LEAST_RAM_BYTES or resident.bytes_per_s >= (1 - _SAME) * foretold:
            break
        resident = max(resident, session.read_resident(), key=lambda read: read.bytes_per_s)
    if resident.bytes >= LEAST_RAM_BYTES and resident.seconds > 0:
        shifts.append(Shift(_RAM, foretold, resident.bytes_per_s))
    return tuple(shifts)


def _foretold_ram(plan: Plan, cost: Cost) -> float:
    """The speed of the RAM, in bytes/s, that a promise goes by: that of the fastest product of one row in the formats
    of this plan, and no more than the machine's own figure.

    Products and the RAM are measured some seconds apart. A shared RAM gave 56 GB/s for the one, where the others read
    at 36 and runs at 33: beside 56, promises that were right became 0.6 of themselves (docs/LOG.md)."""
    kinds = {block.format.kind for part in plan.parts.values() for block in part.blocks if block.tiled or block.stride}
    return min(cost.bytes_per_s(CPU, "*", "*"), cost.products_bytes_per_s(CPU, kinds))


def tells(read: Read) -> bool:
    """Whether weights were read for long enough to tell the disk's speed."""
    long = read.bytes >= _LEAST_READ_BYTES or read.seconds >= _LEAST_READ_S
    return read.bytes > 0 and read.seconds > 0 and long


def renewed(
    promised: Prediction, session: Session, ask: Ask, machine: MachineSpec, trace: RouterTrace | None
) -> Renewed | None:
    """The promise for today; None where nothing can be told of today. `trace`: what routers were taken to say."""
    seen = shifts(session, machine)
    if not seen:
        return None
    today = machine
    for shift in seen:
        if shift.times != 1:
            today = today.faster(shift.moves, shift.times)
    if today is machine:
        return Renewed(promised, seen)
    return Renewed(quick(session.plan, ask, today, spread=False, trace=trace), seen)
