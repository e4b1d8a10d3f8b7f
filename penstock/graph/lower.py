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
from math import inf

from penstock.errors import InternalError
from penstock.graph import ops
from penstock.graph.arenas import Layout, head_units
from penstock.graph.emit import Emitter
from penstock.graph.repeats import Repeats
from penstock.graph.ring import Ring, Streamed
from penstock.graph.tasks import Batch, Call, Pass, Slot, Stream, Task
from penstock.spec.parts import SUM_GRANULES
from penstock.spec.plan import DEVICE, Plan

Cost = tuple[int, int]  # bytes, flops

_BLOCKS_AHEAD = {"overlapped": inf, "saving": 0, "flexgen": 1}  # that loads may be for, beyond the one being computed


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
        self._rings = {tier: Ring(f"{tier}.ring", nbytes) for tier, nbytes in plan.ring_bytes.items()}
        self._stage = Ring("host.stage", plan.stage_bytes)
        self._predictors = {predictor.layer: predictor for predictor in plan.predictors}
        self._streams: dict[tuple[Stream, str], list[Streamed]] = {}
        self._block_number = 0  # of the pass: the block that is being emitted
        self._matrix_costs: dict[tuple[int, tuple[str, ...]], Cost] = {}
        self._emit = Emitter()
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
        blocks = 2 * layers + int(p.stream.logits)
        for tier, ring in self._rings.items():
            then = self._stream(p.then, tier) if p.then else []
            ring.begin(self._stream(p.stream, tier), [(u, nbytes, blocks + at) for u, nbytes, at in then])
        if DEVICE in self._rings:
            waiting = self._rings[DEVICE].waiting
            self._stage.begin([load for load in waiting if self.plan.units[load[0]].home != "host"], [])
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
        self._block_number = number
        layer, is_ffn = divmod(number, 2)
        order = self.plan.order
        if order == "flexgen":  # beside this block: what the next one needs, and what the last one left
            if number == 0:
                self._load_kv(p, 0)
            self._pump()
            if is_ffn:
                self._load_kv(p, layer + 1)
                self._save_kv(p, layer)
            return
        if order == "saving":  # a small ring, and each block lies where the one before it lay
            for ring in (*self._rings.values(), self._stage):
                ring.rewind()
        if not is_ffn and (order == "saving" or number == 0):
            self._load_kv(p, layer)
        if not is_ffn and order == "overlapped":
            self._load_kv(p, layer + 1)
        self._pump()

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
            started: set[int] = set()
            for u in units:
                if self.plan.units[u].executor(purpose) != executor:
                    continue
                weights = self._weights(u, purpose)
                for batch in p.batches:
                    first = batch.id not in started
                    started.add(batch.id)
                    if kind == "attn":
                        self._attention(layer, u, executor, weights, batch, first)
                    else:
                        self._ffn(layer, u, executor, weights, batch, first, purpose)
                self._release(u, purpose)
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
            weights = self._weights(u, p.purpose)
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
            self._release(u, p.purpose)
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
        slots = [Slot(ring.arena, 0, ring.nbytes) for ring in self._rings.values()]
        if DEVICE in self._rings and self.plan.stage_bytes:
            slots.append(Slot("host.stage", 0, self.plan.stage_bytes))
        slots += self.layout.windows
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

    def _weights(self, u: int, purpose: str) -> Slot:
        """Where the unit's bytes are when its calls run: at home, or in the ring."""
        unit = self.plan.units[u]
        if not self.layout.streams(unit, purpose):
            return self.layout.weights[u]
        return self._rings[unit.executor(purpose)].take(u)

    # -- streams --------------------------------------------------------------------------------------

    def _stream(self, stream: Stream, tier: str) -> list[Streamed]:
        """What a pass of this kind streams through a tier's ring, in order. Worked out once."""
        if (stream, tier) in self._streams:
            return self._streams[stream, tier]
        layers = range(len(self.plan.target.spec.layers))
        blocks = [self._units[f"{i}.{kind}"] for i in layers for kind in ("attn", "ffn")]
        blocks += [self._head] if stream.logits else []
        units = [(u, self.plan.units[u], at) for at, block in enumerate(blocks) for u in block]
        found = self._streams[stream, tier] = [
            (u, (unit.hi - unit.lo) * self.parts[unit.part].granule_bytes, at)
            for u, unit, at in units
            if unit.executor(stream.purpose) == tier and self.layout.streams(unit, stream.purpose)
        ]
        return found

    def _release(self, u: int, purpose: str) -> None:
        """The unit's last call is emitted: its ring bytes are free for the loads that wait."""
        unit = self.plan.units[u]
        if self.layout.streams(unit, purpose):
            self._emit.close(unit.executor(purpose))
            self._rings[unit.executor(purpose)].release(u)
            self._pump()

    def _pump(self) -> None:
        """Emits every load that a ring has room for, of the blocks that may be loaded now."""
        last = self._block_number + _BLOCKS_AHEAD[self.plan.order]
        for tier, ring in self._rings.items():
            if tier == "host":
                self._load(ring, last)
                continue
            self._load(self._stage, last)
            while (lift := ring.admit(last, self._at_hand)) is not None:
                u, slot = lift
                unit = self.plan.units[u]
                source = self.layout.weights[u] if unit.home == "host" else self._stage.take(u)
                fmt = self.parts[unit.part].format.kind
                self._emit.alone(("h2d0",), Call("lift", u, None, (source, slot), (), fmt, slot.nbytes, 0))
                if unit.home != "host":
                    self._stage.release(u)
                    self._load(self._stage, last)

    def _load(self, ring: Ring, last_block: float) -> None:
        """Emits what the disks may load into a ring of the host now."""
        while (load := ring.admit(last_block, lambda _: True)) is not None:
            u, slot = load
            unit = self.plan.units[u]
            fmt = self.parts[unit.part].format.kind
            self._emit.alone((unit.home,), Call("load", u, None, (slot,), (), fmt, slot.nbytes, 0))

    def _at_hand(self, u: int) -> bool:
        """Whether a unit can be lifted: it is in memory, or will be when the load of it that was emitted is done."""
        return self.plan.units[u].home == "host" or self._stage.holds_next(u)
