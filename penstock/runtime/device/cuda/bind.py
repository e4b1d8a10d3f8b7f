"""Runs the calls of tasks with the GPU kernels (`kernels.gpu`): a call's slots become tensors, which its op's function
gets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.graph import ops
from penstock.graph.arenas import Layout
from penstock.graph.batch import Batch
from penstock.graph.tasks import Call, Slot, Task, batch_of
from penstock.kernels.gpu import attention, dense, experts
from penstock.kernels.gpu.cache import TensorKv
from penstock.kernels.gpu.choose import Kernels
from penstock.kernels.gpu.memory import TensorScratch, vector
from penstock.runtime.device.cuda.tables import tables_of
from penstock.spec.model import Routed
from penstock.spec.part_keys import norm_before
from penstock.spec.parts import Part
from penstock.spec.places import HOST, tier_of
from penstock.spec.plan import Plan


class TorchBinding:
    """Enqueues calls on the current stream and never waits.

    `memory`: every arena that the device's lanes touch, uint8 [arena's bytes], by name. The host's are pinned where
    that works. `pieces(arena, lo, hi)`: the ranges of lo..hi that one copy may cover, for a copy must not cross from
    one pinned piece into the next."""

    def __init__(
        self, plan: Plan, memory: dict[str, Tensor], device: torch.device, kernels: Kernels,
        pieces: Callable[[str, int, int], list[tuple[int, int]]],
    ) -> None:  # fmt: skip
        self._plan, self._memory, self._kernels, self._pieces = plan, memory, kernels, pieces
        self._layout, self._parts, self._spec = Layout(plan), plan.parts, plan.target.spec
        self._tables = tables_of(plan, device)
        # The host's disks do the loading. Units that are asked for and formats of quantised folders, which alone have
        # orders, are the CPU's. So is the cache that fresh rows are appended to.
        others = ("load", "fetch", "pick", "recall", "fire", "order", "append")
        self._predictors = {each.layer: each.part(plan.target.spec) for each in plan.predictors}
        self._ops: dict[str, Callable[[Call, Any], None]]
        self._ops = {name: getattr(self, f"_{name}") for name in ops.OPS if name not in others}
        self._views: dict[Slot, Tensor] = {}
        self._numbers: dict[int, dict[int, int]] = {}  # Task.like → batch id → the index of one call of that batch

    def close(self) -> None:
        """Lets all memory go at once, and not when Python collects this object, which its own methods refer to."""
        self._views.clear()
        self._memory.clear()
        self._ops.clear()

    def begin(self) -> None:
        """A pass starts: the one before has ended, so nothing reads the tables."""
        for tables in self._tables:
            tables.begin()

    def prepare(self, task: Task) -> None:
        """Fills the device's tables for the batches whose tables the task's calls read. These calls are found once for
        all tasks that are alike, for to look at all calls of a step takes longer than to launch it."""
        numbers = self._numbers.get(task.like) if task.like >= 0 else None
        if numbers is None:
            # Not of the other calls: they may be for some of a batch's rows (`graph.assigned`).
            numbers = {batch_of(call).id: i for i, call in enumerate(task.calls) if _reads_tables(call)}
            if task.like >= 0:
                self._numbers[task.like] = numbers
        for number, i in numbers.items():
            batch = task.calls[i].batch
            assert batch is not None
            kv = self._layout.kv
            fresh = kv.fresh(batch).pages if self._layout.delegated and not batch.continues else ()
            self._tables[number].fill(batch, kv.pages_of(batch), fresh)

    def forget(self) -> None:
        """Task ids start over. Everything that was kept by a task's id is forgotten."""
        self._numbers.clear()

    def run(self, task: Task) -> None:
        for call in task.calls:
            self.call(call)

    def call(self, call: Call) -> None:
        self._ops[call.op](call, call.operands)

    def forget_turns(self) -> None:
        for tables in self._tables:
            tables.forget_turns()

    # -- embedding and head ---------------------------------------------------------------------------

    def _gather(self, call: Call, op: ops.Gather) -> None:
        part = self._parts["embed"]
        t = call.total_rows
        ids = self._typed(op.tokens, torch.int32, (t,))
        dense.gather(self._granules(op.weights, part), part, ids, self._embedded(op.rows, t), self._kernels)

    def _embed(self, call: Call, op: ops.Embed) -> None:
        t = call.total_rows
        dense.embed(
            self._embedded(op.rows, t), self._view(op.edges), self._parts["edges"], self._spec,
            self._tables[batch_of(call).id].positions, self._rows(op.x, t), self._kernels, self._scratch(op.scratch),
        )  # fmt: skip

    def _norm(self, call: Call, op: ops.Norm) -> None:
        batch, (key, present, width) = batch_of(call), norm_before(self._spec, op.layer)
        some = _is_of_some_rows(op)
        shape = (len(batch.logits) if some else batch.total_rows, width)
        dense.norm_in(
            self._rows(op.x, batch.total_rows), self._view(op.norms), self._parts[key], op.which, self._spec, present,
            self._typed(op.h, torch.float32, shape), self._kernels, self._scratch(op.scratch),
            self._tables[batch.id].chosen if some else None,
        )  # fmt: skip

    def _head(self, call: Call, op: ops.Head) -> None:
        unit, n = self._plan.units[call.unit], len(batch_of(call).logits)
        part = self._parts[unit.part]
        dense.head(
            self._granules(op.weights, part), part, unit.lo, self._typed(op.h, torch.float32, (n, self._spec.d_embed)),
            self._spec.logit_softcap, self._typed(op.logits, torch.float32, (n, self._spec.vocab)),
            self._typed(op.best, torch.float32, (n, 2))[:, 0], self._typed(op.best, torch.int32, (n, 2))[:, 1],
            op.starts, self._kernels, self._scratch(op.scratch),
        )  # fmt: skip

    # -- layers ---------------------------------------------------------------------------------------

    def _qkv(self, call: Call, op: ops.Qkv) -> None:
        layer, batch = op.layer, batch_of(call)
        a, unit, tables = self._spec.layers[layer].attention, self._plan.units[call.unit], self._tables[batch.id]
        t, part = batch.total_rows, self._parts[unit.part]
        places = tables.fresh_rows if op.fresh and batch.continues else (tables.positions, tables.sequence)
        attention.qkv(
            self._granules(op.weights, part), part, unit.lo, a, self._spec.norm, self._view(op.norms),
            self._parts[f"{layer}.norms"], self._rows(op.h, t), tables.turn(layer), *places,
            self._typed(op.q, torch.float32, (t, a.heads, a.head_dim)), self._pool(op, op.keys, batch),
            self._pool(op, op.values, batch), self._kernels, self._scratch(op.scratch),
        )  # fmt: skip

    def _attend(self, call: Call, op: ops.Attend) -> None:
        layer, batch = op.layer, batch_of(call)
        a, unit, tables = self._spec.layers[layer].attention, self._plan.units[call.unit], self._tables[batch.id]
        shape = (batch.total_rows, a.heads, a.head_dim)
        attention.attend(
            self._typed(op.q, torch.float32, shape), self._pool(op, op.keys, batch),
            self._pool(op, op.values, batch), a, *self._plan.unit_rows(unit), tables.positions, tables.sequence,
            self._typed(op.a, torch.float32, shape), batch.bound_rows, self._kernels, self._scratch(op.scratch),
            vector(self._view(op.norms[0]), self._parts[f"{layer}.norms"].block("sinks")) if op.norms else None,
            op.value_share,
        )  # fmt: skip

    def _out(self, call: Call, op: ops.Out) -> None:
        t, part, a = call.total_rows, self._parts[f"{op.layer}.attn"], self._spec.layers[op.layer].attention
        attention.out(
            self._granules(op.weights, part), part, self._plan.units[call.unit].lo, a,
            self._typed(op.a, torch.float32, (t, a.heads, a.head_dim)), self._rows(op.partial, t), op.starts_sum,
            self._kernels, self._scratch(op.scratch),
        )  # fmt: skip

    def _ffn(self, call: Call, op: ops.Ffn) -> None:
        t, unit = call.total_rows, self._plan.units[call.unit]
        part, active = self._parts[unit.part], self._active(op.active[0], t) if op.active else None
        if active is not None:
            active = active[:, unit.lo * part.granule_rows : unit.hi * part.granule_rows]
        dense.ffn(
            self._granules(op.weights, part), part, self._spec.layers[op.layer].ffns[-1], self._rows(op.h, t),
            self._rows(op.partial, t), op.starts_sum, self._kernels, self._scratch(op.scratch), op.skips, active,
        )  # fmt: skip

    def _predict(self, call: Call, op: ops.Predict) -> None:
        t = call.total_rows
        dense.predict(
            self._view(op.weights), self._predictors[op.layer], self._rows(op.h, t), self._active(op.active, t),
            self._kernels, self._scratch(op.scratch),
        )  # fmt: skip

    def _route(self, call: Call, op: ops.Route) -> None:
        assert not op.guesses, "guesses are the host's"
        t, part = call.total_rows, self._parts[f"{op.layer}.router"]
        experts.route(
            self._view(op.weights), part, self._routed(op.layer), self._rows(op.h, t),
            self._routes(op.routes, op.layer, t), self._kernels, self._scratch(op.scratch),
        )  # fmt: skip

    def _experts(self, call: Call, op: ops.Experts) -> None:
        t, part, routed = call.total_rows, self._parts[f"{op.layer}.experts"], self._routed(op.layer)
        outputs = self._outputs(op.outputs[0], op.layer, t) if op.outputs else None
        experts.experts(
            [self._granules(slot, part) for slot in op.weights], op.first_experts, part, routed, self._rows(op.h, t),
            self._routes(op.routes, op.layer, t), self._rows(op.partial, t), outputs, op.starts_sum, self._kernels,
            self._scratch(op.scratch),
        )  # fmt: skip

    def _combine(self, call: Call, op: ops.Combine) -> None:
        t = call.total_rows
        experts.combine(
            self._routes(op.routes, op.layer, t), self._outputs(op.outputs, op.layer, t), self._rows(op.partial, t),
            op.starts_sum, self._kernels,
        )  # fmt: skip

    def _gate(self, call: Call, op: ops.Gate) -> None:
        experts.gate(self._routes(op.routes, op.layer, call.total_rows), self._rows(op.partial, call.total_rows))

    def _merge(self, call: Call, op: ops.Merge) -> None:
        t = call.total_rows
        dense.merge(
            self._view(op.norms), self._parts[f"{op.layer}.norms"], op.block, self._spec.layers[op.layer],
            self._spec.norm, self._rows(op.x, t), [self._rows(p, t) for p in op.partials], self._kernels,
            self._scratch(op.scratch), self._routes(op.routes[0], op.layer, t)[:2] if op.routes else None,
        )  # fmt: skip

    # -- movers ---------------------------------------------------------------------------------------

    def _copy(self, call: Call, op: ops.Copy) -> None:
        self.move(op.source, op.target, 0, op.source.nbytes)

    def _lift(self, call: Call, op: ops.Lift) -> None:
        self.move(op.source, op.target, 0, op.source.nbytes)

    def _kv_load(self, call: Call, op: ops.KvLoad) -> None:
        for source, target in ((op.stored_keys, op.keys), (op.stored_values, op.values)):
            for lo, hi in self._layout.kv.spans(op.layer, batch_of(call), save=False):
                self.move(source, target, lo, hi)

    def _kv_save(self, call: Call, op: ops.KvSave) -> None:
        if op.fresh:
            for lo, to, nbytes in self._layout.kv.fresh_spans(op.layer, batch_of(call)):
                for s, t in ((op.keys, op.stored_keys), (op.values, op.stored_values)):
                    target = Slot(t.arena, t.lo + to, t.lo + to + nbytes)
                    self.move(Slot(s.arena, s.lo + lo, s.lo + lo + nbytes), target, 0, nbytes)
            return
        for source, target in ((op.keys, op.stored_keys), (op.values, op.stored_values)):
            for lo, hi in self._layout.kv.spans(op.layer, batch_of(call), save=True):
                self.move(source, target, lo, hi)

    def _sync(self, call: Call, op: ops.Sync) -> None:
        """Nothing to do: a task that waits for this one has waited for all tasks before it."""

    def move(self, source: Slot, target: Slot, lo: int, hi: int) -> None:
        """Copies bytes lo..hi of one slot to the same bytes of another, in ranges that are pinned as one piece."""
        host, other = (source, target) if tier_of(source.arena) == HOST else (target, source)
        for a, b in self._pieces(host.arena, host.lo + lo, host.lo + hi):
            shift = other.lo - host.lo
            sides = {host.arena: (a, b), other.arena: (a + shift, b + shift)}
            source_bytes, target_bytes = (self._memory[s.arena][slice(*sides[s.arena])] for s in (source, target))
            target_bytes.copy_(source_bytes, non_blocking=True)

    # -- slots to tensors -----------------------------------------------------------------------------

    def _view(self, slot: Slot) -> Tensor:
        view = self._views.get(slot)
        if view is None:
            view = self._views[slot] = self._memory[slot.arena][slot.lo : slot.hi]
        return view

    def _typed(self, slot: Slot, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The first bytes of the slot as a tensor of this dtype and shape."""
        return self._view(slot)[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _active(self, slot: Slot, t: int) -> Tensor:
        """uint8 [T, neurons of the layer, in whole granules]."""
        return self._view(slot).view(t, -1)

    def _rows(self, slot: Slot, t: int) -> Tensor:
        """float32 [T, d_model]."""
        return self._typed(slot, torch.float32, (t, self._spec.d_model))

    def _outputs(self, slot: Slot, layer: int, t: int) -> Tensor:
        """float32 [T, A, d_model]."""
        return self._typed(slot, torch.float32, (t, self._routed(layer).active, self._spec.d_model))

    def _routes(self, slot: Slot, layer: int, t: int) -> experts.TensorRoutes:
        return experts.routes_of(self._view(slot), t, self._routed(layer).active)

    def _routed(self, layer: int) -> Routed:
        routed = self._spec.layers[layer].routed
        assert routed is not None, f"layer {layer} is dense"
        return routed

    def _embedded(self, slot: Slot, t: int) -> Tensor:
        """float32 [T, d_embed]."""
        return self._typed(slot, torch.float32, (t, self._spec.d_embed))

    def _scratch(self, slot: Slot) -> TensorScratch:
        return TensorScratch(self._view(slot))

    def _granules(self, slot: Slot, part: Part) -> Tensor:
        """uint8 [granules, bytes of a granule]."""
        return self._view(slot).view(-1, part.granule_bytes)

    def _pool(self, op: ops.Qkv | ops.Attend, slot: Slot, batch: Batch) -> TensorKv:
        """The pages of a slot of `Layout.kv`, or of fresh rows."""
        a, kv, tables = self._spec.layers[op.layer].attention, self._layout.kv, self._tables[batch.id]
        fmt, page_tokens, pages = kv.home(op.layer, batch).format, self._plan.page_tokens, tables.pages
        if op.fresh:
            page_tokens, pages = kv.fresh(batch).page_tokens, tables.fresh_pages
        blocks = self._view(slot).view(-1, a.kv_heads, page_tokens * fmt.kv_bytes(a.head_dim))
        return TensorKv(blocks, page_tokens, a.head_dim, fmt, pages)


def _reads_tables(call: Call) -> bool:
    """Whether a call reads any table of its batch. Of the norms, that before the head reads which rows it wants."""
    op = call.operands
    return isinstance(op, ops.Embed | ops.Qkv | ops.Attend) or (isinstance(op, ops.Norm) and _is_of_some_rows(op))


def _is_of_some_rows(op: ops.Norm) -> bool:
    return op.layer is None and not op.every
