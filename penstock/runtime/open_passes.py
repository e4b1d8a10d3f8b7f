"""Runs open passes (`graph/open_passes`): one native program a pass, which asks routers and reads experts by itself."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock import _native
from penstock.errors import PenstockError
from penstock.graph import ops
from penstock.graph.cache import Caches
from penstock.graph.demand import Answer
from penstock.graph.lower import Lowering
from penstock.graph.open_passes import Action, Mark, OpenPass
from penstock.graph.repeats import KnownTask, Shape
from penstock.graph.tasks import Call, Pass, Slot, Task, batch_of
from penstock.graph.timeline import Span, span
from penstock.runtime import host
from penstock.runtime.arena import Arenas
from penstock.runtime.batch_tables import BatchTables
from penstock.runtime.bind import OnRoute
from penstock.runtime.bind_native import NativeBinding
from penstock.runtime.movers import DiskReader
from penstock.spec.places import CPU, HOST, Lane, lane_between
from penstock.spec.plan import Plan

_KEPT = 16  # so many programs are remembered
# Weights are read ahead into this share of the processor's last level of caches. They are still there when the next ops
# come. On a shared Zen 4 with 32 MB, 10 MB were read again at 160 to 180 GB/s (53 to 82 from RAM), 16 MB at 84 to 114,
# and 24 MB no faster than from RAM.
_KEPT_SHARE = 0.375


class _BoundPass(NamedTuple):
    """An open pass that was bound once. `first`: how many of its calls come before the program. These read rows of the
    embedding from a disk. `demands`: the requests for experts, by layer."""

    first: int
    program: _native.Program
    demands: dict[int, _native.Demand]
    tables: BatchTables


class OpenPassRunner:
    """Runs the open passes of one lowering. `caches`: the lowering's caches by layer, whose slots are in RAM."""

    def __init__(
        self, plan: Plan, binding: NativeBinding, reader: DiskReader, arenas: Arenas, caches: Caches
    ) -> None:  # fmt: skip
        self._plan, self._binding, self._reader, self._arenas, self._caches = plan, binding, reader, arenas, caches
        self._bound: dict[Shape, _BoundPass | None] = {}  # None: it has calls that no program has
        self.loaded_bytes = 0  # by the latest pass

    def can(self, open_pass: OpenPass) -> bool:
        """Whether the pass can be run here: all its calls are native, and nobody wants to hear of each as it ends."""
        binding = self._binding
        if binding.hears or not self._reader.reads_directly:
            return False
        if open_pass.shape not in self._bound:
            while len(self._bound) >= _KEPT:
                del self._bound[next(iter(self._bound))]
            self._bound[open_pass.shape] = self._bind(open_pass)
        return self._bound[open_pass.shape] is not None

    def run(self, open_pass: OpenPass, p: Pass, given: Answer | None, heard: Sequence[OnRoute]) -> None:
        """Runs a pass for which `can` is true. `given`: gives answers in place of the routers'. `heard`: each is told
        all answers when the pass has ended. Raises StorageFailed and DamagedModel."""
        bound = self._bound[open_pass.shape]
        assert bound is not None
        batch = p.batches[0]
        asking = [mark for mark in open_pass.marks if mark.action is not Action.COMPUTE]
        for mark in asking if given is not None else ():
            self._give(bound.demands[mark.layer], mark, given(mark.call._replace(batch=batch)))  # type: ignore[misc]
        for call in open_pass.calls[: bound.first]:
            self._binding.call(call._replace(batch=batch))
        self._binding.move(bound.tables, batch)
        try:
            bound.program.run()
        except _native.LoadFailed as failed:
            raise self._error(*failed.args) from None
        self.loaded_bytes = sum(demand.loaded_bytes for demand in bound.demands.values())
        for mark in asking if heard else ():
            demand = bound.demands[mark.layer]
            rows = demand.said if mark.action is Action.ASK else demand.guessed
            for each in heard:
                each(mark.call._replace(batch=batch), rows)

    def spans(self, open_pass: OpenPass, p: Pass, origin_s: float) -> list[Span]:
        """The spans of the latest run, in seconds after `origin_s` of time.perf_counter."""
        bound = self._bound[open_pass.shape]
        assert bound is not None
        batches, units = {p.batches[0].id: p.batches[0]}, self._plan.units
        edges = [bound.first, *(mark.at for mark in open_pass.marks), len(open_pass.calls)]
        timed: list[tuple[float, float, Task]] = []
        for (lo, hi), (start_s, end_s) in zip(pairwise(edges), bound.program.spans, strict=True):
            if lo < hi:
                calls = open_pass.calls[lo:hi]
                known = KnownTask(self._plan, self._binding.layout, _task(CPU, *calls))
                moved, nbytes, flops = known.moved(batches)
                timed.append((start_s, end_s, known.task._replace(calls=moved, bytes=nbytes, flops=flops)))
        for mark in open_pass.marks:
            if mark.action is not Action.COMPUTE:
                continue
            op, demand = mark.call.operands, bound.demands[mark.layer]
            assert isinstance(op, ops.Experts)
            for start_s, end_s, experts in demand.computed:
                nbytes, flops = (of * experts // len(op.weights) for of in (mark.call.bytes, mark.call.flops))
                timed.append((start_s, end_s, _task(CPU, mark.call._replace(bytes=nbytes, flops=flops))))
            part = self._plan.parts[f"{mark.layer}.experts"]
            for start_s, end_s, expert in demand.loaded:
                lo, nbytes = expert * part.expert_granules, part.least_bytes
                load = ops.Load(Slot(f"{HOST}.cache", 0, nbytes), lo, lo + part.expert_granules, ())
                u = self._binding.unit_of(part.key, lo)
                lane = lane_between(units[u].home, HOST)
                timed.append((start_s, end_s, _task(lane, Call(load, u, None, part.kinds(), nbytes, 0))))
        timed.sort(key=lambda each: each[:2])
        return [
            span(task._replace(id=i), units, start_s - origin_s, end_s - origin_s)
            for i, (start_s, end_s, task) in enumerate(timed)
        ]

    def _give(self, demand: _native.Demand, mark: Mark, rows: Sequence[Sequence[int]]) -> None:
        if mark.action is Action.ASK:
            demand.give(rows)
        else:
            demand.give_guess(rows)

    def _error(
        self, layer: int, expert: int, error: int, good_bytes: int, damaged: int | None
    ) -> PenstockError:  # fmt: skip
        """The error of a load that failed, as `DiskLoad.wait` raises it."""
        part = self._plan.parts[f"{layer}.experts"]
        lo = expert * part.expert_granules
        place = self._reader.place(part.key, lo, lo + part.expert_granules)
        if damaged is not None:
            return place.damaged(_native.Damaged(damaged))
        if error:
            return place.failed(OSError(error, errno.errorcode.get(error, "")), good_bytes)
        return place.truncated(good_bytes)

    # -- binding ----------------------------------------------------------------------------------------------

    def _bind(self, open_pass: OpenPass) -> _BoundPass | None:
        binding, calls = self._binding, open_pass.calls
        first = next((i for i, call in enumerate(calls) if binding.is_native(call)), len(calls))
        if not all(binding.is_native(call) for call in calls[first:]) or any(m.at < first for m in open_pass.marks):
            return None
        batch = batch_of(calls[0])
        tables = binding.new_tables(batch)
        computing = [mark for mark in open_pass.marks if mark.action is Action.COMPUTE]
        ends = [*(mark.at for mark in computing[1:]), len(calls)]
        demands = {
            mark.layer: self._demand(mark.layer, mark.call, self._ahead(calls[mark.at : end]))
            for mark, end in zip(computing, ends, strict=True)
        }
        program, marks = binding.new_program(), list(open_pass.marks)
        for i, call in enumerate(calls[first:], first):
            while marks and marks[0].at == i:
                self._open(program, marks.pop(0), demands)
            binding.record(program, call, tables)
        assert not marks, f"{marks[0]} is of no call"
        return _BoundPass(first, program, demands, tables)

    def _open(self, program: _native.Program, mark: Mark, demands: dict[int, _native.Demand]) -> None:
        demand, op = demands[mark.layer], mark.call.operands
        if mark.action is Action.ASK:
            program.ask(demand)
        elif mark.action is Action.COMPUTE:
            program.compute_asked(demand)
        else:
            assert isinstance(op, ops.Route)
            program.guess(demand, self._arenas.address(op.routes), op.guesses)

    def _ahead(self, calls: Sequence[Call]) -> list[tuple[int, int]]:
        """Addresses and bytes of the weights that these calls read, as far as a cache of the processor keeps them."""
        left = int(_KEPT_SHARE * host.last_level_cache_bytes())
        kept = []
        for call in calls:
            weights = getattr(call.operands, "weights", None)
            if isinstance(weights, Slot) and left:
                nbytes = min(left, weights.nbytes)
                kept.append((self._arenas.address(weights), nbytes))
                left -= nbytes
        return kept

    def _demand(self, layer: int, call: Call, ahead: list[tuple[int, int]]) -> _native.Demand:
        """The native code's request for experts of a layer. `call`: computes some of them. `ahead`: (address, bytes) of
        weights that are read into the processor's caches while a load is waited for."""
        cache, layout, part = self._caches[layer, HOST], self._binding.layout, self._plan.parts[f"{layer}.experts"]
        assert isinstance(cache, _native.ExpertCache)
        program = self._binding.new_program()
        self._binding.record(program, call, None)
        slots = [self._arenas.address(layout.cache_slot(layer, HOST, i)) for i in range(cache.slots)]
        homes = []
        for lo in range(0, part.granules, part.expert_granules):
            home = self._plan.units[self._binding.unit_of(part.key, lo)].home
            homes.append(self._reader.home(part.key, lo, lo + part.expert_granules, home))
        return _native.Demand(layer, cache, program, slots, homes, self._reader.sums, ahead, self._binding.poisoned)


def open_lowering(
    plan: Plan, binding: NativeBinding, reader: DiskReader, arenas: Arenas
) -> tuple[Lowering, OpenPassRunner]:
    """A lowering whose caches are native, and what runs its open passes."""
    lowering = Lowering(plan, _native.ExpertCache)
    return lowering, OpenPassRunner(plan, binding, reader, arenas, lowering.caches)


def _task(lane: Lane, *calls: Call) -> Task:
    """A task that nothing comes after."""
    nbytes, flops = sum(call.bytes for call in calls), sum(call.flops for call in calls)
    return Task(-1, (lane,), calls, (), (), nbytes, flops, ())
