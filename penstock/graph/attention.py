"""Emits attention blocks: projections, attention where KV is, and moves of KV that lives elsewhere. A part of the
lowering.

KV that does not live where attention runs comes through a window that holds one layer or two. The pages before a
batch's rows are loaded one attention ahead. The rows are saved after it, with what lies between them in their pages. A
task waits for a save only if it needs the window or these pages again (PIPO §3.1.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from penstock.errors import InternalError
from penstock.graph import ops
from penstock.graph.arenas import FRESH_TURNS
from penstock.graph.batch import Batch
from penstock.graph.calls import Calls
from penstock.graph.streams import Streams
from penstock.graph.tasks import Pass, Slot, Task
from penstock.spec.places import Executor, lane_between


class AttentionBlocks:
    """The calls of attention blocks. The lowering says which unit, layer and executor come next."""

    def __init__(self, calls: Calls, streams: Streams) -> None:
        self._calls, self._streams = calls, streams
        self._plan, self._layout = calls.plan, calls.layout

    def unit(
        self, layer: int, u: int, executor: Executor, weights: Slot, batch: Batch, first: bool,
        pages_used: int | None = None,
    ) -> None:  # fmt: skip
        """A unit's share of a layer, all of it on one executor. `weights`: the unit's slot. `first`: the unit's output
        is the first addend of the batch's sum. `pages_used`: as in a Pass.

        Raises InternalError if a plan has a layer's attention on another executor than its projections."""
        calls, layout, unit = self._calls, self._layout, self._plan.units[u]
        part, a = layout.parts[unit.part], self._plan.target.spec.layers[layer].attention
        t, (first_head, end_head) = batch.total_rows, self._plan.unit_rows(unit)
        home = layout.kv.home(layer, batch)
        if home.attend != executor:
            raise InternalError(f"layer {layer}: attention on {home.attend} but its projections on {executor}")
        q, out = (self._heads(executor, batch, layer, name) for name in ("q", "a"))
        keys, values = layout.kv.slots(layer, batch, pages_used)
        h, partial = calls.rows(executor, batch, "h"), calls.rows(executor, batch, "partial")
        scratch, fmt = calls.scratch(executor), part.kinds(ops.QKV_BLOCKS)
        cost = calls.matrix_cost(u, ops.QKV_BLOCKS, t)
        norms = layout.norms(layer, executor)
        qkv = ops.Qkv(weights, norms, h, q, keys=keys, values=values, scratch=scratch, layer=layer)
        calls.add(executor, qkv, u, batch, fmt, cost)
        share = self._plan.value_share
        cost = ops.attend_cost(a, end_head - first_head, batch, home.format.kv_bytes(a.head_dim), share)
        sinks = (norms,) if a.sinks else ()
        attend = ops.Attend(
            q, keys, values, a=out, scratch=scratch, layer=layer, norms=sinks, value_share=share
        )  # fmt: skip
        calls.add(executor, attend, u, batch, home.format.kind, cost)
        calls.order(executor, batch, layer, "o", out)
        cost = calls.matrix_cost(u, ops.OUT_BLOCKS, t)
        out_op = ops.Out(weights, out, partial, scratch, layer=layer, starts_sum=first)
        calls.add(executor, out_op, u, batch, part.kinds(ops.OUT_BLOCKS), cost)

    def delegated(self, p: Pass, layer: int, executor: Executor) -> Iterator[Task]:
        """Projections on `executor`, attention where KV is (FlexGen's computation delegation). q and the fresh K and V
        cross the link, and the output of attention comes back. Rows that begin a prompt have nothing before them in the
        cache. For such rows `executor` attends itself, and K and V are saved meanwhile."""
        calls, layout, key = self._calls, self._layout, f"{layer}.attn"
        units = calls.units[key]
        weights = {u: self._streams.take(u, p.stream) for u in units}
        scratch, part = calls.scratch(executor), layout.parts[key]
        for batch in p.batches:
            h, q = calls.rows(executor, batch, "h"), self._heads(executor, batch, layer, "q")
            k, v = (self._fresh(executor, batch, layer, name) for name in ("k", "v"))
            for u in units:
                norms = layout.norms(layer, executor)
                qkv = ops.Qkv(weights[u], norms, h, q, keys=k, values=v, scratch=scratch, layer=layer, fresh=True)
                cost = calls.matrix_cost(u, ops.QKV_BLOCKS, batch.total_rows)
                calls.add(executor, qkv, u, batch, part.kinds(ops.QKV_BLOCKS), cost)
            if batch.continues:
                self._attend_at_home(layer, executor, batch)
            else:
                self._attend_fresh(layer, executor, batch, k, v)
        for batch in p.batches:
            out = self._heads(executor, batch, layer, "a")
            if batch.continues:
                calls.copy(batch, "a", out.nbytes, layout.kv.home(layer, batch).attend, executor)
            calls.order(executor, batch, layer, "o", out)
        for u in units:
            for batch in p.batches:
                out, partial = self._heads(executor, batch, layer, "a"), calls.rows(executor, batch, "partial")
                product = ops.Out(weights[u], out, partial, scratch, layer=layer, starts_sum=u == units[0])
                cost = calls.matrix_cost(u, ops.OUT_BLOCKS, batch.total_rows)
                calls.add(executor, product, u, batch, part.kinds(ops.OUT_BLOCKS), cost)
            self._streams.release(u, p.stream)
            yield from calls.emit.closed()

    def _attend_at_home(self, layer: int, executor: Executor, batch: Batch) -> None:
        """q and the fresh rows cross to where KV is. There the rows join the cache, and attention runs."""
        calls, home, cache = self._calls, self._layout.kv.home(layer, batch), self._layout.kv.slots(layer, batch)
        q = calls.copy(batch, "q", self._heads(executor, batch, layer, "q").nbytes, executor, home.attend)
        nbytes = self._layout.kv.fresh_bytes(layer, batch)
        k, v = (calls.copy(batch, name, nbytes, executor, home.attend, of=_turn(batch)) for name in ("k", "v"))
        append = ops.Append(k, v, *cache, layer=layer)
        calls.add(home.attend, append, -1, batch, home.format.kind, (2 * nbytes, 0))
        self._attend(layer, home.attend, batch, q, cache, fresh=False)

    def _attend_fresh(self, layer: int, executor: Executor, batch: Batch, k: Slot, v: Slot) -> None:
        """Attention to rows that begin prompts, where they were projected. Meanwhile they are saved to the cache."""
        home, cache = self._layout.kv.home(layer, batch), self._layout.kv.slots(layer, batch)
        spans = self._layout.kv.fresh_spans(layer, batch)
        save = ops.KvSave(k, v, *cache, layer=layer, ranges=2 * len(spans), fresh=True)
        nbytes = 2 * sum(size for _, _, size in spans)
        self._calls.move_kv(lane_between(executor, home.attend), save, batch, nbytes)
        self._attend(layer, executor, batch, self._heads(executor, batch, layer, "q"), (k, v), fresh=True)

    def _attend(
        self, layer: int, executor: Executor, batch: Batch, q: Slot, kv: tuple[Slot, Slot], fresh: bool
    ) -> None:  # fmt: skip
        """Attention of a layer whose projections' units say which heads a call has."""
        calls, layout, a = self._calls, self._layout, self._plan.target.spec.layers[layer].attention
        home, out = layout.kv.home(layer, batch), self._heads(executor, batch, layer, "a")
        sinks = (layout.norms(layer, executor),) if a.sinks else ()
        for u in calls.units[f"{layer}.attn"]:
            lo, hi = self._plan.unit_rows(self._plan.units[u])
            share, scratch = self._plan.value_share, calls.scratch(executor)
            cost = ops.attend_cost(a, hi - lo, batch, home.format.kv_bytes(a.head_dim), share)
            attend = ops.Attend(
                q, *kv, out, scratch, layer=layer, norms=sinks, fresh=fresh, value_share=share
            )  # fmt: skip
            calls.add(executor, attend, u, batch, home.format.kind, cost)

    def _heads(self, executor: Executor, batch: Batch, layer: int, name: str) -> Slot:
        """The slot of `q` or `a`, float32 [T, H, E], of a batch."""
        a = self._plan.target.spec.layers[layer].attention
        return self._layout.act(executor, batch.id, name, 4 * batch.total_rows * a.heads * a.head_dim)

    def _fresh(self, executor: Executor, batch: Batch, layer: int, name: str) -> Slot:
        """The slot of a batch's fresh `k` or `v`."""
        return self._layout.act(executor, _turn(batch), name, self._layout.kv.fresh_bytes(layer, batch))

    def load_kv(self, p: Pass, layer: int) -> None:
        """Emits loads of the pages before each batch's rows into the layer's window."""
        if layer >= len(self._plan.target.spec.layers):
            return
        for batch in p.batches:
            home = self._layout.kv.home(layer, batch)
            if home.home == home.attend or not batch.continues:
                continue
            nbytes, ranges = self._moved(layer, batch, save=False)
            for (source, stored), (target, window) in pairwise(self._layout.kv.way(layer, batch)):
                load = ops.KvLoad(*stored, *window, layer=layer, ranges=ranges)
                self._calls.move_kv(lane_between(source, target), load, batch, nbytes)

    def save_kv(self, p: Pass, layer: int) -> None:
        """Emits saves of each batch's rows to their home."""
        for batch in p.batches:
            home = self._layout.kv.home(layer, batch)
            if home.home == home.attend:
                continue
            nbytes, ranges = self._moved(layer, batch, save=True)
            for (source, window), (target, stored) in pairwise(reversed(self._layout.kv.way(layer, batch))):
                save = ops.KvSave(*window, *stored, layer=layer, ranges=ranges)
                self._calls.move_kv(lane_between(source, target), save, batch, nbytes)

    def _moved(self, layer: int, batch: Batch, save: bool) -> tuple[int, int]:
        """(bytes, count) of the byte ranges of `KvLayout.spans`, K and V together."""
        nbytes, ranges = self._layout.kv.moved(layer, batch, save)
        return 2 * nbytes, 2 * ranges


def _turn(batch: Batch) -> int:
    """Whose buffers of fresh K and V a batch takes, by the ids of batches."""
    return batch.id % FRESH_TURNS
