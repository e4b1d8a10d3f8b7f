"""The one cost formula: only `seconds` turns bytes and flops into time."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.graph.ops import Copy, Experts, KvMove
from penstock.graph.tasks import Call, Task, link_lane
from penstock.spec.machine import KV_IN_FLIGHT, Figure, MachineSpec, Rate
from penstock.spec.places import CPU, DISK, Lane, is_disk, reads_disk

_LEAST_S_PER_BYTE = 1e-15  # so that a speed is finite where bytes cost nothing

Overheads = tuple[float, float]  # seconds of a task, and of a call that nobody has prepared


class Cost:
    """A machine's rates, looked up once per (lane, op, format, rows)."""

    def __init__(self, machine: MachineSpec) -> None:
        self.machine = machine
        self.between_passes_s = machine.overhead_s(CPU, "pass")
        self._rates: dict[tuple[str, str, str, int], Rate] = {}
        self._overheads: dict[str, Overheads] = {}
        self._factors: dict[tuple[str, frozenset[str]], float] = {}

    def seconds(self, task: Task) -> float:
        """How long a task occupies its lanes where no other lane is busy. Calls run one after another: the sum of
        alpha + max(bytes · s_per_byte, flops · s_per_flop), each (ScheInfer Eq. 3, with PIPO's two regimes), and what a
        task costs beside them. KV of several sequences is many ranges, of an alpha each; on a disk those in flight
        together share one. On two lanes the slower leg counts."""
        lanes = task.lanes
        return self._lane_s(lanes[0], task) if len(lanes) == 1 else max(self._lane_s(lane, task) for lane in lanes)

    def factor(self, lane: Lane, busy: frozenset[Lane]) -> float:
        """How much longer a task on `lane` takes while other lanes are busy: by their sharings, all of them."""
        found = self._factors.get((lane, busy))
        if found is None:
            found, as_measured, beside = 1.0, self._as_measured(lane), set(map(self._as_measured, busy))
            for sharing in self.machine.sharing:
                if sharing.lane == as_measured and sharing.beside in beside:
                    found *= sharing.factor
            self._factors[lane, busy] = found
        return found

    def least_s(self, lane: Lane, op: str, fmt: str, rows: int, nbytes: float, flops: float = 0.0) -> float:
        """Seconds that so many bytes and flops take at least: nothing begins, nothing else is busy."""
        rate = self._known((lane, op, fmt, rows))
        return max(nbytes * rate.s_per_byte, flops * rate.s_per_flop)

    def task_s(self, lane: Lane) -> float:
        """Seconds that a task takes beside its calls, all of them prepared."""
        return self._overhead(lane)[0]

    def call_s(self, lane: Lane, op: str, fmt: str, rows: int = 1, nbytes: float = 0.0, flops: float = 0.0) -> float:
        """Seconds of a prepared call among others of a task."""
        rate = self._known((lane, op, fmt, rows))
        return rate.alpha_s + max(nbytes * rate.s_per_byte, flops * rate.s_per_flop)

    def call_parts_s(self, lane: Lane, call: Call) -> tuple[float, float]:
        """Seconds that a call takes beside its bytes and flops, where nobody has prepared it, and for them."""
        rate = self._rate(lane, call)
        begins = _kv_begins(lane, call.operands) if isinstance(call.operands, KvMove) else 1
        fixed_s = begins * rate.alpha_s + self._overhead(lane)[1]
        return fixed_s, max(call.bytes * rate.s_per_byte, call.flops * rate.s_per_flop)

    def bytes_per_s(self, lane: Lane, op: str, fmt: str) -> float:
        """The rate of large calls of an op, where no other lane is busy."""
        return 1 / max(self._known((lane, op, fmt, 1)).s_per_byte, _LEAST_S_PER_BYTE)

    def _as_measured(self, lane: Lane) -> Lane:
        """A second disk that nobody measured shares what the first one does."""
        if not reads_disk(lane):
            return lane
        return lane if any(lane in (s.lane, s.beside) for s in self.machine.sharing) else DISK.reads

    def _lane_s(self, lane: Lane, task: Task) -> float:
        task_s, call_s = self._overhead(lane)
        total = task_s + (call_s * len(task.calls) if task.like < 0 else 0.0)
        for call in task.calls:
            _, begin_s, bytes_s, flops_s = self._terms(lane, call)
            total += begin_s + max(bytes_s, flops_s)
        return total

    def by_figure(self, lane: Lane, task: Task) -> Iterator[tuple[Figure, float]]:
        """The addends of the seconds that a task takes on a lane, each with the machine's figure that it comes from."""
        for what, count in (("task", 1), ("call", len(task.calls) if task.like < 0 else 0)):
            overhead = self.machine.overhead(lane, what)
            if overhead is not None and count:
                yield overhead.figure("alpha_s"), count * overhead.alpha_s
        for call in task.calls:
            rate, begin_s, bytes_s, flops_s = self._terms(lane, call)
            yield rate.figure("alpha_s"), begin_s
            yield (rate.figure("s_per_byte"), bytes_s) if bytes_s >= flops_s else (rate.figure("s_per_flop"), flops_s)

    def _terms(self, lane: Lane, call: Call) -> tuple[Rate, float, float, float]:
        """A call's rate, and the seconds that it takes to begin, for its bytes and for its flops."""
        rate = self._rate(lane, call)
        begins = _kv_begins(lane, call.operands) if isinstance(call.operands, KvMove) else 1
        return rate, begins * rate.alpha_s, call.bytes * rate.s_per_byte, call.flops * rate.s_per_flop

    def _overhead(self, lane: Lane) -> Overheads:
        found = self._overheads.get(lane)
        if found is None:
            found = (self.machine.overhead_s(lane, "task"), self.machine.overhead_s(lane, "call"))
            self._overheads[lane] = found
        return found

    def _rate(self, lane: Lane, call: Call) -> Rate:
        if isinstance(call.operands, Copy):  # on the device's lane, at the link's speed
            lane = link_lane(call.operands)
        return self._known((lane, call.op, call.format, _rows(call)))

    def _known(self, key: tuple[Lane, str, str, int]) -> Rate:
        rate = self._rates.get(key)
        if rate is None:
            rate = self._rates[key] = self.machine.rate(*key)
        return rate


def _kv_begins(lane: Lane, move: KvMove) -> int:
    """How often what a KV move costs before its bytes is waited for."""
    return -(-move.ranges // (KV_IN_FLIGHT if is_disk(lane) else 1))


def _rows(call: Call) -> int:
    """Rows that the call multiplies, as rates count them."""
    if call.batch is None:
        return 1
    if call.op == "head":
        return max(1, len(call.batch.logits))
    if isinstance(call.operands, Experts):
        return call.operands.expert_rows
    return call.batch.most_rows if call.op == "attend" else call.batch.total_rows
