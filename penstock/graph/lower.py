"""The lowering: a plan and a pass in, tasks in order out. Nothing else in penstock orders work.

A pass goes layer by layer; inside a block (attention or FFN) unit by unit, and every unit serves all batches
of the pass before the next one comes (FlexGen's zig-zag block), so a streamed unit crosses once a pass.

Weights do not read tokens. Each ring is filled from a cyclic stream: the units that this pass streams
through it, in order, then those of the pass that follows (`Pass.then`). A load is emitted as soon as its
bytes are free, that is when the last call that reads what lies there has been emitted; its edge to that
call is derived like any other (write after read). How far loads run ahead is just the ring's size, or by
`Plan.order` less: to the block at hand ("saving"), or to the next one with a wait for everything between
blocks ("flexgen").

KV that does not live where attention runs comes through a window of a layer or two: what came before a batch's
rows is loaded one attention ahead and what they add is saved after it; nobody waits for that but who needs
the window, or these pages, again (PIPO §3.1.2).

On a machine with a device each executor adds up its units' share of a block, and the device's calls are handed out
first, so that it and the CPU work at once (ScheInfer §III). What the device computes it finds in its memory, or in its
ring, into which units are lifted over the link: straight from memory, or, at home on a disk, from the stage, a ring of
pinned memory that the disk fills (PIPO §3.3). Two rings and not one task on two lanes: while the disk fills the stage,
the link lifts what is at home in memory. Activations, tokens and logits, kilobytes, cross on the device's own lane,
where they wait for no weights.

State kept between passes: what the rings hold, the streams' cursors, the last readers and writers per slot, and
where nothing streams the pass of each shape as lowered once.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import InternalError
from penstock.graph import ops
from penstock.graph.arenas import Layout, head_units
from penstock.graph.emit import Emitter
from penstock.graph.repeats import Repeats
from penstock.graph.streams import Streams
from penstock.graph.tasks import Batch, Call, Pass, Slot, Task
from penstock.spec.parts import SUM_GRANULES
from penstock.spec.plan import Plan

Cost = tuple[int, int]  # bytes, flops


class Lowering:
    """`step(pass)` yields the tasks of that pass, and loads for the next one where the ring has room."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.layout = Layout(plan)
        self.parts = self.layout.parts
        self._units: dict[str, list[int]] = {}
        for i, unit in enumerate(plan.units):
            self._units.setdefault(unit.part, []).append(i)
        self._head = head_units(plan)
        self._predictors = {predictor.layer: predictor for predictor in plan.predictors}
        self._matrix_costs: dict[tuple[int, tuple[str, ...]], Cost] = {}
        self._emit = Emitter()
        self._streams = Streams(self.layout, self._emit)
        self._repeats = Repeats(plan, self.layout, self._emit.adopt)

    # -- the pass -------------------------------------------------------------------------------------

    def step(self, p: Pass) -> Iterator[Task]:
        """Tasks of one pass. Must be consumed to its end before the next pass is lowered."""
        known = self._repeats.find(p)
        if known is not None:
            yield from known
        else:
            yield from self._repeats.keep(p, self._lower(p))

    def _lower(self, p: Pass) -> Iterator[Task]:
        layers = len(self.plan.target.spec.layers)
        self._streams.begin(p)
        self._begin_block(p, 0)
        for batch in p.batches:
            self._embed(batch)
        for layer in range(layers):
            yield from self._block(p, layer, "attn")
            yield from self._block(p, layer, "ffn")
        if p.stream.logits:
            self._begin_block(p, 2 * layers)
            yield from self._logits(p)
            self._sync()
        yield from self._emit.finish()

    def _begin_block(self, p: Pass, number: int) -> None:
        """Emits the loads that may begin. Block 2·i is the attention of layer i, 2·i + 1 its FFN, the last the head."""
        self._streams.begin_block(number)
        layer, is_ffn = divmod(number, 2)
        order = self.plan.order
        if order == "flexgen":  # beside this block: what the next one needs, and what the last one left
            if number == 0:
                self._load_kv(p, 0)
            self._streams.pump()
            if is_ffn:
                self._load_kv(p, layer + 1)
                self._save_kv(p, layer)
            return
        if not is_ffn and (order == "saving" or number == 0):
            self._load_kv(p, layer)
        if not is_ffn and order == "overlapped":
            self._load_kv(p, layer + 1)
        self._streams.pump()

    def _embed(self, batch: Batch) -> None:
        main, spec, layout = self.plan.main, self.plan.target.spec, self.layout
        t = batch.total_rows
        part, at = self.parts["embed"], layout.gathers or "host"
        tokens = layout.act("host", batch.id, "tokens", 4 * t)
        rows = layout.act(at, batch.id, "rows", 4 * t * spec.d_embed)
        units = self._units["embed"]
        if layout.staging is None:
            if at != "host":
                tokens = self._copy(batch, "tokens", tokens.nbytes, "host", at)
            first, last = layout.weights[units[0]], layout.weights[units[-1]]
            weights = Slot(first.arena, first.lo, last.hi)
            self._call(at, "gather", -1, batch, (weights, tokens, rows), (), part.format.kind, (rows.nbytes, 0))
        else:
            read_bytes = t * part.granule_bytes  # at most; tokens that share a granule share its read
            slots = (tokens, rows, layout.staging)
            self._emit.alone(("disk0",), Call("fetch", -1, batch, slots, (), part.format.kind, read_bytes, 0))
        if at != main:
            rows = self._copy(batch, "rows", rows.nbytes, at, main)
        x = layout.act(main, batch.id, "x", 4 * t * spec.d_model)
        cost = ops.rows_cost(spec, t, 2)
        self._call(main, "embed", -1, batch, (rows, self._whole("edges"), x, self._scratch(main)), (), "*", cost)

    def _block(self, p: Pass, layer: int, kind: str) -> Iterator[Task]:
        """Norm, the units' partial sums on each executor, merge; for every batch."""
        part = self.parts[f"{layer}.{kind}"]
        units = self._units[part.key]
        main, purpose = self.plan.main, p.purpose
        delegated = kind == "attn" and layer in self.layout.delegated
        if layer or kind == "ffn":
            self._begin_block(p, 2 * layer + (kind == "ffn"))
        row_bytes = 4 * self.plan.target.spec.d_model
        executors = sorted({self.plan.units[u].executor(purpose) for u in units}, key=lambda name: name == "host")
        for batch in p.batches:
            self._norm(batch, f"{layer}.norms", (f"{kind}_in", layer), range(batch.total_rows))
            for executor in executors:
                if executor != main:
                    self._copy(batch, "h", batch.total_rows * row_bytes, main, executor)
            if kind == "ffn" and purpose == "decode":
                self._predict(layer, batch, executors)
        if len(executors) > 1:  # what one executor waits for does not wait for the other one's share
            self._emit.close(main)
        for executor in executors:
            if delegated:
                yield from self._delegated(p, layer, executor)
                continue
            started: set[int] = set()
            for u in units:
                if self.plan.units[u].executor(purpose) != executor:
                    continue
                weights = self._streams.take(u, purpose)
                for batch in p.batches:
                    first = batch.id not in started
                    started.add(batch.id)
                    if kind == "attn":
                        self._attention(layer, u, executor, weights, batch, first)
                    else:
                        self._ffn(layer, u, executor, weights, batch, first, purpose)
                self._streams.release(u, purpose)
                yield from self._emit.closed()
            if executor != main:
                for batch in p.batches:
                    nbytes = batch.total_rows * row_bytes
                    self._copy(batch, "partial", nbytes, executor, main, f"partial.{executor}")
            if len(executors) > 1:
                self._emit.close(executor)
        for batch in p.batches:
            self._merge(batch, layer, kind, executors)
        if kind == "attn" and self.plan.order != "flexgen":
            self._save_kv(p, layer)
        self._sync()
        yield from self._emit.closed()

    def _attention(self, layer: int, u: int, executor: str, weights: Slot, batch: Batch, first: bool) -> None:
        unit, layout = self.plan.units[u], self.layout
        part, a = self.parts[unit.part], self.plan.target.spec.layers[layer].attention
        t, heads = batch.total_rows, unit.hi - unit.lo
        home = layout.kv_home(layer, batch)
        if home.attend != executor:
            raise InternalError(f"layer {layer}: attention on {home.attend} but its projections on {executor}")
        q = layout.act(executor, batch.id, "q", 4 * t * a.heads * a.head_dim)
        out = layout.act(executor, batch.id, "a", 4 * t * a.heads * a.head_dim)
        keys, values = layout.kv(layer, batch)
        h, partial = self._rows(executor, batch, "h"), self._rows(executor, batch, "partial")
        scratch, fmt = self._scratch(executor), part.format.kind
        cost = self._matrix_cost(u, ops.QKV_BLOCKS, t)
        norms = self.layout.norms(layer, executor)
        self._call(executor, "qkv", u, batch, (weights, norms, h, q, keys, values, scratch), (layer,), fmt, cost)
        cost = ops.attend_cost(a, heads, batch, home.format.kv_bytes(a.head_dim))
        self._call(executor, "attend", u, batch, (q, keys, values, out, scratch), (layer,), home.format.kind, cost)
        cost = self._matrix_cost(u, ops.OUT_BLOCKS, t)
        self._call(executor, "out", u, batch, (weights, out, partial, scratch), (layer, int(first)), fmt, cost)

    def _delegated(self, p: Pass, layer: int, executor: str) -> Iterator[Task]:
        """Projections on `executor`, attention where KV is (FlexGen's computation delegation): q, and the new K and V,
        cross the link, and what attention gives comes back. Rows that begin a prompt find nothing in the cache: there
        `executor` attends itself, and K and V follow behind."""
        layout, units, a = self.layout, self._units[f"{layer}.attn"], self.plan.target.spec.layers[layer].attention
        weights = {u: self._streams.take(u, p.purpose) for u in units}
        scratch, fmt = self._scratch(executor), self.parts[f"{layer}.attn"].format.kind
        for batch in p.batches:
            t, home = batch.total_rows, layout.kv_home(layer, batch)
            row_bytes, each = 4 * t * a.heads * a.head_dim, home.format.kv_bytes(a.head_dim)
            q, h = layout.act(executor, batch.id, "q", row_bytes), self._rows(executor, batch, "h")
            new = [layout.act(executor, batch.id, name, t * a.kv_heads * each) for name in ("k", "v")]
            for u in units:
                slots = (weights[u], layout.norms(layer, executor), h, q, *new, scratch)
                self._call(executor, "qkv", u, batch, slots, (layer,), fmt, self._matrix_cost(u, ops.QKV_BLOCKS, t))
            at, read = executor, (q, *new)
            if any(batch.start):
                at, read = (
                    home.attend,
                    (self._copy(batch, "q", row_bytes, executor, home.attend), *layout.kv(layer, batch)),
                )
            to_cache = (*new, *layout.kv(layer, batch))
            nbytes, kind = sum(slot.nbytes for slot in new), home.format.kind
            self._emit.alone(("d2h0",), Call("kv_save", -1, batch, to_cache, (layer,), kind, nbytes, 0))
            for u in units:
                cost = ops.attend_cost(a, self.plan.units[u].hi - self.plan.units[u].lo, batch, each)
                slots = (*read, layout.act(at, batch.id, "a", row_bytes), self._scratch(at))
                self._call(at, "attend", u, batch, slots, (layer,), kind, cost)
        for batch in p.batches:
            if any(batch.start):
                nbytes = 4 * batch.total_rows * a.heads * a.head_dim
                self._copy(batch, "a", nbytes, layout.kv_home(layer, batch).attend, executor)
        for u in units:
            for batch in p.batches:
                out = layout.act(executor, batch.id, "a", 4 * batch.total_rows * a.heads * a.head_dim)
                slots = (weights[u], out, self._rows(executor, batch, "partial"), scratch)
                cost = self._matrix_cost(u, ops.OUT_BLOCKS, batch.total_rows)
                self._call(executor, "out", u, batch, slots, (layer, int(u == units[0])), fmt, cost)
            self._streams.release(u, p.purpose)
            yield from self._emit.closed()

    def _predict(self, layer: int, batch: Batch, executors: list[str]) -> None:
        """Which neurons of its FFN the batch needs, for every executor of some of them (PowerInfer §4.2)."""
        predictor = self._predictors.get(layer)
        if predictor is None:
            return
        home, layout = predictor.home, self.layout
        if home not in (self.plan.main, *executors):
            self._copy(batch, "h", self._rows(home, batch, "h").nbytes, self.plan.main, home)
        part = layout.predictor_part(predictor)
        active = self._active(layer, home, batch)
        slots = (layout.predictors[layer], self._rows(home, batch, "h"), active, self._scratch(home))
        cost = ops.matrix_cost(part, 0, 1, ops.PREDICTOR_BLOCKS, batch.total_rows)
        self._call(home, "predict", -1, batch, slots, (layer,), part.format.kind, cost)
        for executor in executors:
            if executor != home:
                self._copy(batch, "active", active.nbytes, home, executor)

    def _ffn(self, layer: int, u: int, executor: str, weights: Slot, batch: Batch, first: bool, purpose: str) -> None:
        unit = self.plan.units[u]
        part = self.parts[unit.part]
        h, partial = self._rows(executor, batch, "h"), self._rows(executor, batch, "partial")
        cost = self._matrix_cost(u, ops.FFN_BLOCKS, batch.total_rows)
        slots: tuple[Slot, ...]
        slots = (weights, h, partial, self._rows(executor, batch, "pending"), self._scratch(executor))
        if purpose == "decode":
            cost = ops.active_cost(cost, unit.active) if unit.active < 1 else cost
            slots += (self._active(layer, executor, batch),) if layer in self._predictors else ()
        continues, keeps = (int(self._cuts_a_four(u, other, purpose)) for other in (u - 1, u + 1))
        args = (layer, int(first), continues, keeps)
        self._call(executor, "ffn", u, batch, slots, args, part.format.kind, cost)

    def _cuts_a_four(self, u: int, other: int, purpose: str) -> bool:
        """Whether a four of an FFN's granules lies partly in the unit next to it, computed by the same executor."""
        units = self.plan.units
        if other not in range(len(units)):
            return False
        unit, neighbour = units[u], units[other]
        if neighbour.part != unit.part or neighbour.executor(purpose) != unit.executor(purpose):
            return False
        return max(unit.lo, neighbour.lo) % SUM_GRANULES != 0

    def _merge(self, batch: Batch, layer: int, kind: str, executors: list[str]) -> None:
        main = self.plan.main
        names = ["partial" if executor == main else f"partial.{executor}" for executor in executors]
        partials = [self._rows(main, batch, name) for name in names]
        x = self._rows(main, batch, "x")
        cost = ops.rows_cost(self.plan.target.spec, batch.total_rows, 2 + len(partials))
        slots = (self._whole(f"{layer}.norms"), x, self._scratch(main), *partials)
        self._call(main, "merge", -1, batch, slots, (layer, kind), "*", cost)

    def _logits(self, p: Pass) -> Iterator[Task]:
        main, spec = self.plan.main, self.plan.target.spec
        for batch in p.batches:
            self._norm(batch, "edges", ("final",), batch.logits)
        for u in self._head:
            weights = self._streams.take(u, p.purpose)
            unit = self.plan.units[u]
            part = self.parts[unit.part]
            for batch in p.batches:
                n = len(batch.logits)
                if n:
                    h = self.layout.act(main, batch.id, "h", 4 * n * max(spec.d_model, spec.d_embed))
                    logits = self.layout.act(main, batch.id, "logits", 4 * n * spec.vocab)
                    cost = self._matrix_cost(u, ops.VOCAB_BLOCKS, n)
                    best = self.layout.act(main, batch.id, "best", 8 * n)
                    slots = (weights, h, logits, best, self._scratch(main))
                    first = int(u == self._head[0])
                    self._call(main, "head", u, batch, slots, (first,), part.format.kind, cost)
            self._streams.release(u, p.purpose)
            yield from self._emit.closed()
        for batch in p.batches:
            n = len(batch.logits)
            if n and main != "host":
                self._copy(batch, "logits", 4 * n * spec.vocab, main, "host")
                self._copy(batch, "best", 8 * n, main, "host")

    def _norm(self, batch: Batch, norms: str, which: tuple[int | str, ...], rows: range | tuple[int, ...]) -> None:
        """Also where the layer has no such norm: the op then copies, so every block reads h."""
        if not len(rows):
            return
        main, spec = self.plan.main, self.plan.target.spec
        x = self._rows(main, batch, "x")
        wide = max(spec.d_model, spec.d_embed) if norms == "edges" else spec.d_model
        h = self.layout.act(main, batch.id, "h", 4 * len(rows) * wide)
        slots = (self._whole(norms), x, h, self._scratch(main))
        self._call(main, "norm", -1, batch, slots, which, "*", ops.rows_cost(spec, len(rows), 2))

    def _load_kv(self, p: Pass, layer: int) -> None:
        """The pages before each batch's rows into the layer's window."""
        if layer >= len(self.plan.target.spec.layers):
            return
        for batch in p.batches:
            home = self.layout.kv_home(layer, batch)
            if home.home == home.attend or not any(batch.start):
                continue
            nbytes = 2 * sum(hi - lo for lo, hi in self.layout.kv_spans(layer, batch, save=False))
            slots = (*self.layout.kv_stored(layer, batch), *self.layout.kv(layer, batch))
            lane = home.home if home.home != "host" else "h2d0"
            self._emit.alone((lane,), Call("kv_load", -1, batch, slots, (layer,), home.format.kind, nbytes, 0))

    def _save_kv(self, p: Pass, layer: int) -> None:
        """The pages with each batch's rows to where they live."""
        for batch in p.batches:
            home = self.layout.kv_home(layer, batch)
            if home.home == home.attend:
                continue
            nbytes = 2 * sum(hi - lo for lo, hi in self.layout.kv_spans(layer, batch, save=True))
            slots = (*self.layout.kv(layer, batch), *self.layout.kv_stored(layer, batch))
            lane = home.home.replace("disk", "disk_write") if home.home != "host" else "d2h0"
            self._emit.alone((lane,), Call("kv_save", -1, batch, slots, (layer,), home.format.kind, nbytes, 0))

    def _sync(self) -> None:
        """FlexGen's order waits for all that goes on at the end of each block."""
        if self.plan.order != "flexgen":
            return
        slots = [*self._streams.slots, *self.layout.windows]
        if slots:
            main = self.plan.main
            self._emit.call(main, Call("sync", -1, None, tuple(slots), (), "*", 0, 0))

    def _copy(self, batch: Batch, name: str, nbytes: int, source: str, target: str, lands: str | None = None) -> Slot:
        """Activations across the link, on the device's lane; returns the slot that they land in."""
        from_slot = self.layout.act(source, batch.id, name, nbytes)
        to_slot = self.layout.act(target, batch.id, lands or name, nbytes)
        lane = target if source == "host" else source
        self._call(lane, "copy", -1, batch, (from_slot, to_slot), (name,), "*", (nbytes, 0))
        return to_slot

    def _call(
        self,
        executor: str,
        op: str,
        unit: int,
        batch: Batch,
        slots: tuple[Slot, ...],
        args: tuple[int | str, ...],
        fmt: str,
        cost: Cost,
    ) -> None:
        self._emit.call(executor, Call(op, unit, batch, slots, args, fmt, *cost))

    def _matrix_cost(self, u: int, blocks: tuple[str, ...], rows: int) -> Cost:
        """What it costs to multiply rows with a unit's blocks; for one row it is worked out once."""
        one = self._matrix_costs.get((u, blocks))
        if one is None:
            unit = self.plan.units[u]
            one = ops.matrix_cost(self.parts[unit.part], unit.lo, unit.hi, blocks, 1)
            self._matrix_costs[u, blocks] = one
        return one[0], one[1] * rows

    # -- slots ----------------------------------------------------------------------------------------

    def _rows(self, executor: str, batch: Batch, name: str) -> Slot:
        return self.layout.act(executor, batch.id, name, 4 * batch.total_rows * self.plan.target.spec.d_model)

    def _active(self, layer: int, executor: str, batch: Batch) -> Slot:
        nbytes = batch.total_rows * self.plan.target.spec.layers[layer].ffn.neurons
        return self.layout.act(executor, batch.id, "active", nbytes)

    def _scratch(self, executor: str) -> Slot:
        return self.layout.scratch[executor]

    def _whole(self, key: str) -> Slot:
        return self.layout.weights[self._units[key][0]]
