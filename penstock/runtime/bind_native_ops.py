"""Makes the operands of native kernels: addresses of a call's slots, and shapes of its layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock import _native
from penstock.graph import ops
from penstock.graph.batch import Batch
from penstock.graph.records import Records
from penstock.graph.tasks import Call, batch_of
from penstock.kernels import cpu
from penstock.runtime.arena import Arenas
from penstock.runtime.batch_tables import BatchTables
from penstock.runtime.bind import Binding, experts_of
from penstock.runtime.kv_file import KvFile
from penstock.runtime.movers import DiskReader
from penstock.runtime.native_kernels import Native
from penstock.spec.format import Format
from penstock.spec.part_keys import head_key, norm_before
from penstock.spec.parts import FFNS, MIXED
from penstock.spec.plan import Plan

# An op called on a Compute runs at once; called on a Program it is recorded.
Target = _native.Compute | _native.Program


class NativeOps(Binding):
    """Records and runs the ops of layers in native code, on weights where they lie. Its arguments are those of
    `Binding`."""

    def __init__(
        self, plan: Plan, arenas: Arenas, reader: DiskReader | None, kernels: Native, poisoned: bool = False,
        kv_file: KvFile | None = None,
    ) -> None:  # fmt: skip
        super().__init__(plan, arenas, reader, poisoned, kv_file)
        self._compute = kernels.compute
        self._exact = {
            (key, op): kernels.exact or cpu.all_exact(part, blocks)
            for key, part in self._parts.items() if part.kind in MIXED for op, blocks in ops.PRODUCTS.items()
        }  # fmt: skip
        self._all_exact = kernels.exact  # of predictors, of which a mask is all that comes, and of attention
        spec, layers = self._spec, self._spec.layers
        self._ffn_shapes = {
            part.key: cpu.ffn_shape(part, layers[part.layer].ffns[0 if part.kind == "experts" else -1])
            for part in self._parts.values()
            if part.kind in FFNS
        }
        # Of parts with units whose activations ask: the shape of what stays in RAM, and of the pages with records.
        asked = {
            unit.part: layers[self._parts[unit.part].layer].ffns[-1]
            for unit in plan.units
            if unit.asked and not self._parts[unit.part].by_records
        }
        self._asked_shapes = {
            key: (cpu.kept_shape(self._parts[key], ffn), cpu.picked_shape(self._parts[key], ffn))
            for key, ffn in asked.items()
        }
        self._qkv_shapes = [
            cpu.qkv_shape(self._parts[f"{i}.attn"], layer.attention, spec.norm) for i, layer in enumerate(layers)
        ]
        self._o = [cpu.matrix(self._parts[f"{i}.attn"].block("o")) for i in range(len(layers))]
        self._vocab = {key: cpu.matrix(self._parts[key].block("rows")) for key in {"embed", head_key(spec)}}
        self._heads: dict[int, _native.AttentionShape] = {}  # by the unit's number
        self._caches: dict[tuple[int, Format], _native.CacheShape] = {}  # by layer and format
        self._fresh_tables: dict[Batch, BatchTables] = {}  # of batches' fresh rows, for this pass
        self._fired = np.zeros((0, 0), np.uint8)  # who fires in the layer at hand, if somebody asks
        edges = self._parts["edges"]
        natively: dict[str, Callable[[Target, Call, Any, BatchTables], None]] = {
            "gather": self._gather_on, "norm": self._norm_on, "order": self._order_on, "qkv": self._qkv_on,
            "attend": self._attend_on, "out": self._out_on, "ffn": self._ffn_on, "fire": self._fire_on,
            "route": self._route_on, "experts": self._experts_on, "combine": self._combine_on, "gate": self._gate_on,
            "predict": self._predict_on, "merge": self._merge_on, "head": self._head_on,
        }  # fmt: skip
        if not edges.has("project_in") and not spec.position_rows:
            natively["embed"] = self._embed_on
        self._natively = natively
        self._check_scratch()
        self._projects_out = edges.has("project_out")

    def _check_scratch(self) -> None:
        """Asserts that the plan's scratch is as large as the kernels want. With less scratch they would run slower, and
        nobody would notice."""
        plan, spec, layers_of, rows = (
            self._plan,
            self._spec,
            self._spec.layers,
            max(self._plan.chunk_rows, self._plan.batch_seqs),
        )
        need = max(
            _native.project_scratch(self._vocab[head_key(spec)], min(rows, plan.logits_rows)),
            _native.merge_scratch(rows, spec.d_model),
        )
        alike = {
            (id(layer), *(block.format for block in self._parts[f"{i}.attn"].blocks)): i
            for i, layer in enumerate(spec.layers)
        }
        for layer in alike.values():
            attn = self._parts[f"{layer}.attn"]
            heads = cpu.attention_shape(spec.layers[layer].attention, 0, attn.rows)
            home = next(home for home in plan.kv if home.layers[0] <= layer < home.layers[1])
            cache = cpu.cache_shape(spec.layers[layer].attention, plan.page_tokens, home.format)
            need = max(
                need, _native.qkv_scratch(self._qkv_shapes[layer], heads, rows),
                _native.out_scratch(self._o[layer], attn.granules, rows),
                _native.attend_scratch(heads, cache, rows, plan.chosen_from),
            )  # fmt: skip
        for key, shape in self._ffn_shapes.items():
            part, routed = self._parts[key], layers_of[self._parts[key].layer].routed
            if part.kind == "experts" and routed is not None:
                need = max(
                    need, _native.experts_scratch(shape, part.expert_granules, routed.active, rows),
                    _native.route_scratch(self._router_of(part.layer, 0), rows),
                )  # fmt: skip
            else:
                need = max(need, _native.ffn_scratch(shape, part.granules, rows))
        for part in self._predictors.values():
            hidden, neurons = (cpu.matrix(part.block(name)) for name in ("hidden", "neurons"))
            need = max(need, _native.predict_scratch(hidden, neurons, rows))
        for executor, slot in self.layout.scratch.items():
            assert slot.nbytes >= need, f"scratch of {executor}: {slot.nbytes} bytes, where kernels want {need}"

    def begin(self) -> None:
        super().begin()
        self._fresh_tables.clear()

    def new_program(self) -> _native.Program:
        return _native.Program(self._compute)

    def record(self, program: _native.Program, call: Call, tables: BatchTables | None) -> None:
        """Appends a native call to a program. `tables`: those of the call's batch; None for calls of experts."""
        self._natively[call.op](program, call, call.operands, tables)  # type: ignore[arg-type]

    def new_tables(self, batch: Batch) -> BatchTables:
        """Tables of this batch alone, or of others of its shape, filled with it."""
        pages = self.layout.kv.pages_per_seq
        sizes = batch.total_rows, len(batch.logits), len(batch.seqs), pages
        tables = BatchTables(*sizes, self._frequencies)
        self.move(tables, batch)
        return tables

    def move(self, tables: BatchTables, batch: Batch) -> None:
        """Fills tables with a batch's positions, pages and numbers of rows."""
        tables.move(batch, self.layout.kv.pages_of(batch))

    def is_native(self, call: Call) -> bool:
        """Whether a native kernel does the call."""
        if self._projects_out and isinstance(call.operands, ops.Norm) and call.operands.layer is None:
            return False
        return call.op in self._natively

    @property
    def by_batches(self) -> bool:
        """As `Binding.by_batches`. False if numpy does some calls, since it takes the numbers of rows from the calls.
        False too if somebody is told of calls, and so of their rows."""
        return "embed" in self._natively and not self._projects_out and not self.hears

    # -- ops: operands as addresses (`at` gives the address of a slot) -----------------------------------

    def _gather_on(self, on: Target, call: Call, op: ops.Gather, tables: BatchTables) -> None:
        part, at = self._parts["embed"], self._arenas.address
        on.gather(
            weights=at(op.weights), count=op.weights.nbytes // part.granule_bytes, stride=part.granule_bytes,
            matrix=self._vocab["embed"], tokens=at(op.tokens), t=call.total_rows, rows=at(op.rows),
        )  # fmt: skip

    def _embed_on(self, on: Target, call: Call, op: ops.Embed, tables: BatchTables) -> None:
        at = self._arenas.address
        on.embed(
            rows=at(op.rows), embed_scale=self._spec.embed_scale, t=call.total_rows, d=self._spec.d_model,
            x=at(op.x),
        )  # fmt: skip

    def _norm_on(self, on: Target, call: Call, op: ops.Norm, tables: BatchTables) -> None:
        batch, at, some = batch_of(call), self._arenas.address, op.layer is None and not op.every
        key, present, _ = norm_before(self._spec, op.layer)
        part = self._parts[key]
        norm = cpu.norm(self._spec.norm if present else None, part, op.which, at(op.norms))
        chosen, n = (tables.chosen_address, len(batch.logits)) if some else (0, batch.total_rows)
        on.norm(norm=norm, x=at(op.x), chosen=chosen, t=n, d=self._spec.d_model, h=at(op.h))

    def _order_on(self, on: Target, call: Call, op: ops.Order, tables: BatchTables) -> None:
        at, t = self._arenas.address, call.total_rows
        on.order(
            order=at(op.norms) + self._parts[f"{op.layer}.norms"].block(f"{op.which}_order").offset, rows=at(op.rows),
            t=t, d=op.rows.nbytes // (4 * t), scratch=at(op.scratch), scratch_bytes=op.scratch.nbytes,
        )  # fmt: skip

    def _head_on(self, on: Target, call: Call, op: ops.Head, tables: BatchTables) -> None:
        unit, n = self._plan.units[call.unit], len(batch_of(call).logits)
        part, spec = self._parts[unit.part], self._spec
        first, at = unit.lo * part.granule_rows, self._arenas.address
        on.head(
            weights=at(op.weights), count=unit.hi - unit.lo, stride=part.granule_bytes, matrix=self._vocab[part.key],
            h=at(op.h), h_stride=spec.d_embed, t=n, logits=at(op.logits) + 4 * first, out_stride=spec.vocab,
            out_cols=spec.vocab - first, softcap=spec.logit_softcap, first_token=first, best=at(op.best),
            starts=op.starts, exact=self._exact[part.key, "head"], scratch=at(op.scratch),
            scratch_bytes=op.scratch.nbytes,
        )  # fmt: skip

    def _qkv_on(self, on: Target, call: Call, op: ops.Qkv, tables: BatchTables) -> None:
        layer, batch = op.layer, batch_of(call)
        unit, a = self._plan.units[call.unit], self._spec.layers[layer].attention
        at, norms_part = self._arenas.address, self._parts[f"{layer}.norms"]
        q_norm, k_norm = (at(op.norms) + norms_part.block(n).offset if a.qk_norm else 0 for n in ("q_norm", "k_norm"))
        cos, sin = tables.turn_addresses(layer)
        stored, pages = self._stored(op, batch, tables)
        on.qkv(
            weights=at(op.weights), count=unit.hi - unit.lo, stride=self._parts[unit.part].granule_bytes,
            shape=self._qkv_shapes[layer], attention=self._attention_of(call.unit, layer), h=at(op.h),
            t=batch.total_rows, q_norm=q_norm, k_norm=k_norm, cos=cos, sin=sin, sequences=pages.sequences_address,
            sequence_count=len(stored.seqs), pages=pages.pages_address, q=at(op.q), cache=self._shape(op, batch),
            keys=at(op.keys), values=at(op.values), exact=self._exact[unit.part, "qkv"], scratch=at(op.scratch),
            scratch_bytes=op.scratch.nbytes,
        )  # fmt: skip

    def _attend_on(self, on: Target, call: Call, op: ops.Attend, tables: BatchTables) -> None:
        layer, batch, at = op.layer, batch_of(call), self._arenas.address
        sinks = at(op.norms[0]) + self._parts[f"{layer}.norms"].block("sinks").offset if op.norms else 0
        stored, pages = self._stored(op, batch, tables)
        on.attend(
            attention=self._attention_of(call.unit, layer), sinks=sinks, sequences=pages.sequences_address,
            sequence_count=len(stored.seqs), pages=pages.pages_address, q=at(op.q), cache=self._shape(op, batch),
            keys=at(op.keys), values=at(op.values), a=at(op.a), exact=self._all_exact, scratch=at(op.scratch),
            scratch_bytes=op.scratch.nbytes, value_share=op.value_share,
        )  # fmt: skip

    def _out_on(self, on: Target, call: Call, op: ops.Out, tables: BatchTables) -> None:
        a, unit = self._spec.layers[op.layer].attention, self._plan.units[call.unit]
        at, width = self._arenas.address, a.heads * a.head_dim
        first_column = self._plan.unit_rows(unit)[0] * a.heads_per_kv * a.head_dim
        on.out(
            weights=at(op.weights), count=unit.hi - unit.lo, stride=self._parts[unit.part].granule_bytes,
            matrix=self._o[op.layer], a=at(op.a) + 4 * first_column, a_stride=width, t=call.total_rows,
            partial=at(op.partial), starts_sum=op.starts_sum, exact=self._exact[unit.part, "out"],
            scratch=at(op.scratch), scratch_bytes=op.scratch.nbytes,
        )  # fmt: skip

    def _ffn_on(self, on: Target, call: Call, op: ops.Ffn, tables: BatchTables) -> None:
        unit, at, t = self._plan.units[call.unit], self._arenas.address, call.total_rows
        active, columns = (at(op.active[0]), op.active[0].nbytes // t) if op.active else (0, 0)
        part = self._parts[unit.part]
        stride, shape = part.granule_bytes, self._ffn_shapes[unit.part]
        values = biases = bias_stride = 0
        if op.weights == self.layout.asked.get(call.unit):
            records = Records.of(part)
            stride = records.page_bytes
            if op.values:
                values, shape = at(op.values[0]), self._asked_shapes[unit.part][1]
            elif records.kept_bytes:  # of a granule the last pages, so that biases lie where the shape says
                biases, bias_stride = at(self.layout.kept[call.unit]) - records.tail, records.kept_bytes
        on.ffn(
            weights=at(op.weights), count=unit.hi - unit.lo, stride=stride, shape=shape, h=at(op.h),
            t=t, partial=at(op.partial), pending=at(op.pending), granule=unit.lo,
            starts_sum=op.starts_sum, continues_four=op.continues_four, leaves_four=op.leaves_four, skips=op.skips,
            fired=self._fired_at(call), fired_stride=self._fired.shape[1], exact=self._exact[unit.part, "ffn"],
            scratch=at(op.scratch), scratch_bytes=op.scratch.nbytes, active=active, active_stride=columns,
            level=op.level, values=values, biases=biases, bias_stride=bias_stride,
        )  # fmt: skip

    def _fire_on(self, on: Target, call: Call, op: ops.Fire, tables: BatchTables) -> None:
        unit, at = self._plan.units[call.unit], self._arenas.address
        part = self._parts[unit.part]
        on.fire(
            weights=at(op.weights), count=unit.hi - unit.lo, stride=Records.of(part).kept_bytes,
            shape=self._asked_shapes[unit.part][0], h=at(op.h), t=call.total_rows,
            values=at(op.values), exact=self._exact[unit.part, "ffn"], scratch=at(op.scratch),
            scratch_bytes=op.scratch.nbytes,
        )  # fmt: skip

    def _predict_on(self, on: Target, call: Call, op: ops.Predict, tables: BatchTables) -> None:
        part, at = self._predictors[op.layer], self._arenas.address
        on.predict(
            weights=at(op.weights), hidden=cpu.matrix(part.block("hidden")), neurons=cpu.matrix(part.block("neurons")),
            hidden_bias=part.block("hidden_bias").offset, neurons_bias=part.block("neurons_bias").offset, h=at(op.h),
            t=call.total_rows, active=at(op.active), exact=self._all_exact, scratch=at(op.scratch),
            scratch_bytes=op.scratch.nbytes,
        )  # fmt: skip

    def _fired_at(self, call: Call) -> int:
        """The address where an FFN's call notes which neurons fire; 0 if nobody asks."""
        if self.on_fired is None:
            return 0
        unit, t = self._plan.units[call.unit], call.total_rows
        part = self._parts[unit.part]
        if unit.lo == 0:
            self._fired = np.zeros((t, part.granules * part.granule_rows), np.uint8)
        return self._fired.ctypes.data

    def _tell_fired(self, call: Call) -> None:
        """Tells `on_fired` which neurons of a layer fired, if this call has computed the layer's last FFN unit."""
        if self.on_fired is None or not isinstance(call.operands, ops.Ffn):
            return
        unit = self._plan.units[call.unit]
        part = self._parts[unit.part]
        if part.kind == "ffn" and unit.hi == part.granules:
            h = self._rows(call.operands.h, call.total_rows)
            self.on_fired(part.layer, h, self._fired[:, : part.rows])

    def _route_on(self, on: Target, call: Call, op: ops.Route, tables: BatchTables) -> None:
        at = self._arenas.address
        on.route(
            weights=at(op.weights), shape=self._router_of(op.layer, at(op.weights)), h=at(op.h),
            t=call.total_rows, routes=at(op.routes), scratch=at(op.scratch), scratch_bytes=op.scratch.nbytes,
        )  # fmt: skip

    def _router_of(self, layer: int, address: int) -> _native.RouterShape:
        return cpu.router_shape(self._parts[f"{layer}.router"], self._routed(layer), address)

    def _experts_on(self, on: Target, call: Call, op: ops.Experts, tables: BatchTables | None) -> None:
        at, part = self._arenas.address, self._parts[f"{op.layer}.experts"]
        placed = experts_of(op, part)
        on.experts(
            weights=[at(slot) for _, slot in placed], ids=[expert for expert, _ in placed], stride=part.granule_bytes,
            shape=self._ffn_shapes[part.key], per_expert=part.expert_granules, active=self._routed(op.layer).active,
            h=at(op.h), t=call.total_rows, routes=at(op.routes), partial=at(op.partial),
            outputs=at(op.outputs[0]) if op.outputs else 0, starts_sum=op.starts_sum,
            exact=self._exact[part.key, "ffn"], scratch=at(op.scratch), scratch_bytes=op.scratch.nbytes,
        )  # fmt: skip

    def _combine_on(self, on: Target, call: Call, op: ops.Combine, tables: BatchTables) -> None:
        at, active = self._arenas.address, self._routed(op.layer).active
        on.combine(
            routes=at(op.routes), outputs=at(op.outputs), active=active, t=call.total_rows,
            d=self._spec.d_model, partial=at(op.partial), starts_sum=op.starts_sum,
        )  # fmt: skip

    def _gate_on(self, on: Target, call: Call, op: ops.Gate, tables: BatchTables) -> None:
        at, active = self._arenas.address, self._routed(op.layer).active
        on.gate(
            routes=at(op.routes),
            active=active,
            t=call.total_rows,
            d=self._spec.d_model,
            partial=at(op.partial),
        )

    def _merge_on(self, on: Target, call: Call, op: ops.Merge, tables: BatchTables) -> None:
        at, norm = self._arenas.address, self._spec.norm
        layer, part = self._spec.layers[op.layer], self._parts[f"{op.layer}.norms"]
        out = cpu.norm(norm if layer.norm_out else None, part, f"{op.block}_out", at(op.norms))
        after = cpu.norm(norm if layer.norm_after else None, part, f"{op.block}_after", at(op.norms))
        bias = "o_bias" if op.block == "attn" else "down_bias"
        bias_at = at(op.norms) + part.block(bias).offset if part.has(bias) else 0
        expert_bias, routes, active = 0, 0, 0
        if op.routes:
            expert_bias = at(op.norms) + part.block("experts_down_bias").offset
            routes, active = at(op.routes[0]), self._routed(op.layer).active
        on.merge(
            out=out, after=after, bias=bias_at, x=at(op.x), partials=[at(p) for p in op.partials],
            t=call.total_rows, d=self._spec.d_model, scratch=at(op.scratch), scratch_bytes=op.scratch.nbytes,
            expert_bias=expert_bias, routes=routes, active=active,
        )  # fmt: skip

    def _attention_of(self, u: int, layer: int) -> _native.AttentionShape:
        if u not in self._heads:
            unit = self._plan.units[u]
            self._heads[u] = cpu.attention_shape(self._spec.layers[layer].attention, *self._plan.unit_rows(unit))
        return self._heads[u]

    def _stored(
        self, op: ops.Qkv | ops.Attend, batch: Batch, tables: BatchTables
    ) -> tuple[Batch, BatchTables]:  # fmt: skip
        """The batch as the pools of keys and values have it, and tables of its sequences and pages there. `tables`:
        those of the batch."""
        if not op.fresh:
            return batch, tables
        fresh = self.layout.kv.fresh(batch)
        if batch not in self._fresh_tables:
            sizes = (fresh.batch.total_rows, 0, len(fresh.batch.seqs), max(map(len, fresh.pages)))
            self._fresh_tables[batch] = BatchTables(*sizes, ())
            self._fresh_tables[batch].move(fresh.batch._replace(logits=()), fresh.pages)
        return fresh.batch, self._fresh_tables[batch]

    def _shape(self, op: ops.Qkv | ops.Attend, batch: Batch) -> _native.CacheShape:
        fmt, a = self.layout.kv.home(op.layer, batch).format, self._spec.layers[op.layer].attention
        if op.fresh:
            return cpu.cache_shape(a, self.layout.kv.fresh(batch).page_tokens, fmt)
        key = (op.layer, fmt)
        if key not in self._caches:
            self._caches[key] = cpu.cache_shape(a, self._plan.page_tokens, fmt)
        return self._caches[key]
