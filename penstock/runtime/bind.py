"""Runs the calls of tasks with the numpy kernels. Each op's function gets the call's slots as arrays (`bind_views`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.graph import ops
from penstock.graph.arenas import neurons_of
from penstock.graph.batch import Batch
from penstock.graph.tasks import Call, Slot, Task, batch_of
from penstock.kernels import rope
from penstock.kernels.reference import attention, dense, experts
from penstock.runtime.arena import Arenas
from penstock.runtime.batch_tables import positions
from penstock.runtime.bind_asked import fire, whole
from penstock.runtime.bind_views import Float32, Views
from penstock.runtime.kv_file import KvFile
from penstock.runtime.movers import DiskReader
from penstock.spec.part_keys import norm_before
from penstock.spec.parts import GRANULE_ROWS, Part
from penstock.spec.plan import Plan

# Gets a layer, its FFN's input float32 [T, D], and uint8 [T, neurons]: whether each one fired.
OnFired = Callable[[int, Float32, NDArray[np.uint8]], None]
_KEPT_IDS = 256  # views of routers' answers
# Gets a router's call and the experts of each row, or a predictor's and the places of the neurons that it calls active.
OnRoute = Callable[[Call, list[list[int]]], None]


class Binding(Views):
    """`call` does one call, `run` all calls of a task.

    `reader`: reads weights from disks; a plan that streams nothing needs none. `kv_file`: a plan without KV on a disk
    needs none. `poisoned`: ring slots are filled with NaN before each load, so that tests see a missing edge."""

    def __init__(
        self,
        plan: Plan,
        arenas: Arenas,
        reader: DiskReader | None,
        poisoned: bool = False,
        kv_file: KvFile | None = None,
    ) -> None:
        super().__init__(plan, arenas, reader, poisoned, kv_file)
        self.on_route: OnRoute | None = None  # called after each router's and each predictor's call
        self.on_fired: OnFired | None = None  # called after each layer's FFN. Native kernels alone can tell
        self.fetched_bytes = 0  # of embedding rows read from disk; the session sets it back to 0
        ropes = {layer.attention.rope: None for layer in self._spec.layers}
        frequencies = {r: rope.frequencies(r, plan.context) if r else None for r in ropes}
        self._frequencies = [frequencies[layer.attention.rope] for layer in self._spec.layers]
        self._predictors = {p.layer: p.part(self._spec) for p in plan.predictors}
        self._turns: dict[tuple[int, Batch], tuple[Float32, Float32]] = {}
        self._ids: dict[tuple[Slot, int, int], NDArray[np.int32]] = {}  # by slot of routes, rows and active experts
        self._ops: dict[str, Callable[[Call, Any], None]] = {name: getattr(self, f"_{name}") for name in ops.OPS}

    def run(self, task: Task) -> None:
        """Does all calls of a task, here and now."""
        for call in task.calls:
            self.call(call)

    @property
    def hears(self) -> bool:
        """Whether somebody is told what routers and FFNs say."""
        return self.on_route is not None or self.on_fired is not None

    @property
    def by_batches(self) -> bool:
        """Whether tasks that come again are run by their batches alone, whose numbers of rows are data
        (`Lowering.step`)."""
        return False

    def call(self, call: Call) -> None:
        """Does one call. Raises StorageFailed and DamagedModel where it reads from a disk."""
        self._ops[call.op](call, call.operands)
        self._tell_route(call)

    def _tell_route(self, call: Call) -> None:
        """Tells `on_route` what a router's or a predictor's call has answered. Guesses are no answers."""
        if self.on_route is None or not isinstance(call.operands, ops.Route | ops.Predict):
            return
        if not (isinstance(call.operands, ops.Route) and call.operands.guesses):
            self.on_route(call, self.answer(call))

    def begin(self) -> None:
        """A pass starts: rotations of earlier positions are forgotten."""
        self._turns.clear()

    def forget(self) -> None:
        """Task ids start over. Everything that was kept by a task's id is forgotten."""

    # -- embedding and head ---------------------------------------------------------------------------

    def _gather(self, call: Call, op: ops.Gather) -> None:
        part = self._parts["embed"]
        dense.gather(self._granules(op.weights, part), part, self._tokens(op.tokens), self._embedded(op.rows))

    def _fetch(self, call: Call, op: ops.Fetch) -> None:
        """Reads embedding rows straight from disk. A granule that holds the rows of several tokens is read once. As
        many granules are on their way as the staging has room for."""
        part = self._parts["embed"]
        tokens, rows = self._tokens(op.tokens), self._embedded(op.rows)
        staged, address = self._granules(op.staging, part), self._arenas.address(op.staging)
        granules, rows_inside = np.divmod(tokens, part.granule_rows)  # int32 [T] each
        wanted = np.unique(granules).tolist()
        loads = self._disk.fetch("embed", wanted, address, len(staged))
        for number, (granule, read_bytes) in enumerate(zip(wanted, loads, strict=True)):
            slot = number % len(staged)
            for i in np.flatnonzero(granules == granule).tolist():
                dense.gather(staged[slot : slot + 1], part, rows_inside[i : i + 1], rows[i : i + 1])
            self.fetched_bytes += read_bytes

    def _embed(self, call: Call, op: ops.Embed) -> None:
        batch = batch_of(call)
        dense.embed(
            self._embedded(op.rows), self._arenas.view(op.edges), self._parts["edges"], self._spec, positions(batch),
            self._rows(op.x, batch.total_rows), self._scratch(op.scratch),
        )  # fmt: skip

    def _norm(self, call: Call, op: ops.Norm) -> None:
        batch, (key, present, width) = batch_of(call), norm_before(self._spec, op.layer)
        chosen = batch.logits if op.layer is None and not op.every else None
        shape = (batch.total_rows if chosen is None else len(chosen), width)
        dense.norm_in(
            self._rows(op.x, batch.total_rows), self._arenas.view(op.norms), self._parts[key], op.which, self._spec,
            present, self._arenas.array(op.h, np.float32, shape), self._scratch(op.scratch), chosen,
        )  # fmt: skip

    def _order(self, call: Call, op: ops.Order) -> None:
        t = call.total_rows
        rows = self._arenas.array(op.rows, np.float32, (t, op.rows.nbytes // (4 * t)))
        part, norms = self._parts[f"{op.layer}.norms"], self._arenas.view(op.norms)
        dense.order(rows, norms, part, op.which, self._scratch(op.scratch))

    def _head(self, call: Call, op: ops.Head) -> None:
        unit, n = self._plan.units[call.unit], len(batch_of(call).logits)
        part = self._parts[unit.part]
        best = self._arenas.view(op.best)  # of each row the highest logit, float32, and its token, int32
        dense.head(
            self._granules(op.weights, part), part, unit.lo,
            self._arenas.array(op.h, np.float32, (n, self._spec.d_embed)), self._spec.logit_softcap,
            self._arenas.array(op.logits, np.float32, (n, self._spec.vocab)),
            best.view(np.float32).reshape(n, 2)[:, 0], best.view(np.int32).reshape(n, 2)[:, 1],
            op.starts, self._scratch(op.scratch),
        )  # fmt: skip

    # -- layers ---------------------------------------------------------------------------------------

    def _qkv(self, call: Call, op: ops.Qkv) -> None:
        layer, batch = op.layer, batch_of(call)
        a, unit = self._spec.layers[layer].attention, self._plan.units[call.unit]
        t, part, turn = batch.total_rows, self._parts[unit.part], self._turn(layer, batch)
        stored, tables, (keys, values) = self._cache(op, batch)
        attention.qkv(
            self._granules(op.weights, part), part, unit.lo, a, self._spec.norm, self._arenas.view(op.norms),
            self._parts[f"{layer}.norms"], self._rows(op.h, t), turn, stored, tables,
            self._arenas.array(op.q, np.float32, (t, a.heads, a.head_dim)), keys, values, self._scratch(op.scratch),
        )  # fmt: skip

    def _attend(self, call: Call, op: ops.Attend) -> None:
        layer, batch = op.layer, batch_of(call)
        a, unit = self._spec.layers[layer].attention, self._plan.units[call.unit]
        shape = (batch.total_rows, a.heads, a.head_dim)
        stored, tables, (keys, values) = self._cache(op, batch)
        attention.attend(
            self._arenas.array(op.q, np.float32, shape), keys, values, a, *self._plan.unit_rows(unit), stored, tables,
            self._arenas.array(op.a, np.float32, shape), self._scratch(op.scratch), self._sinks(op), op.value_share,
        )  # fmt: skip

    def _append(self, call: Call, op: ops.Append) -> None:
        batch, tables = batch_of(call), self._tables(batch_of(call))
        for fresh, cache in ((op.fresh_keys, op.keys), (op.fresh_values, op.values)):
            rows = self._pool(fresh, op.layer, batch, batch.total_rows)
            attention.append(rows, self._pool(cache, op.layer, batch), batch, tables)

    def _sinks(self, op: ops.Attend) -> Float32 | None:
        """float32 [H]: a score of each head."""
        if not op.norms:
            return None
        block = self._parts[f"{op.layer}.norms"].block("sinks")
        return self._arenas.view(op.norms[0])[block.offset : block.end].view(np.float32)

    def _out(self, call: Call, op: ops.Out) -> None:
        t, part, a = call.total_rows, self._parts[f"{op.layer}.attn"], self._spec.layers[op.layer].attention
        attention.out(
            self._granules(op.weights, part), part, self._plan.units[call.unit].lo, a,
            self._arenas.array(op.a, np.float32, (t, a.heads, a.head_dim)), self._rows(op.partial, t),
            op.starts_sum, self._scratch(op.scratch),
        )  # fmt: skip

    def _ffn(self, call: Call, op: ops.Ffn) -> None:
        unit, t = self._plan.units[call.unit], call.total_rows
        part, shape = self._parts[unit.part], self._spec.layers[op.layer].ffns[-1]  # dense, or the shared expert
        flags = op.starts_sum, op.continues_four, op.leaves_four
        asked = op.weights == self.layout.asked.get(call.unit)
        granules = self._picked(call, op) if asked else self._granules(op.weights, part)
        dense.ffn(
            granules, part, unit.lo, shape, self._rows(op.h, t),
            dense.FfnSum(self._rows(op.partial, t), self._rows(op.pending, t), *flags),
            self._scratch(op.scratch), self._active(op.active[0], t) if op.active else None, op.level,
        )  # fmt: skip

    def _fire(self, call: Call, op: ops.Fire) -> None:
        unit, t = self._plan.units[call.unit], call.total_rows
        part, count = self._parts[unit.part], unit.hi - unit.lo
        fire(
            self._arenas.view(op.weights).reshape(count, -1), part, self._spec.layers[op.layer].ffns[-1],
            self._rows(op.h, t), self._values(op.values, t), self._scratch(op.scratch),
        )  # fmt: skip

    def _picked(self, call: Call, op: ops.Ffn) -> NDArray[np.uint8]:
        """The granules of a unit that was asked for, uint8 [granules, granule_bytes], with the records that count."""
        unit, kept = self._plan.units[call.unit], self._arenas.view(self.layout.kept[call.unit])
        part, count, t = self._parts[unit.part], unit.hi - unit.lo, call.total_rows
        if op.values:
            fires = (self._values(op.values[0], t) != 0).any(axis=1)
        else:
            active = self._active(op.active[0], t)[:, unit.lo * GRANULE_ROWS : unit.hi * GRANULE_ROWS]
            fires = (active != 0).reshape(t, count, GRANULE_ROWS).any(axis=0)
        return whole(kept.reshape(count, -1), self._arenas.view(op.weights).reshape(count, -1), fires, part)

    def _predict(self, call: Call, op: ops.Predict) -> None:
        t, part = call.total_rows, self._predictors[op.layer]
        h, active = self._rows(op.h, t), self._active(op.active, t)
        dense.predict(self._arenas.view(op.weights), part, h, active, self._scratch(op.scratch))

    def _route(self, call: Call, op: ops.Route) -> None:
        t, part = call.total_rows, self._parts[f"{op.layer}.router"]
        experts.route(
            self._arenas.view(op.weights), part, self._routed(op.layer), self._rows(op.h, t),
            self._routes(op.layer, op.routes, t), self._scratch(op.scratch),
        )  # fmt: skip

    def _experts(self, call: Call, op: ops.Experts) -> None:
        t, part, routed = call.total_rows, self._parts[f"{op.layer}.experts"], self._routed(op.layer)
        placed = experts_of(op, part)
        experts.experts(
            [self._granules(slot, part) for _, slot in placed], [expert for expert, _ in placed], part, routed,
            self._rows(op.h, t), self._routes(op.layer, op.routes, t), self._rows(op.partial, t),
            self._outputs(op.layer, op.outputs[0], t) if op.outputs else None, op.starts_sum,
            self._scratch(op.scratch),
        )  # fmt: skip

    def _combine(self, call: Call, op: ops.Combine) -> None:
        t = call.total_rows
        experts.combine(
            self._routes(op.layer, op.routes, t), self._outputs(op.layer, op.outputs, t), self._rows(op.partial, t),
            op.starts_sum,
        )  # fmt: skip

    def _gate(self, call: Call, op: ops.Gate) -> None:
        experts.gate(self._routes(op.layer, op.routes, call.total_rows), self._rows(op.partial, call.total_rows))

    def _merge(self, call: Call, op: ops.Merge) -> None:
        t = call.total_rows
        dense.merge(
            self._arenas.view(op.norms), self._parts[f"{op.layer}.norms"], op.block, self._spec.layers[op.layer],
            self._spec.norm, self._rows(op.x, t), [self._rows(p, t) for p in op.partials], self._scratch(op.scratch),
            self._routes(op.layer, op.routes[0], t)[:2] if op.routes else None,
        )  # fmt: skip

    # -- what routers answer --------------------------------------------------------------------------

    def set_routes(self, call: Call, experts: Sequence[Sequence[int]]) -> None:
        """Replaces the answer of a router's call, which is done. `experts`: of each row, in ascending order. Their
        weights stay."""
        op = call.operands
        assert isinstance(op, ops.Route)
        self._chosen(op, call.total_rows)[...] = experts

    def set_live(self, call: Call, places: Sequence[Sequence[int]]) -> None:
        """Replaces the answer of a call that tells which neurons fire, or are active, and is done. `places`: of each
        row, in ascending order. Of the other neurons nothing is computed on; one that does not fire adds nothing."""
        op, t = call.operands, call.total_rows
        if isinstance(op, ops.Predict):
            active = self._active(op.active, t)
            for row, live in zip(active, places, strict=True):
                row[...] = 0
                row[list(live)] = 1
            return
        assert isinstance(op, ops.Fire)
        first, values = self._plan.units[call.unit].lo * GRANULE_ROWS, self._values(op.values, t)
        for row, live in enumerate(places):
            silent = np.ones(values.shape[0] * GRANULE_ROWS, np.bool_)
            silent[[place - first for place in live]] = False
            values[:, row][silent.reshape(-1, GRANULE_ROWS)] = 0

    def _chosen(self, op: ops.Route, t: int) -> NDArray[np.int32]:
        """The experts that a router's call chose, int32 [T, active experts]. The arrays are kept: they are views of the
        same few slots, which every layer asks for in every pass."""
        key = (op.routes, t, self._routed(op.layer).active)
        ids = self._ids.get(key)
        if ids is None:
            if len(self._ids) >= _KEPT_IDS:
                self._ids.clear()
            ids = self._ids[key] = self._routes(op.layer, op.routes, t).ids
        return ids

    def answer(self, call: Call) -> list[list[int]]:
        """The answer of a router's call, which is done: the experts of each row, in rising order. Of a guess the
        likeliest first. Of a call that tells which neurons fire, or are active: their places."""
        op = call.operands
        if isinstance(op, ops.Predict):
            count = neurons_of(self._spec.layers[op.layer])
            # Of bytes flatnonzero takes three times as long.
            active = self._active(op.active, call.total_rows)[:, :count] != 0
            return [np.flatnonzero(row).tolist() for row in active]
        if isinstance(op, ops.Fire):
            first = self._plan.units[call.unit].lo * GRANULE_ROWS
            rows = self._values(op.values, call.total_rows).swapaxes(0, 1).reshape(call.total_rows, -1)
            return [(first + np.flatnonzero(row)).tolist() for row in rows]
        assert isinstance(op, ops.Route)
        ids = self._chosen(op, call.total_rows)
        if op.guesses:
            routes = self._routes(op.layer, op.routes, call.total_rows)
            likeliest = np.argsort(-routes.factors, axis=1, kind="stable")
            ids = np.take_along_axis(ids, likeliest, axis=1)
        experts_by_row: list[list[int]] = ids.tolist()
        return experts_by_row

    def guess(self, call: Call) -> list[list[int]] | None:
        """What the next layer's router says to the input of this layer's FFN: the experts of each row, the likeliest
        first. `call`: the router's call of this layer, which has just been done. None where the next layer has no
        router."""
        assert isinstance(call.operands, ops.Route)
        layer, batch, layout = call.operands.layer + 1, batch_of(call), self.layout
        if f"{layer}.router" not in self._parts:
            return None
        t, routed = batch.total_rows, self._routed(layer)
        h, scratch = np.empty((t, self._spec.d_model), np.float32), self._scratch(call.operands.scratch)
        key, present, _ = norm_before(self._spec, layer)
        slots = {unit.part: layout.weights[i] for i, unit in enumerate(self._plan.units) if i in layout.weights}
        norms, router = (self._arenas.view(slots[part]) for part in (key, f"{layer}.router"))
        x = self._rows(layout.act(self._plan.main, batch.id, "x"), t)
        dense.norm_in(x, norms, self._parts[key], "ffn_in", self._spec, present, h, scratch)
        shapes = ((np.int32, (t, routed.active)), (np.float32, (t, routed.active)), (np.float32, (t,)))
        routes = experts.Routes(*(np.empty(shape, dtype) for dtype, shape in shapes))  # type: ignore[arg-type]
        experts.route(router, self._parts[f"{layer}.router"], routed, h, routes, scratch)
        likeliest = np.argsort(-routes.factors, axis=1, kind="stable")
        guessed: list[list[int]] = np.take_along_axis(routes.ids, likeliest, axis=1).tolist()
        return guessed

    def _turn(self, layer: int, batch: Batch) -> tuple[Float32, Float32] | None:
        """cos and sin for the batch's positions, float32 [T, dims / 2] each. Layers with the same rope share them."""
        frequencies = self._frequencies[layer]
        if frequencies is None:
            return None
        first = next(
            i
            for i, other in enumerate(self._spec.layers)
            if other.attention.rope == self._spec.layers[layer].attention.rope
        )
        key = (first, batch)
        if key not in self._turns:
            self._turns[key] = rope.tables(*frequencies, positions(batch))
        return self._turns[key]


def experts_of(op: ops.Experts, part: Part) -> list[tuple[int, Slot]]:
    """The numbers of a call's experts, and the slot of each one's weights."""
    expert_bytes = part.least_bytes
    return [
        (first + i, Slot(slot.arena, slot.lo + i * expert_bytes, slot.lo + (i + 1) * expert_bytes))
        for first, slot in zip(op.first_experts, op.weights, strict=True)
        for i in range(slot.nbytes // expert_bytes)
    ]
