"""Attention of one sequence over a cache of chance, by the reference and by native kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock import _native
from penstock.graph import scratch_native
from penstock.graph.batch import Batch
from penstock.kernels import cpu
from penstock.kernels.reference import attention
from penstock.kernels.reference.cache import KvPool
from penstock.kernels.reference.matrix import Scratch
from penstock.spec.format import parse_format
from penstock.spec.model import Attention

PAGE, HEAD_DIM = 64, 16


class Case:
    """A sequence of `start` + `rows` positions whose last `rows` attend, with keys and values of chance."""

    def __init__(self, a: Attention, start: int, rows: int, seed: int, kv: str = "float32") -> None:
        rng, self.a = np.random.default_rng(seed), a
        self.batch = Batch(0, (0,), (start,), (rows,), ())
        seen = start + rows
        pages, fmt = -(-seen // PAGE), parse_format(kv)
        self.table = rng.permutation(pages).astype(np.int64)
        self.q = rng.standard_normal((rows, a.heads, a.head_dim)).astype(np.float32)
        self.k, self.v = (rng.standard_normal((seen, a.kv_heads, a.head_dim)).astype(np.float32) for _ in range(2))
        self.pools = [KvPool(np.zeros((pages, a.kv_heads, PAGE * fmt.kv_bytes(a.head_dim)), np.uint8), PAGE, a.head_dim,
                             fmt) for _ in range(2)]  # fmt: skip
        self.store(self.k, self.v)

    def store(self, k: np.ndarray, v: np.ndarray) -> None:
        """Makes these the keys and values, float32 [positions, K, E]."""
        self.k, self.v = k, v
        for pool, numbers in zip(self.pools, (k, v), strict=True):
            for first in range(0, len(k), PAGE):
                for head in range(self.a.kv_heads):
                    pool.store(int(self.table[first // PAGE]), head, 0, numbers[first : first + PAGE, head])

    def attend(self, share: float, sinks: np.ndarray | None = None) -> np.ndarray:
        out, a = np.zeros_like(self.q), self.a
        room = Scratch(np.empty(1 << 22, np.uint8))
        attention.attend(self.q, *self.pools, a, 0, a.kv_heads, self.batch, [self.table], out, room, sinks, share)
        return out

    def naive(self, share: float) -> np.ndarray:
        """Of each row and head the softmax over its best positions, by numpy in float64."""
        out, a, start = np.zeros_like(self.q), self.a, self.batch.start[0]
        for row in range(len(self.q)):
            end = start + row + 1
            first = max(0, end - a.window) if a.window else 0
            for head in range(a.heads):
                keys = self.k[first:end, head // a.heads_per_kv].astype(float)
                scores = keys @ self.q[row, head] * a.scale
                best = np.argsort(-scores, kind="stable")[: max(1, int(np.ceil(share * (end - first))))]
                weights = np.exp(scores[best] - scores[best].max())
                values = self.v[first:end, head // a.heads_per_kv][best]
                out[row, head] = weights @ values / weights.sum()
        return out

    def natively(
        self, isa: str, share: float, threads: int = 1, first: int = 0, sinks: np.ndarray | None = None,
        exact: bool = True, place: Callable[[np.ndarray], np.ndarray] = np.ascontiguousarray,
    ) -> np.ndarray:  # fmt: skip
        """Of the rows from `first` on alone. float32 [rows - first, H, E]. `place`: puts operands where they are to
        lie."""
        a, start, fmt = self.a, self.batch.start[0], self.pools[0].format
        q = place(self.q[first:])
        out, seen = place(np.zeros_like(q)), start + len(self.q)
        sequence, pages = place(np.array([0, start + first, len(q)], np.int32)), place(self.table.astype(np.int32))
        room = place(np.empty(scratch_native.attend_bytes(a, fmt, len(q), seen if share < 1 else 0), np.uint8))
        blocks = [place(pool.blocks) for pool in self.pools]
        sinks = None if sinks is None else place(sinks)
        keys, values = (int(block.ctypes.data) for block in blocks)
        _native.Compute(isa, threads).attend(
            attention=cpu.attention_shape(a, 0, a.kv_heads), sinks=0 if sinks is None else int(sinks.ctypes.data),
            sequences=int(sequence.ctypes.data), sequence_count=1, pages=int(pages.ctypes.data),
            q=int(q.ctypes.data), cache=cpu.cache_shape(a, PAGE, fmt), keys=keys, values=values,
            a=int(out.ctypes.data), exact=exact, scratch=int(room.ctypes.data),
            scratch_bytes=room.nbytes, value_share=share,
        )  # fmt: skip
        return out
