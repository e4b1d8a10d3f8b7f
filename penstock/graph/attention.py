"""Emits attention blocks: projections, attention where KV is, and moves of KV that lives elsewhere. A part of the
lowering.

KV that does not live where attention runs comes through a window that holds one layer or two. The pages before a
batch's rows are loaded one attention ahead. The rows are saved after it, with what lies between them in their pages. A
task waits for a save only if it needs the window or these pages again (PIPO §3.1.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import InternalError
from penstock.graph import ops
from penstock.graph.batch import Batch
from penstock.graph.calls import Calls
from penstock.graph.streams import Streams
from penstock.graph.tasks import Pass, Slot, Task
from penstock.spec.places import Executor, lane_between


class Attention:
    """The calls of attention blocks. The lowering says which unit, layer and executor come next."""

    def __init__(self, calls: Calls, streams: Streams) -> None:
        self._calls, self._streams = calls, streams
        self._plan, self._layout = calls.plan, calls.layout

    def unit(self, layer: int, u: int, executor: Executor, weights: Slot, batch: Batch, first: bool) -> None:
        """A unit's share of a layer, all of it on one executor. `weights`: the unit's slot. `first`: the unit's output
        is the first addend of the batch's sum.

        Raises InternalError if a plan has a layer's attention on another executor than its projections."""
        calls, layout, unit = self._calls, self._layout, self._plan.units[u]
        part, a = layout.parts[unit.part], self._plan.target.spec.layers[layer].attention
        t, (first_head, end_head) = batch.total_rows, self._plan.unit_rows(unit)
        home = layout.kv.home(layer, batch)
        if home.attend != executor:
            raise InternalError(f"layer {layer}: attention on {home.attend} but its projections on {executor}")
        q = layout.act(executor, batch.id, "q", 4 * t * a.heads * a.head_dim)
        out = layout.act(executor, batch.id, "a", 4 * t * a.heads * a.head_dim)
        keys, values = layout.kv.slots(layer, batch)
        h, partial = calls.rows(executor, batch, "h"), calls.rows(executor, batch, "partial")
        scratch, fmt = calls.scratch(executor), part.kinds(ops.QKV_BLOCKS)
        cost = calls.matrix_cost(u, ops.QKV_BLOCKS, t)
        norms = layout.norms(layer, executor)
        qkv = ops.Qkv(weights, norms, h, q, keys=keys, values=values, scratch=scratch, layer=layer)
        calls.add(executor, qkv, u, batch, fmt, cost)
        cost = ops.attend_cost(a, end_head - first_head, batch, home.format.kv_bytes(a.head_dim))
        sinks = (norms,) if a.sinks else ()
        attend = ops.Attend(q, keys, values, a=out, scratch=scratch, layer=layer, norms=sinks)
        calls.add(executor, attend, u, batch, home.format.kind, cost)
        calls.order(executor, batch, layer, "o", out)
        cost = calls.matrix_cost(u, ops.OUT_BLOCKS, t)
        out_op = ops.Out(weights, out, partial, scratch, layer=layer, starts_sum=first)
        calls.add(executor, out_op, u, batch, part.kinds(ops.OUT_BLOCKS), cost)

    def delegated(self, p: Pass, layer: int, executor: Executor) -> Iterator[Task]:
        """Projections on `executor`, attention where KV is (FlexGen's computation delegation). q and the new K and V
        cross the link, and the output of attention comes back. Rows that begin a prompt have nothing before them in the
        cache. For such rows `executor` attends itself, and K and V are saved meanwhile."""
        calls, layout, key = self._calls, self._layout, f"{layer}.attn"
        units, a = calls.units[key], self._plan.target.spec.layers[layer].attention
        weights = {u: self._streams.take(u, p.stream) for u in units}
        scratch, fmt = calls.scratch(executor), layout.parts[key].kinds(ops.QKV_BLOCKS)
        for batch in p.batches:
            t, home = batch.total_rows, layout.kv.home(layer, batch)
            row_bytes, kv_bytes_each = 4 * t * a.heads * a.head_dim, home.format.kv_bytes(a.head_dim)
            q, h = layout.act(executor, batch.id, "q", row_bytes), calls.rows(executor, batch, "h")
            k, v = (layout.act(executor, batch.id, name, t * a.kv_heads * kv_bytes_each) for name in ("k", "v"))
            norms = layout.norms(layer, executor)
            for u in units:
                qkv = ops.Qkv(weights[u], norms, h, q, keys=k, values=v, scratch=scratch, layer=layer)
                calls.add(executor, qkv, u, batch, fmt, calls.matrix_cost(u, ops.QKV_BLOCKS, t))
            attender, keys, values, cache = executor, k, v, layout.kv.slots(layer, batch)
            if batch.continues:
                attender, (keys, values) = home.attend, cache
                q = calls.copy(batch, "q", row_bytes, executor, attender)
            lane = lane_between(executor, home.attend)
            calls.move_kv(lane, ops.KvSave(k, v, *cache, layer=layer, ranges=2), batch, k.nbytes + v.nbytes)
            for u in units:
                lo, hi = self._plan.unit_rows(self._plan.units[u])
                cost = ops.attend_cost(a, hi - lo, batch, kv_bytes_each)
                out = layout.act(attender, batch.id, "a", row_bytes)
                sinks = (layout.norms(layer, attender),) if a.sinks else ()
                attend = ops.Attend(q, keys, values, out, calls.scratch(attender), layer=layer, norms=sinks)
                calls.add(attender, attend, u, batch, home.format.kind, cost)
        for batch in p.batches:
            if batch.continues:
                nbytes = 4 * batch.total_rows * a.heads * a.head_dim
                calls.copy(batch, "a", nbytes, layout.kv.home(layer, batch).attend, executor)
        for u in units:
            for batch in p.batches:
                outputs = layout.act(executor, batch.id, "a", 4 * batch.total_rows * a.heads * a.head_dim)
                partial = calls.rows(executor, batch, "partial")
                product = ops.Out(weights[u], outputs, partial, scratch, layer=layer, starts_sum=u == units[0])
                cost = calls.matrix_cost(u, ops.OUT_BLOCKS, batch.total_rows)
                calls.add(executor, product, u, batch, layout.parts[key].kinds(ops.OUT_BLOCKS), cost)
            self._streams.release(u, p.stream)
            yield from calls.emit.closed()

    def load_kv(self, p: Pass, layer: int) -> None:
        """Emits loads of the pages before each batch's rows into the layer's window."""
        if layer >= len(self._plan.target.spec.layers):
            return
        for batch in p.batches:
            home = self._layout.kv.home(layer, batch)
            if home.home == home.attend or not batch.continues:
                continue
            lane = lane_between(home.home, home.attend)
            nbytes, ranges = self._moved(layer, batch, save=False)
            stored, window = self._layout.kv.stored(layer, batch), self._layout.kv.slots(layer, batch)
            self._calls.move_kv(lane, ops.KvLoad(*stored, *window, layer=layer, ranges=ranges), batch, nbytes)

    def save_kv(self, p: Pass, layer: int) -> None:
        """Emits saves of each batch's rows to their home."""
        for batch in p.batches:
            home = self._layout.kv.home(layer, batch)
            if home.home == home.attend:
                continue
            lane = lane_between(home.attend, home.home)
            nbytes, ranges = self._moved(layer, batch, save=True)
            stored, window = self._layout.kv.stored(layer, batch), self._layout.kv.slots(layer, batch)
            self._calls.move_kv(lane, ops.KvSave(*window, *stored, layer=layer, ranges=ranges), batch, nbytes)

    def _moved(self, layer: int, batch: Batch, save: bool) -> tuple[int, int]:
        """(bytes, count) of the byte ranges of `KvLayout.spans`, K and V together."""
        nbytes, ranges = self._layout.kv.moved(layer, batch, save)
        return 2 * nbytes, 2 * ranges
