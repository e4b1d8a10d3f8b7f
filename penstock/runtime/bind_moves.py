"""Moves what tasks move: weights from disks into rings and caches, records of neurons, KV, copies between arenas."""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter

import numpy as np

from penstock.graph import ops
from penstock.graph.arenas import Layout
from penstock.graph.records import Records
from penstock.graph.tasks import Call, Slot, Task, batch_of
from penstock.runtime.arena import Arenas
from penstock.runtime.kv_file import KvFile
from penstock.runtime.movers import DiskLoad, DiskReader, poison
from penstock.spec.parts import GRANULE_ROWS
from penstock.spec.places import is_disk
from penstock.spec.plan import Plan

_RECALLED_AT_ONCE = 64  # records: 0.5 MB of OPT-6.7B in int4


class Moves:
    """Does the calls that move bytes and compute nothing. Its arguments are those of `Binding`."""

    def __init__(
        self, plan: Plan, arenas: Arenas, reader: DiskReader | None, poisoned: bool, kv_file: KvFile | None
    ) -> None:
        self._plan, self._arenas, self._reader, self.poisoned = plan, arenas, reader, poisoned
        self._kv_file = kv_file
        self.layout = Layout(plan)
        self._parts = plan.parts
        self._units_of: dict[str, list[tuple[int, int]]] = {}  # by part: (first granule, unit), ascending
        for u, unit in enumerate(plan.units):
            self._units_of.setdefault(unit.part, []).append((unit.lo, u))
        for units in self._units_of.values():
            units.sort()

    def start(self, task: Task) -> DiskLoad | None:
        """Begins a load, which a disk does by itself. Returns None for any other task: `run` does it."""
        first = task.calls[0]
        if len(task.calls) != 1 or first.unit < 0:
            return None
        if isinstance(first.operands, ops.Pick):
            return self._begin_pick(first, first.operands)
        return self._begin_load(first, first.operands) if isinstance(first.operands, ops.Load) else None

    def unit_of(self, key: str, granule: int) -> int:
        """The plan's unit that has a granule of a part."""
        units = self._units_of[key]
        return units[bisect_right(units, granule, key=itemgetter(0)) - 1][1]

    def _load(self, call: Call, op: ops.Load) -> None:
        self._begin_load(call, op).wait()

    def _begin_load(self, call: Call, op: ops.Load) -> DiskLoad:
        target = op.target
        unit = self._plan.units[call.unit]
        if self.poisoned:
            poison(self._arenas.view(target))
        return self._disk.start(unit.part, op.lo, op.hi, self._arenas.address(target), unit.home)

    def _pick(self, call: Call, op: ops.Pick) -> None:
        if (load := self._begin_pick(call, op)) is not None:
            load.wait()

    def _begin_pick(self, call: Call, op: ops.Pick) -> DiskLoad | None:
        unit, address = self._plan.units[call.unit], self._arenas.address(op.target)
        if self.poisoned:
            poison(self._arenas.view(op.target))
        records = Records.of(self._parts[unit.part])
        return self._disk.pick(unit.part, records.places(op.runs, unit.lo, address))

    def _recall(self, call: Call, op: ops.Recall) -> None:
        unit = self._plan.units[call.unit]
        records = Records.of(self._parts[unit.part])
        pages = self._arenas.view(op.picked).reshape(-1, records.page_bytes)
        inside = pages[:, records.lo - records.first : records.hi - records.first]
        placed = inside.reshape(len(pages), -1, records.stride)  # [granules, neurons of one, bytes], no copy
        slots = self._arenas.view(op.slots).reshape(-1, records.stride)
        for numbers, into_slots in ((op.held, False), (op.kept, True)):
            pairs = np.frombuffer(numbers, np.uint32).astype(np.intp).reshape(-1, 2)
            # Each line below copies its records, and no plan counts this memory: so only a few records at once.
            for lo in range(0, len(pairs), _RECALLED_AT_ONCE):
                neurons, at = pairs[lo : lo + _RECALLED_AT_ONCE].T
                granules, rows = np.divmod(neurons, GRANULE_ROWS)
                if into_slots:
                    slots[at] = placed[granules - unit.lo, rows]
                else:
                    placed[granules - unit.lo, rows] = slots[at]

    def _copy(self, call: Call, op: ops.Copy) -> None:
        self._move(op.source, op.target)

    def _lift(self, call: Call, op: ops.Lift) -> None:
        self._move(op.source, op.target)

    def _move(self, source: Slot, target: Slot) -> None:
        if self.poisoned:
            poison(self._arenas.view(target))
        self._arenas.view(target)[...] = self._arenas.view(source)

    def _kv_load(self, call: Call, op: ops.KvLoad) -> None:
        layer, batch = op.layer, batch_of(call)
        reads: list[tuple[int, int, int]] = []
        for source, target in ((op.stored_keys, op.keys), (op.stored_values, op.values)):
            spans = self.layout.kv.spans(layer, batch, save=False)
            if self.poisoned:  # other pages may be another batch's
                shared = self.layout.kv.shares_pages(batch)
                for lo, hi in spans if shared else [(0, target.nbytes)]:
                    poison(self._arenas.view(target)[lo:hi])
            for lo, hi in spans:
                if is_disk(source.arena):
                    reads.append((source.lo + lo, self._arenas.address(target) + lo, hi - lo))
                else:
                    self._arenas.view(target)[lo:hi] = self._arenas.view(source)[lo:hi]
        if reads:
            self._kv.read(reads)

    def _kv_save(self, call: Call, op: ops.KvSave) -> None:
        layer, batch = op.layer, batch_of(call)
        writes: list[tuple[int, memoryview]] = []
        if op.fresh:
            for lo, to, nbytes in self.layout.kv.fresh_spans(layer, batch):
                for source, target in ((op.keys, op.stored_keys), (op.values, op.stored_values)):
                    pages = self._arenas.view(source)[lo : lo + nbytes]
                    self._arenas.view(target)[to : to + nbytes] = pages
            return
        for source, target in ((op.keys, op.stored_keys), (op.values, op.stored_values)):
            for lo, hi in self.layout.kv.spans(layer, batch, save=True):
                if is_disk(target.arena):
                    writes.append((target.lo + lo, self._arenas.view(source)[lo:hi].data))
                else:
                    self._arenas.view(target)[lo:hi] = self._arenas.view(source)[lo:hi]
        if writes:
            self._kv.write(writes)

    def _sync(self, call: Call, op: ops.Sync) -> None:
        """Nothing to do: a task that waits for this one has waited for all tasks before it."""

    @property
    def _kv(self) -> KvFile:
        assert self._kv_file is not None, "the plan keeps KV on a disk, but no file was given"
        return self._kv_file

    @property
    def _disk(self) -> DiskReader:
        assert self._reader is not None, "the plan streams, but no reader was given"
        return self._reader
