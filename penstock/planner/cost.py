"""Turns bytes and flops into seconds, by a machine's rates. No other module of the planner reads a rate.

The formula for a call on a lane is alpha_s + max(bytes · s_per_byte, flops · s_per_flop) (ScheInfer Eq. 3, with PIPO's
two regimes). The rate with alpha_s, s_per_byte and s_per_flop depends on lane, op, number format and rows. A call whose
matrices have several formats takes the sum over these, each with its share of the bytes and of the flops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from penstock.graph.ops import PRODUCTS, Copy, Experts, Ffn, KvMove, Operands, Pick
from penstock.graph.tasks import Call, Task, link_lane
from penstock.spec.format import Kinds, Share
from penstock.spec.machine import KV_IN_FLIGHT, PICKS_IN_FLIGHT, Figure, MachineSpec, Rate
from penstock.spec.parts import PAGE_BYTES
from penstock.spec.places import CPU, DISK, Lane, is_disk, reads_disk
from penstock.units import MIB

_MOST_HOLE_BYTES = MIB
_LEAST_S_PER_BYTE = 1e-15  # a speed is finite even if bytes cost nothing

# A multiplication of neurons' rows takes so many times as long as one of tiles with many rows. Rows are first turned
# into tiles, or are multiplied as floats if a row of activations has few of them (docs/LOG.md, 2026-11-28).
_ROW_BY_ROW = 6.0
_MANY_ROWS = 64  # a call with so many rows is bound by its flops

# A product of many rows reads and writes its sums, and rounds activations, in each call anew, so its begin grows with
# its rows: an FFN's took 0.2, 0.46, 0.9 and 1.5 ms with 64, 128, 256 and 512 (docs/LOG.md, 2026-11-28). The probe's
# lines for many rows have one begin, which is that of so many rows in the mean. By the most rows of a line, 0 for all.
_BEGIN_ROWS = {64: 40, 0: 384}

_NO_TIME_S = 1e-300

Overheads = tuple[float, float]  # seconds of a task beside its calls, seconds of preparing a call


class _RateLine(NamedTuple):
    """What a call costs: its begin, a byte, a flop. `of`: the machine's rates that this follows from, one for each
    format of the call's matrices."""

    alpha_s: float
    s_per_byte: float
    s_per_flop: float
    of: tuple[tuple[Rate, Share], ...]


