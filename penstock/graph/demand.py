"""Emits the experts that routers ask for, in layers with caches (`Plan.caches`). A part of the lowering.

A decode pass asks for the router's answer. It loads the experts that are missing, and meanwhile computes the experts in
the cache. Each expert's output is kept apart, and one call adds the outputs up in the order of the experts' numbers. So
no bit depends on what a cache held, or on which load ended first.

The experts of a layer may be guessed (`Cache.guesses`) while the layer before is computed. The router of the guessed
layer is asked about the FFN's input one layer before, which is much like its own input. The likeliest missing experts
are loaded behind the loads of the layer before. So the disk works on while attention is computed. A wrong guess costs
a read, and the slot of another expert.

A cache in RAM is filled from a disk. A cache in a device's memory is filled from RAM: from where the experts are at
home, or from a cache there. An expert that the device's cache misses is lifted if enough rows want it. The CPU computes
the other missing experts meanwhile, and their outputs cross the link. After that these experts are lifted too, for
later passes.

If a layer has both caches, the cache in RAM is asked for the experts that the device's cache misses. Experts that the
cache in RAM misses too are loaded from the disk first. If it has few slots, they are loaded in waves: an expert may
leave RAM once the CPU has computed it, or once its lift was emitted. Experts that are on the device too leave RAM
before others, so that the two caches hold different experts. This is not done if the device has few slots, since its
experts are soon asked for in RAM again (_FEW_SLOTS).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from penstock.graph import ops
from penstock.graph.batch import Batch
from penstock.graph.cache import Caches, ExpertCache
from penstock.graph.calls import Calls
from penstock.graph.experts import ExpertCalls
from penstock.graph.tasks import Call, Pass, Slot, Stream, Task
from penstock.spec.format import Kinds
from penstock.spec.places import HOST, Executor, is_device, kernels_of, lane_between

# Gives the experts that a router's call chose for each row, in rising order. For a guess the likeliest come first. It
# may be called once the task with that call was handed out.
Answer = Callable[[Call], Sequence[Sequence[int]]]


# A device's cache has few slots if it has less than this share of the slots in RAM. With 128 experts, the r-th drawn
# with a weight of r^-0.5, and 40 slots in each cache, 33 % of what is asked for is in neither cache if experts on the
# device leave RAM first, else 37 %. With 12 slots on the device and 100 in RAM, it is 18 % and 15 % (docs/LOG.md).
_FEW_SLOTS = 0.25


class _Sizes(NamedTuple):
    """The size of an expert of a layer. `bytes`, `flops`: of one row."""

    granules: int
    format: Kinds
    bytes: int
    flops: int


class Demand:
    """Emits the calls for experts that a layer's router has asked for. The lowering says which layer comes next. If a
    layer has a cache on the device, that is its own cache, and the device adds the outputs up. Else its own cache is
    the one in RAM, and the CPU adds them up."""

    def __init__(self, experts: ExpertCalls, calls: Calls, caches: Caches) -> None:
        self._experts, self._calls, self._caches = experts, calls, caches
        self._plan, self._layout = calls.plan, calls.layout
        by_home = sorted(calls.plan.caches, key=lambda cache: is_device(cache.executor))
        self._cache_of = {cache.layer: cache for cache in by_home}  # of a layer with two, the device's
        self._sizes: dict[int, _Sizes] = {}  # by layer
        self._wanted: dict[int, Sequence[Sequence[int]]] = {}  # batch → the answer of the layer at hand
        # Missing experts of that layer:
        self._absent: list[int] = []  # to be loaded into the cache in RAM beneath the device's
        self._read: set[int] = set()  # loaded there by this pass
        self._waiting: list[int] = []  # to be brought into the layer's own cache
        self._brought: list[int] = []  # on their way there: the load or lift was emitted
        self._by_cpu: list[int] = []  # of a device's cache: to be computed by the CPU
        self._ahead: list[int] = []  # experts of that layer that are wanted and that a guess has loaded
        # A layer whose outputs are left to be added up, and the batches whose sum has an addend already.
        self._to_combine: tuple[int, frozenset[int]] | None = None
        self._guessed: dict[int, list[int]] = {}  # layer → experts that were loaded for this pass by a guess

    def asks(self, layer: int, stream: Stream) -> Executor | None:
        """The executor of the layer's own cache. None if the layer has no cache, or if such a pass reads all experts
        and not only those that the router asks for."""
        return self._cache_of[layer].executor if stream.asks and layer in self._cache_of else None

    def ask(self, p: Pass, layer: int, answer: Answer) -> Iterator[Task]:
        """Asks the router, whose calls are emitted already. Emits loads and lifts of missing experts, as long as there
        are slots whose experts this pass does not want."""
        emit, router = self._calls.emit, self._experts.router(layer)
        emit.close(kernels_of(router))
        yield from emit.closed()
        self._wanted = {batch.id: answer(self._experts.asked[batch.id]) for batch in p.batches}
        wanted, own, beneath = self._all_wanted(), self._own(layer), self._beneath(layer)
        own.ask(wanted)
        self._ahead = [expert for expert in self._guessed.pop(layer, ()) if expert in wanted]
        missing = own.missing(wanted)
        lifted_rows = self._lifted_rows(layer)
        self._by_cpu = [expert for expert in missing if self._rows_of(expert) < lifted_rows] if lifted_rows else []
        self._waiting, self._brought = [expert for expert in missing if expert not in self._by_cpu], []
        self._absent, self._read = [], set()
        if beneath is not None:
            beneath.ask(missing)
            absent = beneath.missing(missing)
            # Experts in RAM can be lifted at once. Of the experts that are not in RAM, those that will be lifted are
            # loaded first, since they have the longer way.
            self._absent = sorted(absent, key=lambda expert: expert in self._by_cpu)
            self._waiting.sort(key=lambda expert: expert in absent)
        if missing:
            yield from self._bring(layer, p.batches, wanted)
        if not self._waiting and layer + 1 in self._cache_of and self._cache_of[layer + 1].guesses:
            yield from self._guess(p, layer + 1, answer)

    def demanded(self, p: Pass, layer: int, started: set[int], combines: bool) -> Iterator[Task]:
        """Emits the computation of the experts that were asked for: first of experts in the cache, then of experts that
        a guess has loaded, then of each other expert when its load ends. `started`: ids of batches whose sum has an
        addend already. `combines`: the outputs are added up too, else `combine` is to be called for that."""
        executor, emit = self._cache_of[layer].executor, self._calls.emit
        coming = {*self._brought, *self._waiting, *self._by_cpu, *self._ahead}
        present = self._all_wanted()
        self._compute(p, layer, [expert for expert in present if expert not in coming] if coming else present)
        emit.close(kernels_of(executor))  # so that they begin now, before what follows is lowered
        yield from emit.closed()
        if self._ahead:
            self._compute(p, layer, sorted(self._ahead))
            yield from emit.closed()
        by_cpu = tuple(self._by_cpu)
        while self._brought or self._waiting or self._by_cpu:
            yield from self._bring(layer, p.batches, self._brought)  # experts that were computed may leave the cache
            computed = self._compute_by_cpu(p, layer)
            brought, self._brought = self._brought, []
            assert brought or computed, f"layer {layer}: {self._cache_of[layer].slots} slots hold nothing"
            for expert in brought:
                self._compute(p, layer, [expert])
                yield from emit.closed()
            self._copy_outputs(p, layer, computed)
        self._to_combine = (layer, frozenset(started))
        if combines:
            self.combine(p)
        if by_cpu:
            beneath = self._beneath(layer)
            self._waiting = [expert for expert in by_cpu if beneath is None or beneath.slot(expert) is not None]
            yield from self._bring(layer, p.batches, self._all_wanted())
            self._waiting, self._brought = [], []  # for some there may be no slot

    def warm(self, layer: int, experts: Sequence[int]) -> None:
        """Puts experts into the layer's caches as if a pass had asked for them."""
        wanted, own, beneath = sorted(set(experts)), self._own(layer), self._beneath(layer)
        own.ask(wanted)
        missing = [expert for expert in wanted if own.slot(expert) is None]
        if beneath is not None:
            beneath.ask(missing)
            for expert in missing:
                if beneath.slot(expert) is None:
                    beneath.admit(expert, (), self._leaves_ram(layer))
        for expert in missing:
            own.admit(expert, ())

    # -- the wanted experts, and where they are -----------------------------------------------------------

    def _own(self, layer: int) -> ExpertCache:
        return self._caches[layer, self._cache_of[layer].executor]

    def _beneath(self, layer: int) -> ExpertCache | None:
        """The cache in RAM beneath a device's; None for a layer with one cache."""
        return self._caches.get((layer, HOST)) if is_device(self._cache_of[layer].executor) else None

    def _leaves_ram(self, layer: int) -> set[int | None]:
        """The experts that leave the cache in RAM before all others: those on the device."""
        own, beneath = self._own(layer), self._beneath(layer)
        return set(own.held) if beneath is not None and own.slots >= _FEW_SLOTS * beneath.slots else set()

    def _all_wanted(self) -> list[int]:
        """The experts that any row of the pass wants, in rising order."""
        rows = [row for rows in self._wanted.values() for row in rows]
        return list(rows[0]) if len(rows) == 1 else sorted({expert for row in rows for expert in row})

    def _rows_of(self, expert: int) -> int:
        """Rows of the pass at hand that want an expert."""
        return sum(list(row).count(expert) for rows in self._wanted.values() for row in rows)

    def _lifted_rows(self, layer: int) -> int:
        """So many rows must want an expert that the device's cache misses, or the CPU computes it. 0 for a cache in
        RAM."""
        cache = self._cache_of[layer]
        return cache.lifted_rows if is_device(cache.executor) else 0

    def _unit_of(self, layer: int, expert: int) -> int:
        """The unit that has an expert."""
        units = self._calls.units[f"{layer}.experts"]
        if len(units) == 1:
            return units[0]
        granules = self._sizes_of(layer).granules
        return units[bisect_right(units, expert * granules, key=lambda u: self._plan.units[u].lo) - 1]

    def _sizes_of(self, layer: int) -> _Sizes:
        sizes = self._sizes.get(layer)
        if sizes is None:
            part = self._layout.parts[f"{layer}.experts"]
            cost = ops.matrix_cost(part, 0, part.expert_granules, ops.FFN_BLOCKS, 1)
            sizes = self._sizes[layer] = _Sizes(part.expert_granules, part.kinds(ops.FFN_BLOCKS), *cost)
        return sizes

    def _in_ram(self, layer: int, expert: int) -> Slot:
        """The slot of an expert in RAM that a device's cache misses: in the cache beneath, or at home."""
        beneath = self._beneath(layer)
        if beneath is not None:
            return self._cached(layer, HOST, [expert])[expert]
        u, part = self._unit_of(layer, expert), self._layout.parts[f"{layer}.experts"]
        whole = self._layout.weights[u]
        lo = whole.lo + (expert * part.expert_granules - self._plan.units[u].lo) * part.granule_bytes
        return Slot(whole.arena, lo, lo + part.least_bytes)

    def _cached(self, layer: int, executor: Executor, experts: Iterable[int]) -> dict[int, Slot]:
        """The slots of experts that are in a cache of the layer."""
        slots, cache, slot = dict[int, Slot](), self._caches[layer, executor], self._layout.cache_slot
        for expert in experts:
            number = cache.slot(expert)
            assert number is not None, f"layer {layer}: {expert} is not among {cache.held} on {executor}"
            slots[expert] = slot(layer, executor, number)
        return slots

    # -- loads and lifts ------------------------------------------------------------------------------------

    def _bring(self, layer: int, batches: Sequence[Batch], keep: Sequence[int]) -> Iterator[Task]:
        """Emits loads and lifts of missing experts, while there are slots whose experts need not be kept. Each is
        handed out at once, so that the disk begins with the first while the next is lowered. `keep`: experts that may
        not leave the layer's own cache."""
        own, beneath, kept = self._own(layer), self._beneath(layer), {*keep, *self._brought}
        executor = self._cache_of[layer].executor
        asked = tuple(self._experts.routes(layer, self._experts.router(layer), batch) for batch in batches)
        while True:
            if beneath is not None:
                yield from self._read_beneath(layer, beneath, asked)
            if not self._waiting or (beneath is not None and beneath.slot(self._waiting[0]) is None):
                return  # that comes next, and is not in RAM
            slot = own.admit(self._waiting[0], kept)
            if slot is None:
                return
            expert = self._waiting.pop(0)
            self._brought.append(expert)
            kept.add(expert)
            yield from self._load_one(layer, executor, expert, slot, asked)

    def _read_beneath(self, layer: int, beneath: ExpertCache, asked: tuple[Slot, ...]) -> Iterator[Task]:
        """Emits loads from the disk into the cache beneath a device's, while there are slots for them."""
        keep, first = {*self._waiting, *self._by_cpu}, self._leaves_ram(layer) if self._absent else ()
        while self._absent:
            slot = beneath.admit(self._absent[0], keep, first)
            if slot is None:
                return
            expert = self._absent.pop(0)
            self._read.add(expert)
            yield from self._load_one(layer, HOST, expert, slot, asked)

    def _load_one(
        self, layer: int, executor: Executor, expert: int, slot: int, asked: tuple[Slot, ...]
    ) -> Iterator[Task]:
        """Emits the load (or the lift) of an expert into a slot of the layer's cache on this executor. `asked`: the
        answers that it comes after."""
        sizes, u = self._sizes_of(layer), self._unit_of(layer, expert)
        target = self._layout.cache_slot(layer, executor, slot)
        load: ops.Operands
        if is_device(executor):
            load = ops.Lift(self._in_ram(layer, expert), target, expert, asked)
            lane = lane_between(HOST, executor)
        else:
            lo = expert * sizes.granules
            load = ops.Load(target, lo, lo + sizes.granules, asked)
            lane = lane_between(self._plan.units[u].home, HOST)
        self._calls.emit.alone((lane,), Call(load, u, None, sizes.format, target.nbytes, 0))
        yield from self._calls.emit.closed()

    def _guess(self, p: Pass, layer: int, answer: Answer) -> Iterator[Task]:
        """Asks a layer's router about the input of the layer before. Emits loads of the likeliest experts of each row
        that are missing: at most as many as the cache has guesses."""
        calls, cache = self._calls, self._own(layer)
        asked = [self._route_ahead(layer, batch) for batch in p.batches]
        calls.emit.close(kernels_of(self._experts.router(layer)))
        yield from calls.emit.closed()
        rows = [row for call in asked for row in answer(call)]
        likely = {expert for row in rows for expert in row}
        said = tuple(call.operands.routes for call in asked if isinstance(call.operands, ops.Route))
        self._guessed[layer] = []
        for row in rows:
            missing = (expert for expert in row if cache.slot(expert) is None)
            for expert in islice(missing, self._cache_of[layer].guesses):
                if (slot := cache.guess(expert, likely)) is not None:
                    self._guessed[layer].append(expert)
                    yield from self._load_one(layer, self._cache_of[layer].executor, expert, slot, said)

    def _route_ahead(self, layer: int, batch: Batch) -> Call:
        """Runs a layer's router on the input of the FFN one layer before, normed as this layer's input would be."""
        calls, t = self._calls, batch.total_rows
        h = self._calls.rows(HOST, batch, "guessed_h")
        routes = self._layout.act(HOST, batch.id, "guessed_routes", self._experts.routed(layer).routes_bytes(t))
        norm = ops.Norm(
            calls.whole(f"{layer}.norms"), calls.rows(HOST, batch, "x"), h, calls.scratch(HOST), which="ffn_in",
            layer=layer,
        )  # fmt: skip
        calls.add(HOST, norm, -1, batch, "*", ops.rows_cost(self._plan.target.spec, t, 2))
        return self._experts.add_route(layer, batch, HOST, h, routes, self._cache_of[layer].guesses)

    # -- computing ------------------------------------------------------------------------------------------

    def _compute(self, p: Pass, layer: int, experts: Sequence[int]) -> None:
        """Emits a call per batch for experts in the layer's own cache."""
        executor = self._cache_of[layer].executor
        self._compute_in(p, layer, executor, self._cached(layer, executor, experts))

    def _compute_by_cpu(self, p: Pass, layer: int) -> list[int]:
        """Has the CPU compute those of its experts that are in RAM by now, and returns them. Each expert that this pass
        has loaded is a task of its own, which begins when the load ends."""
        beneath = self._beneath(layer)
        there = [e for e in self._by_cpu if beneath is None or beneath.slot(e) is not None]
        self._compute_in(p, layer, HOST, {e: self._in_ram(layer, e) for e in there if e not in self._read})
        for expert in (e for e in there if e in self._read):
            self._compute_in(p, layer, HOST, {expert: self._in_ram(layer, expert)})
        self._by_cpu = [expert for expert in self._by_cpu if expert not in there]
        return there

    def _copy_outputs(self, p: Pass, layer: int, experts: Sequence[int]) -> None:
        """Copies the outputs of experts that the CPU computes to the device. Outputs that lie side by side are one
        copy."""
        executor, row_bytes = self._cache_of[layer].executor, 4 * self._plan.target.spec.d_model
        for batch in p.batches if experts else ():
            source, target = (self._experts.outputs(layer, memory, batch) for memory in (HOST, executor))
            addends = [expert for row in self._wanted[batch.id] for expert in row]
            runs = groupby(range(len(addends)), key=lambda i: addends[i] in experts)
            for numbers in [list(run) for by_cpu, run in runs if by_cpu]:
                lo, hi = row_bytes * numbers[0], row_bytes * (numbers[-1] + 1)
                cut = [Slot(slot.arena, slot.lo + lo, slot.lo + hi) for slot in (source, target)]
                self._calls.add(executor, ops.Copy(cut[0], cut[1], "outputs"), -1, batch, "*", (hi - lo, 0))

    def _compute_in(self, p: Pass, layer: int, executor: Executor, slots: Mapping[int, Slot]) -> None:
        """Emits a call per batch for experts in these slots. Their outputs are kept for `Combine`."""
        if not slots:
            return
        sizes, u = self._sizes_of(layer), self._calls.units[f"{layer}.experts"][0]
        for batch in p.batches:
            wanted = self._wanted[batch.id]
            rows = wanted[0] if len(wanted) == 1 else [expert for row in wanted for expert in row]
            counts = [(expert, count) for expert in slots if (count := rows.count(expert))]
            if not counts:
                continue
            weights = slots if len(counts) == len(slots) else {expert: slots[expert] for expert, _ in counts}
            total = sum([count for _, count in counts])
            expert_rows = max(1, round(total / len(counts)))
            outputs = (self._experts.outputs(layer, executor, batch),)
            cost = (len(counts) * sizes.bytes, total * sizes.flops)
            self._experts.add(layer, u, executor, weights, batch, cost, expert_rows, False, outputs)

    def combined(self) -> None:
        """Notes that the outputs were added up, by calls that are known from another pass."""
        self._to_combine = None

    def combine(self, p: Pass) -> None:
        """Emits the calls that add up the outputs of the layer whose experts were computed last, if they are not added
        up yet."""
        if self._to_combine is None:
            return
        layer, started = self._to_combine
        self._to_combine = None
        executor, calls, experts = self._cache_of[layer].executor, self._calls, self._experts
        # What follows is the same in every pass, so as a task of its own it can be like an earlier one.
        calls.emit.close(kernels_of(executor))
        for batch in p.batches:
            combine = ops.Combine(
                experts.routes(layer, executor, batch), experts.outputs(layer, executor, batch),
                calls.rows(executor, batch, "partial"), layer=layer, starts_sum=batch.id not in started,
            )  # fmt: skip
            cost = ops.rows_cost(self._plan.target.spec, batch.total_rows, experts.routed(layer).active + 1)
            calls.add(executor, combine, -1, batch, "*", cost)
