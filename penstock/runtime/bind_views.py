"""The slots of calls as numpy arrays: rows, granules, routes and pools of KV, without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.graph import ops
from penstock.graph.batch import Batch
from penstock.graph.tasks import Slot
from penstock.kernels.reference import experts
from penstock.kernels.reference.cache import KvPool
from penstock.kernels.reference.matrix import Scratch
from penstock.runtime.arena import Arenas
from penstock.runtime.bind_moves import Moves
from penstock.runtime.kv_file import KvFile
from penstock.runtime.movers import DiskReader
from penstock.spec.model import Routed
from penstock.spec.parts import GRANULE_ROWS, Part
from penstock.spec.plan import Plan

Float32 = NDArray[np.float32]


class Views(Moves):
    """Arrays that share the memory of slots. `t`: rows of the batch. Arguments as for `Binding`."""

    def __init__(
        self, plan: Plan, arenas: Arenas, reader: DiskReader | None, poisoned: bool, kv_file: KvFile | None
    ) -> None:
        super().__init__(plan, arenas, reader, poisoned, kv_file)
        self._spec = plan.target.spec

    def _values(self, slot: Slot, t: int) -> Float32:
        """The activations of neurons, float32 [granules, T, neurons of a granule]."""
        return self._arenas.view(slot).view(np.float32).reshape(-1, t, GRANULE_ROWS)

    def _rows(self, slot: Slot, t: int) -> Float32:
        """float32 [T, d_model]."""
        return self._arenas.array(slot, np.float32, (t, self._spec.d_model))

    def _routed(self, layer: int) -> Routed:
        routed = self._spec.layers[layer].routed
        assert routed is not None, f"layer {layer} is dense"
        return routed

    def _routes(self, layer: int, slot: Slot, t: int) -> experts.Routes:
        active, view = self._routed(layer).active, self._arenas.view(slot)
        ids, factors, shared = np.split(view[: 4 * t * (2 * active + 1)], [4 * t * active, 8 * t * active])
        return experts.Routes(
            ids.view(np.int32).reshape(t, active), factors.view(np.float32).reshape(t, active), shared.view(np.float32)
        )

    def _outputs(self, layer: int, slot: Slot, t: int) -> Float32:
        """The outputs of each row's experts, float32 [T, active experts, d_model]."""
        shape = (t, self._routed(layer).active, self._spec.d_model)
        return self._arenas.array(slot, np.float32, shape)

    def _active(self, slot: Slot, t: int) -> NDArray[np.uint8]:
        """uint8 [T, neurons in whole granules]."""
        return self._arenas.view(slot).reshape(t, -1)

    def _embedded(self, slot: Slot) -> Float32:
        """float32 [T, d_embed]."""
        return self._arenas.view(slot).view(np.float32).reshape(-1, self._spec.d_embed)

    def _tokens(self, slot: Slot) -> NDArray[np.int32]:
        """int32 [T]."""
        return self._arenas.view(slot).view(np.int32)

    def _scratch(self, slot: Slot) -> Scratch:
        return Scratch(self._arenas.view(slot))

    def _granules(self, slot: Slot, part: Part) -> NDArray[np.uint8]:
        """uint8 [granules, bytes of a granule]."""
        return self._arenas.view(slot).reshape(-1, part.granule_bytes)

    def _cache(
        self, op: ops.Qkv | ops.Attend, batch: Batch
    ) -> tuple[Batch, Sequence[NDArray[np.int64]], tuple[KvPool, KvPool]]:
        """(the batch, and the pages of its sequences, as the pools of keys and values have them; these pools)."""
        fresh = self.layout.kv.fresh(batch) if op.fresh else None
        page_tokens = self._plan.page_tokens if fresh is None else fresh.page_tokens
        keys, values = (self._pool(slot, op.layer, batch, page_tokens) for slot in (op.keys, op.values))
        if fresh is None:
            return batch, self._tables(batch), (keys, values)
        return fresh.batch, [np.array(pages, np.int64) for pages in fresh.pages], (keys, values)

    def _pool(self, slot: Slot, layer: int, batch: Batch, page_tokens: int = 0) -> KvPool:
        """The pages of a slot of `Layout.kv`, or of fresh rows. `page_tokens`: of a page, if not the plan's."""
        a, fmt = self._spec.layers[layer].attention, self.layout.kv.home(layer, batch).format
        page_tokens = page_tokens or self._plan.page_tokens
        blocks = self._arenas.view(slot).reshape(-1, a.kv_heads, page_tokens * fmt.kv_bytes(a.head_dim))
        return KvPool(blocks, page_tokens, a.head_dim, fmt)

    def _tables(self, batch: Batch) -> Sequence[NDArray[np.int64]]:
        """The pages of each sequence, int64 [pages] each, numbered as in `_pool`."""
        return [np.array(pages, np.int64) for pages in self.layout.kv.pages_of(batch)]