class Cost:
    """The costs on one machine. Rates are looked up once for each (lane, op, format, rows).

    between_passes_s  seconds of the pause between two passes
    """

    def __init__(self, machine: MachineSpec) -> None:
        self.machine = machine
        self.between_passes_s = machine.overhead_s(CPU, "pass")
        self._row_lines: dict[tuple[Lane, str, Kinds, int, float], _RateLine] = {}
        self._lines: dict[tuple[Lane, str, Kinds, int], _RateLine] = {}
        self._overheads: dict[str, Overheads] = {}
        self._factors: dict[tuple[str, frozenset[str]], float] = {}

    def seconds(self, task: Task, one_piece: bool = False) -> float:
        """Seconds that a task occupies its lanes if no other lane is busy. `one_piece`: it is a part of a native
        program (`graph/open_passes`), which has no overhead for it.

        Its calls run one after another, so their seconds add up, and the task's own overhead is added. A call that
        comes for the first time is prepared, which takes time too (`task.like` < 0). A task on two lanes takes as long
        as on the slower one."""
        lanes = task.lanes
        if len(lanes) == 1:
            return self._lane_s(lanes[0], task, one_piece)
        return max(self._lane_s(lane, task, one_piece) for lane in lanes)

    def factor(self, lane: Lane, busy: frozenset[Lane]) -> float:
        """How many times as long a task on `lane` takes while the lanes `busy` are busy: the product of the factors of
        `MachineSpec.sharing`."""
        longer = self._factors.get((lane, busy))
        if longer is None:
            longer, as_measured, beside = 1.0, self._as_measured(lane), set(map(self._as_measured, busy))
            for sharing in self.machine.sharing:
                if sharing.lane == as_measured and sharing.beside in beside:
                    longer *= sharing.factor
            self._factors[lane, busy] = longer
        return longer

    def least_s(self, lane: Lane, op: str, fmt: Kinds, rows: int, nbytes: float, flops: float = 0.0) -> float:
        """The least seconds that so many bytes and flops take: without alpha_s, and with no other lane busy."""
        rate = self._line((lane, op, fmt, rows))
        return max(nbytes * rate.s_per_byte, flops * rate.s_per_flop)

    def task_s(self, lane: Lane) -> float:
        """Seconds that a task takes beside its calls, if all of them are prepared."""
        return self._overhead(lane)[0]

    def call_s(self, lane: Lane, op: str, fmt: Kinds, rows: int = 1, nbytes: float = 0.0, flops: float = 0.0) -> float:
        """Seconds that one more prepared call adds to a task."""
        rate = self._line((lane, op, fmt, rows))
        return rate.alpha_s + max(nbytes * rate.s_per_byte, flops * rate.s_per_flop)

    def call_parts_s(self, lane: Lane, call: Call) -> tuple[float, float]:
        """(fixed seconds of a call, with those of preparing it; seconds of its bytes or flops)."""
        rate = self._rate(lane, call)
        begins = _begins(lane, call.operands, rate)
        fixed_s = begins * rate.alpha_s + self._overhead(lane)[1]
        return fixed_s, max(call.bytes * rate.s_per_byte, call.flops * rate.s_per_flop)

    def hole_bytes(self, lane: Lane, fmt: str) -> int:
        """The bytes that are read in the time that one more read of records takes to begin while others are in flight,
        in whole pages. A hole of so many bytes between two reads is read through."""
        rate, load = (self._line((lane, op, fmt, 1)) for op in ("pick", "load"))
        # No disk reads scattered bytes faster than consecutive ones, whatever a fit of small reads says.
        nbytes = rate.alpha_s / _in_flight(rate) / max(rate.s_per_byte, load.s_per_byte, _LEAST_S_PER_BYTE)
        return int(min(nbytes, _MOST_HOLE_BYTES)) // PAGE_BYTES * PAGE_BYTES

    def bytes_per_s(self, lane: Lane, op: str, fmt: str) -> float:
        """The speed of large calls of an op in bytes per second, if no other lane is busy."""
        return 1 / max(self._line((lane, op, fmt, 1)).s_per_byte, _LEAST_S_PER_BYTE)

    def products_bytes_per_s(self, lane: Lane, formats: Iterable[str]) -> float:
        """The speed of the fastest product of one row in any of these formats; infinite without formats."""
        return max((self.bytes_per_s(lane, op, fmt) for op in PRODUCTS for fmt in formats), default=math.inf)

    def bytes_in(self, seconds: float, lane: Lane, op: str, fmt: str) -> float:
        """Bytes that large calls of an op move in so many seconds, if no other lane is busy."""
        return seconds * self.bytes_per_s(lane, op, fmt)

    def _as_measured(self, lane: Lane) -> Lane:
        """The lane whose sharing holds for `lane`. If nobody measured a second disk's sharing, it is the first
        one's."""
        if not reads_disk(lane):
            return lane
        return lane if any(lane in (s.lane, s.beside) for s in self.machine.sharing) else DISK.reads

    def _lane_s(self, lane: Lane, task: Task, one_piece: bool) -> float:
        """Seconds that a task occupies one lane, if no other lane is busy."""
        task_s, call_s = (0.0, 0.0) if one_piece else self._overhead(lane)
        total = task_s + (call_s * len(task.calls) if task.like < 0 else 0.0)
        for call in task.calls:
            rate = self._rate(lane, call)
            bytes_s, flops_s = call.bytes * rate.s_per_byte, call.flops * rate.s_per_flop
            begin_s = _begins(lane, call.operands, rate) * rate.alpha_s
            total += begin_s + (bytes_s if bytes_s > flops_s else flops_s)
        return total

    def by_figure(self, lane: Lane, task: Task, one_piece: bool = False) -> Iterator[tuple[Figure, float]]:
        """(a figure of the machine, seconds): the addends of a task's seconds on a lane, and the figure of each."""
        overheads = (("task", 1), ("call", len(task.calls) if task.like < 0 else 0))
        for what, count in overheads if not one_piece else ():
            overhead = self.machine.overhead(lane, what)
            if overhead is not None and count:
                yield overhead.figure("alpha_s"), count * overhead.alpha_s
        for call in task.calls:
            line, begin_s, bytes_s, flops_s = self._terms(lane, call)
            for rate, share in line.of:
                yield rate.figure("alpha_s"), begin_s * share.bytes * rate.alpha_s / max(line.alpha_s, _NO_TIME_S)
                if bytes_s >= flops_s:
                    yield rate.figure("s_per_byte"), call.bytes * share.bytes * rate.s_per_byte
                else:
                    yield rate.figure("s_per_flop"), call.flops * share.flops * rate.s_per_flop

    def _terms(self, lane: Lane, call: Call) -> tuple[_RateLine, float, float, float]:
        """(a call's line, its seconds to begin, its seconds by bytes, its seconds by flops)."""
        rate = self._rate(lane, call)
        begins = _begins(lane, call.operands, rate)
        return rate, begins * rate.alpha_s, call.bytes * rate.s_per_byte, call.flops * rate.s_per_flop

    def _overhead(self, lane: Lane) -> Overheads:
        seconds = self._overheads.get(lane)
        if seconds is None:
            seconds = (self.machine.overhead_s(lane, "task"), self.machine.overhead_s(lane, "call"))
            self._overheads[lane] = seconds
        return seconds

    def _rate(self, lane: Lane, call: Call) -> _RateLine:
        if isinstance(call.operands, Copy):  # on the device's lane, at the link's speed
            lane = link_lane(call.operands)
        if isinstance(call.operands, Ffn) and call.operands.row_flops:
            return self._row_line(lane, call, call.operands.row_flops / call.flops)
        return self._line((lane, call.op, call.format, _rows(call)))

    def _row_line(self, lane: Lane, call: Call, share: float) -> _RateLine:
        """The line of an FFN of which a `share` of the flops goes by neurons' rows. Its bytes come as those of one row
        do, since there is no time by bytes that tiles of more rows are as long in."""
        key = (lane, call.op, call.format, _rows(call), share)
        line = self._row_lines.get(key)
        if line is None:
            base, one, many = (self._line((*key[:3], rows)) for rows in (key[3], 1, _MANY_ROWS))
            longer = 1 + share * (_ROW_BY_ROW - 1)
            of = [
                (replace(b, s_per_byte=o.s_per_byte, s_per_flop=m.s_per_flop * longer), share_of)
                for (b, share_of), (o, _), (m, _) in zip(base.of, one.of, many.of, strict=True)
            ]
            line = _RateLine(base.alpha_s, one.s_per_byte, many.s_per_flop * longer, tuple(of))
            self._row_lines[key] = line
        return line

    def _line(self, key: tuple[Lane, str, Kinds, int]) -> _RateLine:
        line = self._lines.get(key)
        if line is None:
            lane, op, kinds, rows = key
            shares = (Share(kinds, 1.0, 1.0),) if isinstance(kinds, str) else kinds
            of = [(_begun(self.machine.rate(lane, op, share.kind, rows), op, rows), share) for share in shares]
            line = self._lines[key] = _RateLine(
                sum(rate.alpha_s * share.bytes for rate, share in of),
                sum(rate.s_per_byte * share.bytes for rate, share in of),
                sum(rate.s_per_flop * share.flops for rate, share in of),
                tuple(of),
            )
        return line


