"""The KV cache in numpy: stores rows of keys or values in pages and loads them, in any format (spec/format.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.reference.matrix import Bytes, Float32, Scratch, narrow, storage_dtype, widen_plain
from penstock.spec.format import Format

_MOST_HALF = np.float32(65504)


class KvPool(NamedTuple):
    """K or V of some sequences in one layer. `blocks` uint8 [pages, K, page_tokens · kv_bytes]: a page has a block for
    each KV head."""

    blocks: Bytes
    page_tokens: int
    head_dim: int
    format: Format

    def store(self, page: int, head: int, slot: int, rows: Float32) -> None:
        """Writes rows float32 [n, E] to the slots of a block from `slot` on."""
        block, n = self.blocks[page, head], len(rows)
        codes = self._rows(block)
        if not self.format.is_quantised:
            codes.view(storage_dtype(self.format))[slot : slot + n] = narrow(rows, self.format)
            return
        scales, minimums = self._factors(block)
        wide = np.zeros((n, codes.shape[1] * 8 // self.format.bits), np.uint8)
        for g, columns in enumerate(self._groups()):
            group = _quantise(rows[:, columns], 2**self.format.bits - 1)
            wide[:, columns], scales[g, slot : slot + n], minimums[g, slot : slot + n] = group
        if self.format.kind == "int4":
            halves = wide.reshape(n, -1, 2, 16)
            wide = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(n, -1)
        codes[slot : slot + n] = wide

    def append(self, fresh: KvPool, pages: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Puts T rows, which are the one page of `fresh`, as they are: row i into slot `slots[i]` of page `pages[i]`,
        int64 [T] each."""
        heads, p = self.blocks.shape[1], self.page_tokens
        cut = self.format.kv_codes_bytes(self.head_dim)
        sides = [(pool.blocks[:, :, : pool.page_tokens * cut], pool.blocks[:, :, pool.page_tokens * cut :])
                 for pool in (self, fresh)]  # fmt: skip
        (codes, factors), (fresh_codes, fresh_factors) = sides
        rows = fresh_codes[0].reshape(heads, -1, cut).swapaxes(0, 1)  # [T, K, bytes of a row's codes]
        codes.reshape(-1, heads, p, cut)[pages, :, slots] = rows
        if self.format.is_quantised:  # float16 scales and minimums of each group
            columns = fresh_factors[0].reshape(heads, -1, fresh.page_tokens, 2)  # [K, 2 G, T, 2]
            factors.reshape(-1, heads, columns.shape[1], p, 2)[pages, :, :, slots] = np.moveaxis(columns, 2, 0)

    def load(self, page: int, head: int, n: int, scratch: Scratch) -> Float32:
        """The first n slots of a block as float32 [n, E]: in scratch, or a view of a float32 cache."""
        block = self.blocks[page, head]
        codes = self._rows(block)[:n]
        if not self.format.is_quantised:
            return widen_plain(codes.view(storage_dtype(self.format)), self.format, scratch)
        scales, minimums = self._factors(block)
        wide = scratch.take((n, codes.shape[1] * 8 // self.format.bits))
        if self.format.kind == "int8":
            np.copyto(wide, codes)
        else:
            nibbles = scratch.take(codes.shape, np.uint8)
            halves = wide.reshape(n, -1, 2, 16)
            np.bitwise_and(codes, 15, out=nibbles)
            np.copyto(halves[:, :, 0], nibbles.reshape(n, -1, 16))
            np.right_shift(codes, 4, out=nibbles)
            np.copyto(halves[:, :, 1], nibbles.reshape(n, -1, 16))
        for g, columns in enumerate(self._groups()):
            wide[:, columns] *= scales[g, :n, None].astype(np.float32)
            wide[:, columns] += minimums[g, :n, None].astype(np.float32)
        return wide[:, : self.head_dim]

    def _rows(self, block: Bytes) -> Bytes:
        """The rows of a block as uint8 [P, bytes of a row's numbers or codes], a view."""
        row_bytes = self.format.kv_codes_bytes(self.head_dim)
        return block[: self.page_tokens * row_bytes].reshape(self.page_tokens, row_bytes)

    def _factors(self, block: Bytes) -> tuple[NDArray[Any], NDArray[Any]]:
        """Scales and minimums of a block, each float16 [G, P], views."""
        after = self.page_tokens * self.format.kv_codes_bytes(self.head_dim)
        both = block[after:].view(np.float16).reshape(2, -1, self.page_tokens)
        return both[0], both[1]

    def _groups(self) -> list[slice]:
        group, e = self.format.group, self.head_dim
        return [slice(lo, min(lo + group, e)) for lo in range(0, e, group)]


def _quantise(values: Float32, levels: int) -> tuple[Bytes, NDArray[Any], NDArray[Any]]:
    """values float32 [n, columns of a group] → codes uint8 [n, columns], scales and minimums float16 [n]. The rule is
    that of weights (store/quantize.py), after values are clipped to ±65504. A row with a NaN becomes NaN as a whole."""
    spoilt = np.isnan(values.min(axis=1))
    kept = np.clip(np.where(spoilt[:, None], np.float32(0), values), -_MOST_HALF, _MOST_HALF)
    minimum = _half_beyond(kept.min(axis=1), down=True)
    offset = minimum.astype(np.float32)
    scale = _half_beyond((kept.max(axis=1) - offset) / np.float32(levels), down=False)
    wide = scale.astype(np.float32)
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
    codes = ((kept - offset[:, None]) * inverse[:, None] + np.float32(0.5)).astype(np.uint8)
    minimum[spoilt] = np.nan
    return codes, scale, minimum


def _half_beyond(values: Float32, down: bool) -> NDArray[Any]:
    """float32 [n] → float16 [n]: the nearest one that is not above (`down`) or not below the value."""
    near = values.astype(np.float16)
    back = near.astype(np.float32)
    (wrong,) = np.nonzero(back > values if down else back < values)
    near[wrong] = np.nextafter(near[wrong], np.float16(-np.inf if down else np.inf))
    return near
