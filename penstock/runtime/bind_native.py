"""Binds the heavy ops to the native kernels; the light ones stay with numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock import _native
from penstock.graph.tasks import Batch, Call
from penstock.kernels import cpu
from penstock.runtime.arena import Arenas
from penstock.runtime.bind import Binding, _batch
from penstock.runtime.movers import DiskReader
from penstock.spec.plan import Plan


@dataclass(frozen=True)
class Native:
    """Which kernels, on how many threads; `exact`: no int8 activations. `reason`: why these."""

    compute: _native.Compute
    exact: bool
    reason: str


def native(isa: str | None, threads: int, exact: bool) -> Native:
    """The family of that name, or the best one here. Raises ValueError for one that is not here."""
    chosen, reason = cpu.best_isa() if isa is None else (isa, f"{isa} kernels: asked for")
    return Native(_native.Compute(chosen, threads), exact, reason)


class NativeBinding(Binding):
    """qkv, attend, out, ffn and head in native code, straight from where the weights lie."""

    def __init__(
        self, plan: Plan, arenas: Arenas, reader: DiskReader | None, kernels: Native, poisoned: bool = False
    ) -> None:
        super().__init__(plan, arenas, reader, poisoned)
        self._compute = kernels.compute
        self._exact = kernels.exact or not cpu.rounds_activations(plan.target.weights)
        layers = self._spec.layers
        self._ffn_shapes = [cpu.ffn_shape(self._parts[f"{i}.ffn"], layer) for i, layer in enumerate(layers)]
        self._qkv_shapes = [
            cpu.qkv_shape(self._parts[f"{i}.attn"], layer.attention, self._spec.norm) for i, layer in enumerate(layers)
        ]
        self._o = [cpu.matrix(self._parts[f"{i}.attn"].block("o")) for i in range(len(layers))]
        self._vocab = cpu.matrix(self._parts["embed"].block("rows"))
        self._heads: dict[int, _native.AttentionShape] = {}  # by unit
        self._caches: dict[tuple[int, str], _native.CacheShape] = {}
        self._sequences: dict[Batch, NDArray[np.int32]] = {}

    def begin(self) -> None:
        super().begin()
        self._sequences.clear()

    def _head(self, call: Call) -> None:
        weights, h, logits, scratch = call.slots
        unit, n = self._plan.units[call.unit], len(_batch(call).logits)
        part, spec = self._parts[unit.part], self._spec
        first = unit.lo * part.granule_rows
        at = self._arenas.address
        self._compute.project(
            at(weights), unit.hi - unit.lo, part.granule_bytes, self._vocab, at(h), spec.d_embed, n,
            at(logits) + 4 * first, spec.vocab, spec.vocab - first, self._exact, at(scratch), scratch.nbytes,
        )  # fmt: skip
        if spec.logit_softcap:
            found = self._arenas.array(logits, np.float32, (n, spec.vocab))
            found = found[:, first : first + part.rows_of(unit.lo, unit.hi)]
            found[...] = np.float32(spec.logit_softcap) * np.tanh(found / np.float32(spec.logit_softcap))

    def _qkv(self, call: Call) -> None:
        weights, norms, h, q, keys, values, scratch = call.slots
        layer, batch = int(call.args[0]), _batch(call)
        unit, a = self._plan.units[call.unit], self._spec.layers[layer].attention
        at, norms_part = self._arenas.address, self._parts[f"{layer}.norms"]
        q_norm, k_norm = (at(norms) + norms_part.block(n).offset if a.qk_norm else 0 for n in ("q_norm", "k_norm"))
        turn = self._turn(layer, batch)
        cos, sin = (int(table.ctypes.data) for table in turn) if turn is not None else (0, 0)
        sequences = self._sequence_table(batch)
        self._compute.qkv(
            at(weights), unit.hi - unit.lo, self._parts[unit.part].granule_bytes, self._qkv_shapes[layer],
            self._attention_of(call.unit, layer), at(h), batch.total_rows, q_norm, k_norm, cos, sin,
            int(sequences.ctypes.data), len(sequences), self._cache(layer, batch), at(keys), at(values), at(q),
            self._exact, at(scratch), scratch.nbytes,
        )  # fmt: skip

    def _attend(self, call: Call) -> None:
        q, keys, values, out, scratch = call.slots
        layer, batch = int(call.args[0]), _batch(call)
        at, sequences = self._arenas.address, self._sequence_table(batch)
        self._compute.attend(
            self._attention_of(call.unit, layer), int(sequences.ctypes.data), len(sequences), self._cache(layer, batch),
            at(keys), at(values), at(q), at(out), at(scratch), scratch.nbytes,
        )  # fmt: skip

    def _out(self, call: Call) -> None:
        weights, a_slot, partial, scratch = call.slots
        layer, t = int(call.args[0]), _batch(call).total_rows
        a, unit = self._spec.layers[layer].attention, self._plan.units[call.unit]
        at, width = self._arenas.address, a.heads * a.head_dim
        first_column = unit.lo * a.heads_per_kv * a.head_dim
        self._compute.accumulate(
            at(weights), unit.hi - unit.lo, self._parts[unit.part].granule_bytes, self._o[layer],
            at(a_slot) + 4 * first_column, width, t, at(partial), bool(call.args[1]), self._exact,
            at(scratch), scratch.nbytes,
        )  # fmt: skip

    def _ffn(self, call: Call) -> None:
        weights, h, partial, scratch = call.slots
        layer, t = int(call.args[0]), _batch(call).total_rows
        unit, at = self._plan.units[call.unit], self._arenas.address
        self._compute.ffn(
            at(weights), unit.hi - unit.lo, self._parts[unit.part].granule_bytes, self._ffn_shapes[layer], at(h), t,
            at(partial), bool(call.args[1]), self._exact, at(scratch), scratch.nbytes,
        )  # fmt: skip

    def _attention_of(self, u: int, layer: int) -> _native.AttentionShape:
        if u not in self._heads:
            unit = self._plan.units[u]
            self._heads[u] = cpu.attention_shape(self._spec.layers[layer].attention, unit.lo, unit.hi)
        return self._heads[u]

    def _cache(self, layer: int, batch: Batch) -> _native.CacheShape:
        fmt = self._layout.kv_home(layer, batch).format
        key = (layer, fmt.kind)
        if key not in self._caches:
            a = self._spec.layers[layer].attention
            self._caches[key] = cpu.cache_shape(a, self._plan.page_tokens, fmt)
        return self._caches[key]

    def _sequence_table(self, batch: Batch) -> NDArray[np.int32]:
        """int32 [sequences, 3]: first page (counted as in `_pool`), start, rows."""
        if batch not in self._sequences:
            per_seq, first = self._layout.pages_per_seq, min(batch.seqs)
            rows = [
                ((s - first) * per_seq, start, n)
                for s, start, n in zip(batch.seqs, batch.start, batch.rows, strict=True)
            ]
            self._sequences[batch] = np.array(rows, np.int32)
        return self._sequences[batch]