def _begun(rate: Rate, op: str, rows: int) -> Rate:
    """The rate with the begin of a call of so many rows."""
    if rate.lane != CPU or op not in PRODUCTS or rate.op != op or rate.rows not in _BEGIN_ROWS:
        return rate
    return replace(rate, alpha_s=rate.alpha_s * rows / _BEGIN_ROWS[rate.rows])


def _in_flight(line: _RateLine) -> int:
    """How many ranges of a disk were in flight together when the line was measured. If nobody has timed reads of
    records, the line is that of reads of KV."""
    return PICKS_IN_FLIGHT if line.of[0][0].op == "pick" else KV_IN_FLIGHT


def _begins(lane: Lane, operands: Operands, line: _RateLine) -> float:
    """How often a call waits for alpha_s. Most calls wait once. A move of several ranges waits for each range of KV and
    for each run of records, but on a disk, ranges that are in flight together wait together: they are one round. Runs
    of records are not read in whole rounds, since the next run begins as soon as one ends. So runs that follow others
    wait for their share of a round, however few they are. The first runs of a layer wait for one round at least, which
    also stands for the time of Python between a predictor and its reads. Without this round, promised speeds were up to
    1.6 times the measured ones (docs/LOG.md, 2026-11-27). With such a round for each unit of a layer they were 0.68
    times the measured ones on a faster disk (2026-11-28)."""
    if isinstance(operands, KvMove):
        ranges = operands.ranges
    elif isinstance(operands, Pick):
        ranges = len(operands.runs)
        if not is_disk(lane):
            return ranges
        return max(0.0 if operands.follows else 1.0, ranges / _in_flight(line))
    else:
        return 1
    return -(-ranges // (_in_flight(line) if is_disk(lane) else 1))


def _rows(call: Call) -> int:
    """The rows of a call by which its rate is looked up."""
    if call.batch is None:
        return 1
    if call.op == "head":
        return max(1, len(call.batch.logits))
    if isinstance(call.operands, Experts):
        return call.operands.expert_rows
    return call.batch.most_rows if call.op == "attend" else call.batch.total_rows
