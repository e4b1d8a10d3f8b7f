"""Emits the FFNs of layers with experts: the router, and the experts that its answer asks for. A part of the lowering.

The router runs on the executor of its unit, which may be another one than that of the experts. Whoever else needs the
answer gets a copy.

Where experts are at home with their executor, or where a pass reads all of them, one call computes all experts of a
unit. The router's call writes which rows go to which expert into the slot `routes`, and the kernels read it there. So
the lowering does not wait for the router.

With a cache (`Plan.caches`) a decode pass asks for the router's answer, loads the experts that are missing, and
meanwhile computes those that are in the cache. Each expert's output is kept apart, and one call adds the outputs up in
the order of the experts' numbers. So no bit depends on what the cache held, or on which load ended first.

A layer with guesses (`Cache.guesses`) is guessed at while the layer before is computed: its router is asked about that
layer's input of the FFN, which is much like its own. What is missing of the likeliest experts is loaded behind that
layer's own loads, so that the disk works on while attention is computed. A wrong guess costs its read, and the slot of
another expert.

A cache in a device's memory holds experts that are at home in RAM. Those that are missing are lifted where enough rows
want them. The others are computed by the CPU meanwhile, and their outputs cross the link. They are lifted after that,
so that later passes find them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from penstock.graph import ops
from penstock.graph.batch import Batch
from penstock.graph.cache import ExpertCache
from penstock.graph.calls import Calls
from penstock.graph.streams import Streams
from penstock.graph.tasks import Call, Pass, Slot, Stream, Task
from penstock.spec.model import Routed
from penstock.spec.places import HOST, Executor, is_device, kernels_of, lane_between

# Gives the experts that a router's call chose for each row, in rising order; of a guess, the likeliest first. It may be
# called once the task with that call was handed out.
Answer = Callable[[Call], Sequence[Sequence[int]]]


class ExpertCalls:
    """The calls of layers whose FFN is routed. The lowering says which unit, layer and executor come next."""

    def __init__(self, calls: Calls, streams: Streams, caches: Mapping[int, ExpertCache]) -> None:
        self._calls, self._plan, self._layout = calls, calls.plan, calls.layout
        self._streams, self.caches = streams, caches
        self._cache_of = {cache.layer: cache for cache in calls.plan.caches}
        self._asked: dict[int, Call] = {}  # batch → the router's call of the layer at hand
        self._copied: set[tuple[Executor, int]] = set()  # (executor, batch) that has a copy of that router's answer
        self._wanted: dict[int, Sequence[Sequence[int]]] = {}  # batch → the answer of the layer at hand
        self._waiting: list[int] = []  # missing experts of that layer that have no slot yet
        self._loaded: list[int] = []  # missing experts of that layer whose load was emitted
        self._ahead: list[int] = []  # experts of the layer at hand that are wanted and that a guess has loaded
        self._by_cpu: list[int] = []  # missing experts of a device's cache that the CPU computes
        self._guessed: dict[int, list[int]] = {}  # layer → experts that were loaded for this pass by a guess

    def asks(self, layer: int, stream: Stream) -> Executor | None:
        """The executor of the layer's cache, where a pass reads of this layer only the experts that the router asks
        for."""
        return self._cache_of[layer].executor if stream.asks and layer in self.caches else None

    # -- all experts of a unit --------------------------------------------------------------------------

    def route(self, layer: int, batch: Batch, executors: list[Executor]) -> None:
        """Runs the router. A device's answer is copied to the other executors at once. A router of the host answers
        while devices go on: they get its answer with the first call that needs it (`_routes`)."""
        router = self._router(layer)
        if router not in (self._plan.main, *executors):
            h = self._calls.rows(router, batch, "h")
            self._calls.copy(batch, "h", h.nbytes, self._plan.main, router)
        self._copied = {(at, number) for at, number in self._copied if number != batch.id}
        self._asked[batch.id] = self._route(layer, batch)
        for executor in executors if router != HOST else ():
            self._routes(layer, executor, batch)

    def unit(self, p: Pass, layer: int, u: int, executor: Executor, started: set[int]) -> Iterator[Task]:
        """Computes a unit's experts in rising order. Experts in the layer's cache are read there, the others in the
        ring or at home. `started`: ids of batches whose sum has an addend already."""
        part = self._layout.parts[self._plan.units[u].part]
        ready: dict[int, Slot] = {}  # first expert of a slot → the slot, not computed yet
        granules = 0
        for lo, hi, slot in self._streams.cut(u, p.stream):
            granules += hi - lo
            ready[lo // part.expert_granules] = slot or self._streams.take(u, p.stream, (lo, hi))
            if slot is None:
                self._compute_ready(p, layer, u, executor, ready, granules, started)
                self._streams.release(u, p.stream, (lo, hi))
                yield from self._calls.emit.closed()
                ready, granules = {}, 0
        if ready:
            self._compute_ready(p, layer, u, executor, ready, granules, started)

    def _compute_ready(
        self, p: Pass, layer: int, u: int, executor: Executor, weights: dict[int, Slot], granules: int,
        started: set[int],
    ) -> None:  # fmt: skip
        """Emits a call per batch for experts of a unit whose weights are at hand, `granules` granules in all.
        `weights`: first expert of a slot → the slot."""
        part, routed = self._layout.parts[f"{layer}.experts"], self._routed(layer)
        for batch in p.batches:
            *cost, rows = ops.experts_cost(part, routed, 0, granules, ops.FFN_BLOCKS, batch.total_rows)
            first = batch.id not in started
            started.add(batch.id)
            self._experts(layer, u, executor, weights, batch, (cost[0], cost[1]), rows, first, ())

    def shared_done(self, layer: int, executor: Executor, batch: Batch) -> None:
        """Called when the shared expert's units on this executor are computed. Its gate, if any, multiplies their
        sum."""
        calls, routed = self._calls, self._routed(layer)
        if not routed.shared_gate:
            return
        gate = ops.Gate(self._routes(layer, executor, batch), calls.rows(executor, batch, "partial"), layer=layer)
        cost = ops.rows_cost(self._plan.target.spec, batch.total_rows, 2)
        calls.add(executor, gate, -1, batch, "*", cost)

    # -- the experts that a router asks for ---------------------------------------------------------------

    def ask(self, p: Pass, layer: int, answer: Answer) -> Iterator[Task]:
        """Asks the router, whose calls are emitted already. Emits loads of missing experts: as many as the cache has
        slots whose experts are not wanted by this pass. On a device these are lifts of the experts of enough rows."""
        self._calls.emit.close(kernels_of(self._router(layer)))
        yield from self._calls.emit.closed()
        self._wanted = {batch.id: answer(self._asked[batch.id]) for batch in p.batches}
        wanted = self._all_wanted()
        cache = self.caches[layer]
        cache.ask(wanted)
        self._ahead = [expert for expert in self._guessed.pop(layer, ()) if expert in wanted]
        missing = [expert for expert in wanted if cache.slot(expert) is None]
        lifted_rows = self._lifted_rows(layer)
        self._by_cpu = [expert for expert in missing if self._rows_of(expert) < lifted_rows] if lifted_rows else []
        self._waiting, self._loaded = [expert for expert in missing if expert not in self._by_cpu], []
        yield from self._load(layer, p.batches, wanted)
        if not self._waiting and layer + 1 in self.caches and self._cache_of[layer + 1].guesses:
            yield from self._guess(p, layer + 1, answer)

    def _guess(self, p: Pass, layer: int, answer: Answer) -> Iterator[Task]:
        """Asks a layer's router about the input of the layer before. Emits loads of experts that it names and that are
        missing."""
        calls, cache = self._calls, self.caches[layer]
        asked = [self._route_ahead(layer, batch) for batch in p.batches]
        calls.emit.close(kernels_of(self._router(layer)))
        yield from calls.emit.closed()
        likely = {expert: None for call in asked for row in answer(call) for expert in row}
        said = tuple(call.operands.routes for call in asked if isinstance(call.operands, ops.Route))
        self._guessed[layer] = []
        for expert in likely:
            if cache.slot(expert) is None and (slot := cache.guess(expert, likely)) is not None:
                self._guessed[layer].append(expert)
                yield from self._load_one(layer, expert, slot, said)

    def demanded(self, p: Pass, layer: int, started: set[int]) -> Iterator[Task]:
        """Computes the experts that were asked for: first those in the cache, then those that a guess has loaded, then
        each of the others after its load. `started`: ids of batches whose sum has an addend already."""
        executor, cache = self._cache_of[layer].executor, self.caches[layer]
        coming = {*self._loaded, *self._waiting, *self._by_cpu, *self._ahead}
        present = [expert for expert in self._all_wanted() if expert not in coming]
        self._compute(p, layer, present)
        self._calls.emit.close(kernels_of(executor))  # so that they begin now, before what follows is lowered
        yield from self._calls.emit.closed()
        if self._by_cpu:
            self._compute_by_cpu(p, layer)
        if self._ahead:
            self._compute(p, layer, sorted(self._ahead))
            yield from self._calls.emit.closed()
        while self._loaded or self._waiting:
            yield from self._load(layer, p.batches, self._loaded)  # experts that were computed may leave the cache
            loaded, self._loaded = self._loaded, []
            assert loaded, f"layer {layer}: {cache.slots} slots hold nothing"
            for expert in loaded:
                self._compute(p, layer, [expert])
                yield from self._calls.emit.closed()
        # What follows is the same in every pass, so as a task of its own it can be like an earlier one.
        self._calls.emit.close(kernels_of(executor))
        for batch in p.batches:
            calls, routed = self._calls, self._routed(layer)
            combine = ops.Combine(
                self._routes(layer, executor, batch), self._outputs(layer, executor, batch),
                calls.rows(executor, batch, "partial"), layer=layer, starts_sum=batch.id not in started,
            )  # fmt: skip
            cost = ops.rows_cost(self._plan.target.spec, batch.total_rows, routed.active + 1)
            calls.add(executor, combine, -1, batch, "*", cost)
        if self._by_cpu:
            self._waiting, self._loaded = self._by_cpu, []
            yield from self._load(layer, p.batches, self._all_wanted())
            self._waiting = []  # those for which no slot is left

    def warm(self, layer: int, experts: Sequence[int]) -> None:
        """Puts experts into the layer's cache as if a pass had asked for them."""
        cache = self.caches[layer]
        wanted = sorted(set(experts))
        cache.ask(wanted)
        for expert in wanted:
            if cache.slot(expert) is None:
                cache.admit(expert, ())

    def _all_wanted(self) -> list[int]:
        return sorted({expert for rows in self._wanted.values() for row in rows for expert in row})

    def _rows_of(self, expert: int) -> int:
        """Rows of the pass at hand that want an expert."""
        return sum(list(row).count(expert) for rows in self._wanted.values() for row in rows)

    def _lifted_rows(self, layer: int) -> int:
        """A missing expert of a device's cache that fewer rows want is computed by the CPU. 0 for a cache in RAM."""
        cache = self._cache_of[layer]
        return cache.lifted_rows if is_device(cache.executor) else 0

    def _load(self, layer: int, batches: Sequence[Batch], keep: Sequence[int]) -> Iterator[Task]:
        """Emits loads (or lifts) of the waiting experts, while there are slots whose experts need not be kept. Each is
        handed out at once, so that the disk begins with the first while the next is lowered. `keep`: experts that may
        not leave the cache."""
        cache, kept = self.caches[layer], {*keep, *self._loaded}
        asked = tuple(self._routes(layer, self._router(layer), batch) for batch in batches)
        while self._waiting:
            slot = cache.admit(self._waiting[0], kept)
            if slot is None:
                return
            expert = self._waiting.pop(0)
            self._loaded.append(expert)
            kept.add(expert)
            yield from self._load_one(layer, expert, slot, asked)

    def _load_one(self, layer: int, expert: int, slot: int, asked: tuple[Slot, ...]) -> Iterator[Task]:
        """Emits the load (or the lift) of an expert into a slot of its layer's cache. `asked`: the answers that it
        comes after."""
        part, executor = self._layout.parts[f"{layer}.experts"], self._cache_of[layer].executor
        u, lo = self._unit_of(layer, expert), expert * part.expert_granules
        target = self._layout.cache_slot(layer, slot)
        load: ops.Operands = ops.Load(target, lo, lo + part.expert_granules, asked)
        if is_device(executor):
            load = ops.Lift(self._at_home(layer, expert), target, expert, asked)
        lane = lane_between(self._plan.units[u].home, executor)
        self._calls.emit.alone((lane,), Call(load, u, None, part.format.kind, target.nbytes, 0))
        yield from self._calls.emit.closed()

    def _unit_of(self, layer: int, expert: int) -> int:
        """The unit that has an expert."""
        units, part = self._calls.units[f"{layer}.experts"], self._layout.parts[f"{layer}.experts"]
        return units[bisect_right(units, expert * part.expert_granules, key=lambda u: self._plan.units[u].lo) - 1]

    def _at_home(self, layer: int, expert: int) -> Slot:
        """An expert in RAM, where it is at home."""
        u, part = self._unit_of(layer, expert), self._layout.parts[f"{layer}.experts"]
        whole = self._layout.weights[u]
        lo = whole.lo + (expert * part.expert_granules - self._plan.units[u].lo) * part.granule_bytes
        return Slot(whole.arena, lo, lo + part.least_bytes)

    def _compute(self, p: Pass, layer: int, experts: Sequence[int]) -> None:
        """Emits a call per batch for experts in the layer's cache."""
        numbers = {expert: self.caches[layer].slot(expert) for expert in experts}
        slots = {e: self._layout.cache_slot(layer, slot) for e, slot in numbers.items() if slot is not None}
        assert len(slots) == len(experts), f"layer {layer}: {experts} are wanted, {slots} are there"
        self._compute_in(p, layer, self._cache_of[layer].executor, slots)

    def _compute_by_cpu(self, p: Pass, layer: int) -> None:
        """Computes experts that a device's cache misses at home in RAM, and copies their outputs to the device."""
        cpu, executor = set(self._by_cpu), self._cache_of[layer].executor
        self._compute_in(p, layer, HOST, {expert: self._at_home(layer, expert) for expert in self._by_cpu})
        row_bytes = 4 * self._plan.target.spec.d_model
        for batch in p.batches:
            source, target = self._outputs(layer, HOST, batch), self._outputs(layer, executor, batch)
            experts = [expert for row in self._wanted[batch.id] for expert in row]
            runs = groupby(range(len(experts)), key=lambda i: experts[i] in cpu)
            for numbers in [list(run) for by_cpu, run in runs if by_cpu]:
                lo, hi = row_bytes * numbers[0], row_bytes * (numbers[-1] + 1)
                cut = [Slot(slot.arena, slot.lo + lo, slot.lo + hi) for slot in (source, target)]
                self._calls.add(executor, ops.Copy(cut[0], cut[1], "outputs"), -1, batch, "*", (hi - lo, 0))

    def _compute_in(self, p: Pass, layer: int, executor: Executor, slots: Mapping[int, Slot]) -> None:
        """Emits a call per batch for experts in these slots. Their outputs are kept for `Combine`."""
        part, experts = self._layout.parts[f"{layer}.experts"], list(slots)
        u = self._calls.units[f"{layer}.experts"][0]
        nbytes, flops = ops.matrix_cost(part, 0, part.expert_granules, ops.FFN_BLOCKS, 1)
        for batch in p.batches if experts else ():
            rows = [expert for row in self._wanted[batch.id] for expert in row]
            counts = {expert: count for expert in experts if (count := rows.count(expert))}
            if not counts:
                continue
            weights = {expert: slots[expert] for expert in counts}
            cost = (len(counts) * nbytes, sum(counts.values()) * flops)
            expert_rows = max(1, round(sum(counts.values()) / len(counts)))
            outputs = (self._outputs(layer, executor, batch),)
            self._experts(layer, u, executor, weights, batch, cost, expert_rows, False, outputs)

    # -- calls and slots ----------------------------------------------------------------------------------

    def _route(self, layer: int, batch: Batch) -> Call:
        router = self._router(layer)
        h, routes = self._calls.rows(router, batch, "h"), self._routes(layer, router, batch)
        return self._add_route(layer, batch, router, h, routes)

    def _route_ahead(self, layer: int, batch: Batch) -> Call:
        """Runs a layer's router on what is the input of the FFN before, normed as this layer's would be."""
        calls, t = self._calls, batch.total_rows
        h = self._calls.rows(HOST, batch, "guessed_h")
        routes = self._layout.act(HOST, batch.id, "guessed_routes", self._routed(layer).routes_bytes(t))
        norm = ops.Norm(
            calls.whole(f"{layer}.norms"), calls.rows(HOST, batch, "x"), h, calls.scratch(HOST), which="ffn_in",
            layer=layer,
        )  # fmt: skip
        calls.add(HOST, norm, -1, batch, "*", ops.rows_cost(self._plan.target.spec, t, 2))
        return self._add_route(layer, batch, HOST, h, routes, self._cache_of[layer].guesses)

    def _add_route(
        self, layer: int, batch: Batch, router: Executor, h: Slot, routes: Slot, guesses: int = 0
    ) -> Call:  # fmt: skip
        calls, part = self._calls, self._layout.parts[f"{layer}.router"]
        route = ops.Route(
            calls.whole(part.key), h, routes, calls.scratch(router), layer=layer, guesses=guesses
        )  # fmt: skip
        cost = ops.matrix_cost(part, 0, 1, ops.ROUTER_BLOCKS, batch.total_rows)
        return calls.add(router, route, -1, batch, part.format.kind, cost)

    def _experts(
        self, layer: int, u: int, executor: Executor, weights: dict[int, Slot], batch: Batch, cost: tuple[int, int],
        rows: int, first: bool, outputs: tuple[Slot, ...],
    ) -> None:  # fmt: skip
        calls = self._calls
        experts = ops.Experts(
            tuple(weights.values()), calls.rows(executor, batch, "h"), self._routes(layer, executor, batch),
            calls.rows(executor, batch, "partial"), outputs, calls.scratch(executor), layer=layer,
            first_experts=tuple(weights), starts_sum=first, expert_rows=rows,
        )  # fmt: skip
        calls.add(executor, experts, u, batch, self._layout.parts[f"{layer}.experts"].format.kind, cost)

    def _routed(self, layer: int) -> Routed:
        routed = self._plan.target.spec.layers[layer].routed
        assert routed is not None, f"layer {layer} is dense"
        return routed

    def _router(self, layer: int) -> Executor:
        """The executor of a layer's router."""
        return self._plan.units[self._calls.units[f"{layer}.router"][0]].decode

    def _routes(self, layer: int, executor: Executor, batch: Batch) -> Slot:
        """The router's answer for a batch, where an executor reads it. The first time it is copied there."""
        router, nbytes = self._router(layer), self._routed(layer).routes_bytes(batch.total_rows)
        if executor != router and (executor, batch.id) not in self._copied:
            self._copied.add((executor, batch.id))
            self._calls.copy(batch, "routes", nbytes, router, executor)
        return self._layout.act(executor, batch.id, "routes", nbytes)

    def _outputs(self, layer: int, executor: Executor, batch: Batch) -> Slot:
        """float32 [T, A, D]."""
        nbytes = 4 * batch.total_rows * self._routed(layer).active * self._plan.target.spec.d_model
        return self._layout.act(executor, batch.id, "outputs", nbytes)
