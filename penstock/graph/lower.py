"""The lowering: turns a plan and a pass into tasks in order. Nothing else in penstock orders work.

A pass goes layer by layer, and inside a block (attention or FFN) unit by unit. Every unit serves all batches of the
pass before the next unit comes (FlexGen's zig-zag block). So a streamed unit is loaded once per pass.

Which weights stream does not depend on tokens. Each ring is filled from a cyclic stream: the units that this pass
streams through the ring, in order, then the units of the pass that follows (`Pass.then`). A load is emitted as soon as
its bytes in the ring are free. They are free when the last call that reads their old content has been emitted. The
load's edge to that call is derived like any other (write after read). Loads run ahead as far as the ring's size allows.
Two values of `Plan.order` allow less: "saving" loads only for the current block, and "flexgen" only for the next block,
with a wait for everything between blocks.

On a machine with a device each executor adds up the share of a block that its own units give. The device's calls are
handed out first, so that the device and the CPU work at once (ScheInfer §III). The device reads weights from its memory
or from its ring. Units at home in RAM are lifted over the link straight into that ring. Units at home on a disk are
loaded into the stage first, a ring of pinned memory, and lifted from there (PIPO §3.3). Stage and ring are two rings,
and not one task on two lanes, so that the link can lift units from RAM while the disk fills the stage. Activations,
tokens and logits are kilobytes. They cross on the device's own lane, where they wait for no weights.

State kept between passes: the content of the rings, the streams' cursors, and the last readers and writers per slot.
Also tasks of passes that may come again: if nothing streams those of each shape of pass (`repeats`), else those of the
latest pass (`recurring`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from penstock.errors import InternalError
from penstock.graph import ops
from penstock.graph.arenas import Layout
from penstock.graph.asked import AskedUnits
from penstock.graph.assigned import AssignedRows, Piece
from penstock.graph.attention import AttentionBlocks
from penstock.graph.batch import Batch
from penstock.graph.cache import ExpertCache, NewCache
from penstock.graph.calls import Calls
from penstock.graph.demand import Answer, Demand
from penstock.graph.emit import Emitter
from penstock.graph.ends import Ends
from penstock.graph.experts import ExpertCalls
from penstock.graph.ffn import FfnCalls
from penstock.graph.open_passes import OpenPass, OpenPasses
from penstock.graph.recurring import Recurring
from penstock.graph.repeats import Repeats, likened_lanes
from penstock.graph.streams import Streams
from penstock.graph.stretches import Stretches
from penstock.graph.tasks import Call, Pass, Slot, Task
from penstock.spec.places import HOST, Executor, kernels_of
from penstock.spec.plan import Plan


class Lowering:
    """`step(pass)` yields the tasks of that pass, and loads for the next one where the ring has room. `new_cache`:
    makes the plan's caches, which are `caches`. `recurs`: where weights stream, a pass may be a view of an earlier one
    (`graph/recurring`)."""

    def __init__(self, plan: Plan, new_cache: NewCache = ExpertCache, recurs: bool = True) -> None:
        self.plan = plan
        self.layout = Layout(plan)
        self.parts = self.layout.parts
        self._emit = Emitter(likens=likened_lanes(plan, self.layout))
        self.caches = {(c.layer, c.executor): new_cache(c.slots, c.policy) for c in plan.caches}
        self._streams = Streams(self.layout, self._emit, self.caches)
        self._calls = Calls(self.layout, self._emit)
        self._ends = Ends(self._calls, self._streams)
        self._attention = AttentionBlocks(self._calls, self._streams)
        self._experts = ExpertCalls(self._calls, self._streams)
        self._asked = AskedUnits(self._calls)
        self._ffns = FfnCalls(self._calls, self._asked)
        self._assigned = AssignedRows(plan)
        self._demand = Demand(self._experts, self._calls, self.caches)
        self._repeats = Repeats(plan, self.layout, self._emit.adopt)
        self._recurring = Recurring(plan, self.layout, self._emit) if recurs else None
        self._stretches = Stretches(self._calls, self._streams, self._experts, self._demand)
        self._open_passes = OpenPasses(plan)

    @property
    def stays(self) -> bool:
        """Whether all that passes read is at home with those who compute, and no answer decides what they read."""
        return self._repeats.nothing_streams and not self.plan.asks

    # -- the pass -------------------------------------------------------------------------------------

    def step(self, p: Pass, answer: Answer | None = None, by_batches: bool = False) -> Iterator[Task]:
        """Tasks of one pass. Must be consumed to its end before the next pass is lowered.

        `by_batches`: of a task that comes again the caller looks only at `like` and the batches, and takes numbers of
        rows as data. So the task may be that of a pass with other numbers of rows (`Task.batches`).

        `answer(call)`: the experts that a router chose for each row, in rising order, or the places of the neurons of a
        layer's FFN that fire in each row. It is called only if the plan has caches, or units that are asked for. It is
        called after the task of that call was handed out, and before any task that depends on the answer."""
        recurring = None if self._repeats.nothing_streams or self.plan.asks else self._recurring
        held = self._streams.held
        repeated = self._repeats.find(p, by_batches) if recurring is None else recurring.find(p, held)
        if repeated is not None:
            yield from repeated
        elif recurring is not None:
            yield from recurring.keep(p, held, self._lower(p, answer or _nobody))
        else:
            tasks = self._repeats.keep(p, self._lower(p, answer or _nobody), by_batches)
            yield from self._open_passes.keep(p, tasks) if self._opens(p) else tasks

    def open_pass(self, p: Pass) -> OpenPass | None:
        """The pass in one piece, complete but for routers' answers. None if no such pass was lowered before, or if this
        one does not run in one piece. Whoever runs it in place of the tasks lets `caches` decide, and leaves no load
        under way."""
        return self._open_passes.find(p) if self._opens(p) else None

    def _opens(self, p: Pass) -> bool:
        return self._open_passes.may_be(p) and self._stretches.apply(p)

    def warm(self, layer: int, experts: Sequence[int]) -> None:
        """Puts experts of a layer into its caches, as if a pass had asked for them. Predictions begin with warm
        caches."""
        self._demand.warm(layer, experts)

    def warm_records(self, u: int, rates: Sequence[float]) -> None:
        """Makes the slots of a unit that is asked for as they are after many passes (`RecentRecords.warm`)."""
        self._asked.warm(u, rates)

    def _lower(self, p: Pass, answer: Answer) -> Iterator[Task]:
        layers = len(self.plan.target.spec.layers)
        self._streams.begin(p)
        self._begin_block(p, 0)
        for batch in p.batches:
            self._ends.embed(batch)
        stretches = self._stretches if self._stretches.apply(p) else None
        for layer in range(layers):
            if stretches is None:
                yield from self._until_experts(p, layer, answer)
                yield from self._shares(p, layer, "ffn", answer)
                yield from self._end(p, layer, "ffn")
            else:
                before = self._end(p, layer - 1, "ffn") if layer else ()
                yield from stretches.step(p, layer, chain(before, self._until_experts(p, layer, answer)))
                yield from self._shares(p, layer, "ffn", answer, combines=False)
        if stretches is not None:
            yield from self._end(p, layers - 1, "ffn")
        if p.stream.logits:
            self._begin_block(p, 2 * layers)
            yield from self._ends.logits(p)
            self._sync()
        for batch in p.batches:
            if batch.hidden:
                self._ends.hidden(batch)
        yield from self._emit.finish()

    def _begin_block(self, p: Pass, number: int) -> None:
        """Emits the loads that may begin with a block. Block 2·i is the attention of layer i, block 2·i + 1 its FFN,
        and the last block the head."""
        self._streams.begin_block(number)
        layer, is_ffn = divmod(number, 2)
        order = self.plan.order
        if order == "flexgen":  # beside this block: loads for the next block, and the KV that the last block added
            if number == 0:
                self._attention.load_kv(p, 0)
            self._streams.pump()
            if is_ffn:
                self._attention.load_kv(p, layer + 1)
                self._attention.save_kv(p, layer)
            return
        if not is_ffn and (order == "saving" or number == 0):
            self._attention.load_kv(p, layer)
        if not is_ffn and order == "overlapped":
            self._attention.load_kv(p, layer + 1)
        self._streams.pump()

    def _until_experts(self, p: Pass, layer: int, answer: Answer) -> Iterator[Task]:
        """Emits the layer's attention, and the norm and the router of its FFN."""
        if layer:
            self._begin_block(p, 2 * layer)
        self._inputs(p, layer, "attn")
        yield from self._shares(p, layer, "attn", answer)
        yield from self._end(p, layer, "attn")
        self._begin_block(p, 2 * layer + 1)
        self._inputs(p, layer, "ffn")

    def _executors(self, p: Pass, layer: int, kind: str) -> list[Executor]:
        """Who computes the units of a block, the host last."""
        executors = list(self._calls.shares(layer, kind, p.purpose, self._asking(p, layer, kind)))
        if HOST not in executors and self._assigned.shared(p, layer, kind):
            executors.append(HOST)
        return executors

    def _pieces(self, p: Pass, layer: int, kind: str, batch: Batch, executor: Executor) -> list[Piece]:
        """The pieces of a batch of which an executor computes units."""
        return [
            piece
            for piece in self._assigned.pieces(p, layer, kind, batch)
            if executor in self._calls.shares(layer, kind, piece.purpose, self._asking(p, layer, kind))
        ]

    def _asking(self, p: Pass, layer: int, kind: str) -> Executor | None:
        """The executor of the experts that the router of a block is asked for, if any."""
        return self._demand.asks(layer, p.stream) if kind == "ffn" else None

    def _shares(self, p: Pass, layer: int, kind: str, answer: Answer, combines: bool = True) -> Iterator[Task]:
        """The units' partial sums for every batch, executor by executor. `combines`: as for `_share`."""
        executors = self._executors(p, layer, kind)
        for executor in executors:
            if kind == "attn" and layer in self.layout.delegated:
                yield from self._attention.delegated(p, layer, executor)
            else:
                yield from self._share(p, layer, kind, executor, answer, combines)
                if len(executors) > 1:
                    self._emit.close(kernels_of(executor))

    def _end(self, p: Pass, layer: int, kind: str) -> Iterator[Task]:
        """Emits the end of a block for every batch: the sums of experts that are left, and the merge."""
        self._demand.combine(p)
        if kind == "attn" and self.plan.target.spec.layers[layer].parallel_norms == 2:
            for batch in p.batches:  # of x as it still is
                self._calls.norm(batch, f"{layer}.norms", "ffn_in", layer, range(batch.total_rows))
        for batch in p.batches:
            for piece in self._assigned.pieces(p, layer, kind, batch):
                executors = self._calls.shares(layer, kind, piece.purpose, self._asking(p, layer, kind))
                self._merge(piece, layer, kind, list(executors))
        if kind == "attn" and self.plan.order != "flexgen":
            self._attention.save_kv(p, layer)
        self._sync()
        yield from self._emit.closed()

    def _inputs(self, p: Pass, layer: int, kind: str) -> None:
        """Emits the block's norm on the main executor, and copies of its output for the other executors. Then the
        router, or the predictor. If the FFN stands beside attention (`parallel_norms`), its norm was emitted before."""
        executors = self._executors(p, layer, kind)
        main = self.plan.main
        beside = kind == "ffn" and self.plan.target.spec.layers[layer].parallel_norms > 0
        for batch in p.batches:
            if not beside:
                self._calls.norm(batch, f"{layer}.norms", f"{kind}_in", layer, range(batch.total_rows))
            self._calls.order(main, batch, layer, kind, self._calls.rows(main, batch, "h"))
            for executor in executors:
                for piece in self._pieces(p, layer, kind, batch, executor) if executor != main else ():
                    self._calls.copy_rows(piece.batch, "h", main, executor, lo=piece.lo)
            if kind == "ffn" and self.plan.target.spec.layers[layer].routed is not None:
                self._experts.route(layer, batch, executors)
            elif kind == "ffn" and self._ffns.predicts(p.purpose):
                for foretold in self._ffns.foretold(layer):
                    self._ffns.predict(foretold, batch, executors, self._executors(p, foretold, kind))
        if len(executors) > 1:  # so that other executors wait for the norm alone, not for the main one's units too
            self._emit.close(kernels_of(main))

    def _share(
        self, p: Pass, layer: int, kind: str, executor: Executor, answer: Answer, combines: bool
    ) -> Iterator[Task]:  # fmt: skip
        """One executor's units of the block, and the copy of its partial sums to the main executor. `combines`: the
        outputs of experts that the router is asked for are added up here, else at the block's end."""
        asking = self._asking(p, layer, kind)
        if executor == asking == HOST:  # the disk loads experts while the CPU computes the shared one
            yield from self._demand.ask(p, layer, answer)
        units = self._calls.shares(layer, kind, p.purpose, asking).get(executor)
        if units is None:  # units in RAM, for the rows that a device leaves to the CPU
            units = self._calls.shares(layer, kind, "mixed", asking)[executor]
        kinds = [self.parts[self.plan.units[u].part].kind for u in units]
        asked = self._asked.among(p, units) if kind == "ffn" else []
        if kind == "ffn":  # the disk reads records while the CPU computes the layer's other units
            for known in self._ffns.known(layer) if p.stream.asks else ():
                yield from self._asked.ask(p, known, executor, answer)
        started: set[int] = set()  # ids of batches whose sums are begun
        begun: set[tuple[int, int]] = set()  # the same of pieces of batches
        for i, u in enumerate(units):
            if kinds[i] == "experts":
                yield from self._experts.unit(p, layer, u, executor, started)
                continue
            weights = self.layout.asked[u] if u in asked else self._weights(p, u, executor)
            if u in asked:
                self._asked.recall(u)
            for batch in p.batches:
                started.add(batch.id)
                for piece in self._assigned.pieces(p, layer, kind, batch):
                    if self.plan.units[u].executor(piece.purpose) != executor:
                        continue
                    first = (batch.id, piece.lo) not in begun
                    begun.add((batch.id, piece.lo))
                    if kind == "attn":
                        self._attention.unit(layer, u, executor, weights, batch, first, p.pages_used)
                    else:
                        self._ffns.unit(layer, u, executor, weights, piece, first)
                if kinds[i] == "shared" and "shared" not in kinds[i + 1 :]:
                    self._experts.shared_done(layer, executor, batch)
            if self.plan.units[u].executor(p.purpose) == executor:
                self._streams.release(u, p.stream)
            yield from self._emit.closed()
            if u in asked:
                yield from self._asked.computed(u)
        if executor == asking:
            if executor != HOST:  # a device computes the shared expert while the CPU computes the router
                self._emit.close(kernels_of(executor))
                yield from self._demand.ask(p, layer, answer)
            yield from self._demand.demanded(p, layer, started, combines)
        main = self.plan.main
        for batch in p.batches if executor != main else ():
            for piece in self._pieces(p, layer, kind, batch, executor):
                self._calls.copy_rows(piece.batch, "partial", executor, main, f"partial.{executor}", piece.lo)

    def _weights(self, p: Pass, u: int, executor: Executor) -> Slot:
        """Where a unit lies for an executor: where this pass streams it to, or for the CPU's rows at home in RAM."""
        if self.plan.units[u].executor(p.purpose) != executor:
            return self.layout.weights[u]
        return self._streams.take(u, p.stream)

    def _merge(self, piece: Piece, layer: int, kind: str, executors: list[Executor]) -> None:
        calls, batch, lo = self._calls, piece.batch, piece.lo
        main = self.plan.main
        names = ["partial" if executor == main else f"partial.{executor}" for executor in executors]
        partials = tuple([calls.rows(main, batch, name, lo) for name in names])
        x = calls.rows(main, batch, "x", lo)
        routed = self.plan.target.spec.layers[layer].routed
        biased = routed is not None and routed.expert.down_bias and kind == "ffn"
        routes = (self._experts.routes(layer, main, batch),) if biased else ()
        read = routed.active if routed is not None and biased else 0  # biases of a row
        cost = ops.rows_cost(self.plan.target.spec, batch.total_rows, 2 + len(partials) + read)
        norms = calls.whole(f"{layer}.norms")
        merge = ops.Merge(norms, x, partials, calls.scratch(main), layer=layer, block=kind, routes=routes)
        calls.add(main, merge, -1, batch, "*", cost)

    def _sync(self) -> None:
        """In FlexGen's order: waits at the end of a block for all loads and KV moves that are under way."""
        if self.plan.order != "flexgen":
            return
        slots = [*self._streams.slots, *self.layout.kv.windows]
        if slots:
            self._emit.call(kernels_of(self.plan.main), Call(ops.Sync(tuple(slots)), -1, None, "*", 0, 0))


def _nobody(call: Call) -> Sequence[Sequence[int]]:
    raise InternalError(f"{call.op} of this plan has to be answered, but nobody was named who does")
