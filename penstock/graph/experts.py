"""Emits the FFNs of layers with experts: the router, and the experts of whole units. A part of the lowering.

The router runs on the executor of its unit, which may be another one than that of the experts. Whoever else needs the
answer gets a copy.

Where experts are at home with their executor, or where a pass reads all of them, one call computes all experts of a
unit. The router's call writes which rows go to which expert into the slot `routes`, and the kernels read it there. So
the lowering does not wait for the router. Where a layer has caches, `demand` emits the experts of decode passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.graph import ops
from penstock.graph.batch import Batch
from penstock.graph.calls import Calls
from penstock.graph.streams import Streams
from penstock.graph.tasks import Call, Pass, Slot, Task
from penstock.spec.model import Routed
from penstock.spec.places import HOST, Executor


class ExpertCalls:
    """The calls of layers whose FFN is routed. The lowering says which unit, layer and executor come next. `asked`:
    batch → the call of the router of the layer at hand."""

    def __init__(self, calls: Calls, streams: Streams) -> None:
        self._calls, self._plan, self._layout = calls, calls.plan, calls.layout
        self._streams = streams
        self.asked: dict[int, Call] = {}
        self._copied: set[tuple[Executor, int]] = set()  # (executor, batch) that has a copy of that router's answer
        self._routers = {  # layer → the executor of its router
            part.layer: self._plan.units[calls.units[key][0]].decode
            for key, part in self._layout.parts.items()
            if part.kind == "router"
        }

    def route(self, layer: int, batch: Batch, executors: list[Executor]) -> None:
        """Runs the router. A device's answer is copied to the other executors at once. A router of the host answers
        while devices go on: they get its answer with the first call that needs it (`routes`)."""
        router = self.router(layer)
        if router not in (self._plan.main, *executors):
            h = self._calls.rows(router, batch, "h")
            self._calls.copy(batch, "h", h.nbytes, self._plan.main, router)
        if self._copied:
            self._copied = {(executor, number) for executor, number in self._copied if number != batch.id}
        self.asked[batch.id] = self._route(layer, batch)
        for executor in executors if router != HOST else ():
            self.routes(layer, executor, batch)

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
        part, routed = self._layout.parts[f"{layer}.experts"], self.routed(layer)
        for batch in p.batches:
            *cost, rows = ops.experts_cost(part, routed, 0, granules, ops.FFN_BLOCKS, batch.total_rows)
            first = batch.id not in started
            started.add(batch.id)
            self.add(layer, u, executor, weights, batch, (cost[0], cost[1]), rows, first, ())

    def shared_done(self, layer: int, executor: Executor, batch: Batch) -> None:
        """Called when the shared expert's units on this executor are computed. Its gate, if any, multiplies their
        sum."""
        calls, routed = self._calls, self.routed(layer)
        if not routed.shared_gate:
            return
        gate = ops.Gate(self.routes(layer, executor, batch), calls.rows(executor, batch, "partial"), layer=layer)
        cost = ops.rows_cost(self._plan.target.spec, batch.total_rows, 2)
        calls.add(executor, gate, -1, batch, "*", cost)

    def _route(self, layer: int, batch: Batch) -> Call:
        router = self.router(layer)
        h, routes = self._calls.rows(router, batch, "h"), self.routes(layer, router, batch)
        return self.add_route(layer, batch, router, h, routes)

    def add_route(
        self, layer: int, batch: Batch, router: Executor, h: Slot, routes: Slot, guesses: int = 0
    ) -> Call:  # fmt: skip
        """Hands out a call of the layer's router on rows `h`, and returns it. `guesses`: as in `ops.Route`."""
        calls, part = self._calls, self._layout.parts[f"{layer}.router"]
        route = ops.Route(
            calls.whole(part.key), h, routes, calls.scratch(router), layer=layer, guesses=guesses
        )  # fmt: skip
        cost = ops.matrix_cost(part, 0, 1, ops.ROUTER_BLOCKS, batch.total_rows)
        return calls.add(router, route, -1, batch, part.kinds(ops.ROUTER_BLOCKS), cost)

    def add(
        self, layer: int, u: int, executor: Executor, weights: Mapping[int, Slot], batch: Batch, cost: tuple[int, int],
        rows: int, first: bool, outputs: tuple[Slot, ...],
    ) -> None:  # fmt: skip
        """Hands out a call that computes experts. `weights`: first expert of a slot → the slot. `rows`: about so many
        go to an expert. `first`: the call is the first addend. `outputs`: as in `ops.Experts`."""
        calls = self._calls
        experts = ops.Experts(
            tuple(weights.values()), calls.rows(executor, batch, "h"), self.routes(layer, executor, batch),
            calls.rows(executor, batch, "partial"), outputs, calls.scratch(executor), layer=layer,
            first_experts=tuple(weights), starts_sum=first, expert_rows=rows,
        )  # fmt: skip
        calls.add(executor, experts, u, batch, self._layout.parts[f"{layer}.experts"].kinds(ops.FFN_BLOCKS), cost)

    def routed(self, layer: int) -> Routed:
        """The FFN of a layer with experts."""
        routed = self._plan.target.spec.layers[layer].routed
        assert routed is not None, f"layer {layer} is dense"
        return routed

    def router(self, layer: int) -> Executor:
        """The executor of a layer's router."""
        return self._routers[layer]

    def routes(self, layer: int, executor: Executor, batch: Batch) -> Slot:
        """The router's answer for a batch, where an executor reads it. The first time it is copied there."""
        router, nbytes = self.router(layer), self.routed(layer).routes_bytes(batch.total_rows)
        if executor != router and (executor, batch.id) not in self._copied:
            self._copied.add((executor, batch.id))
            self._calls.copy(batch, "routes", nbytes, router, executor)
        return self._layout.act(executor, batch.id, "routes", nbytes)

    def outputs(self, layer: int, executor: Executor, batch: Batch) -> Slot:
        """Where an executor keeps the outputs of a batch's experts: float32 [T, A, D]."""
        nbytes = 4 * batch.total_rows * self.routed(layer).active * self._plan.target.spec.d_model
        return self._layout.act(executor, batch.id, "outputs", nbytes)
