"""The ops of attention in numpy float32: qkv, attend and out.

Shapes: T rows of the batch, D d_model, H heads, K KV heads, G = H / K, E head_dim. The cache of a layer is two pools,
`keys` and `values`. `tables[i]`, int64 [pages], lists the pages of the batch's sequence i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.graph.batch import Batch
from penstock.kernels import rope
from penstock.kernels.reference.cache import KvPool
from penstock.kernels.reference.dense import normalise
from penstock.kernels.reference.matrix import Bytes, Float32, Scratch, multiply, vector
from penstock.spec.model import Attention, NormSpec
from penstock.spec.parts import Part

Tables = Sequence[NDArray[np.int64]]


def qkv(
    weights: Bytes, part: Part, lo: int, a: Attention, norm: NormSpec, norms: Bytes, norms_part: Part, h: Float32,
    turn: tuple[Float32, Float32] | None, batch: Batch, tables: Tables, q: Float32, keys: KvPool,
    values: KvPool, scratch: Scratch,
) -> None:  # fmt: skip
    """Projects h float32 [T, D] for the granules from `lo` on, adds biases, norms and rotates q and k, and stores k and
    v in the cache. Writes q float32 [T, H, E].

    weights uint8 [granules, granule_bytes]: a granule is one KV head, or all of them. `turn`: cos and sin float32
    [T, dims / 2], or None.
    """
    t, g, e = h.shape[0], a.heads_per_kv, a.head_dim
    start, heads = scratch.mark(), part.granule_rows
    qk_norm = NormSpec("rms", norm.eps)
    for head, granule in zip(range(lo * heads, a.kv_heads, heads), weights, strict=False):
        scratch.rewind(start)
        projected = {}
        for name, width in (("q", heads * g * e), ("k", heads * e), ("v", heads * e)):
            out = scratch.take((t, width))
            multiply(h, granule, part.block(name), out, scratch)
            if part.has(name + "_bias"):
                out += vector(granule, part.block(name + "_bias"))
            projected[name] = out.reshape(t, width // e, e)
        if a.qk_norm:
            for name in ("q", "k"):
                weight = vector(norms, norms_part.block(name + "_norm"))
                normed = projected[name].reshape(t, -1) if a.norms_all_heads else projected[name]
                normalise(normed, qk_norm, weight, None, normed)
        if turn is not None:
            rope.rotate(projected["q"], *turn)
            rope.rotate(projected["k"], *turn)
        q[:, head * g : (head + heads) * g] = projected["q"]
        for i in range(heads):
            _store(keys, projected["k"][:, i], head + i, batch, tables)
            _store(values, projected["v"][:, i], head + i, batch, tables)
    scratch.rewind(start)


def _store(pool: KvPool, rows: Float32, head: int, batch: Batch, tables: Tables) -> None:
    """Writes rows float32 [T, E] of one KV head to their positions in the pool, page by page."""
    page_tokens, done = pool.page_tokens, 0
    for start, count, table in zip(batch.start, batch.rows, tables, strict=True):
        position = start
        while position < start + count:
            page, slot = divmod(position, page_tokens)
            n = min(page_tokens - slot, start + count - position)
            pool.store(int(table[page]), head, slot, rows[done : done + n])
            position, done = position + n, done + n


def append(fresh: KvPool, pool: KvPool, batch: Batch, tables: Tables) -> None:
    """Puts the rows of a batch, which are the one page of `fresh`, at their places in the cache."""
    spans = zip(batch.start, batch.rows, tables, strict=True)
    places = [(table, np.arange(start, start + rows)) for start, rows, table in spans]
    pages = np.concatenate([table[positions // pool.page_tokens] for table, positions in places])
    pool.append(fresh, pages, np.concatenate([positions for _, positions in places]) % pool.page_tokens)


def attend(
    q: Float32, keys: KvPool, values: KvPool, a: Attention, lo: int, hi: int, batch: Batch, tables: Tables,
    out: Float32, scratch: Scratch, sinks: Float32 | None = None, value_share: float = 1.0,
) -> None:  # fmt: skip
    """out float32 [T, H, E] = softmax(scale · q kᵀ, causal, windowed) v for the KV heads lo…hi; q float32 [T, H, E].
    `sinks` float32 [H]: a score of each head that its softmax counts beside those of the positions, with no value.
    `value_share`: below 1, of the n positions that a row sees those ceil(value_share · n) alone count whose scores are
    the best.

    It goes page by page with a running maximum (log-sum-exp merge), so the memory for scores does not grow with the
    context.
    """
    g, start_mark, done = a.heads_per_kv, scratch.mark(), 0
    for start, count, table in zip(batch.start, batch.rows, tables, strict=True):
        rows = slice(done, done + count)
        done += count
        for head in range(lo, hi):
            scratch.rewind(start_mark)
            query = scratch.take((g, count, a.head_dim))
            query[...] = q[rows, head * g : (head + 1) * g].transpose(1, 0, 2)
            sink = None if sinks is None else sinks[head * g : (head + 1) * g]
            if value_share == 1:
                result = _attend_head(query, keys, values, a, head, start, table, sink, None, scratch)
                out[rows, head * g : (head + 1) * g] = result.transpose(1, 0, 2)
                continue
            mark = scratch.mark()
            for row in range(count):
                scratch.rewind(mark)
                one = query[:, row : row + 1]
                chosen = _chosen(one, keys, a, head, start + row, table, value_share, scratch)
                result = _attend_head(one, keys, values, a, head, start + row, table, sink, chosen, scratch)
                out[rows.start + row, head * g : (head + 1) * g] = result[:, 0]
    scratch.rewind(start_mark)


def _attend_head(
    query: Float32, keys: KvPool, values: KvPool, a: Attention, head: int, start: int, table: NDArray[np.int64],
    sink: Float32 | None, chosen: NDArray[np.bool_] | None, scratch: Scratch,
) -> Float32:  # fmt: skip
    """Attention of one KV head for its G query heads: query float32 [G, count, E] → [G, count, E]. `start`: position of
    the first row. `sink` float32 [G]. `chosen` bool [G, positions], of one row: the positions that count; None: all."""
    g, count, e = query.shape
    page_tokens = keys.page_tokens
    flat = np.ascontiguousarray(query).reshape(g * count, e)
    total = scratch.take((g * count, e))
    total[...] = 0
    best = scratch.take((g * count, 1))
    best[...] = -np.inf if sink is None else np.repeat(sink, count)[:, None]
    weight = scratch.take((g * count, 1))
    weight[...] = 0 if sink is None else 1  # the sink was seen first, and its value is 0
    positions = np.arange(start, start + count)[:, None]  # of the queries
    first = max(0, start - a.window + 1) // page_tokens if a.window else 0
    mark = scratch.mark()
    for page in range(first, (start + count - 1) // page_tokens + 1):
        scratch.rewind(mark)
        begin = page * page_tokens
        n = min(page_tokens, start + count - begin)
        key = keys.load(int(table[page]), head, n, scratch)
        scores = _scores(flat, key, a, scratch)
        seen = np.arange(begin, begin + n)[None, :]
        hidden = seen > positions
        if a.window:
            hidden |= seen <= positions - a.window
        if hidden.any():
            scores.reshape(g, count, n)[:, hidden] = -np.inf
        if chosen is not None:
            scores[~chosen[:, begin : begin + n]] = -np.inf
        peak = np.maximum(best, scores.max(axis=1, keepdims=True))
        # A row that has seen nothing yet has peak -inf. Base 0 gives it exp(-inf - 0) = 0, and no NaN.
        base = np.where(np.isfinite(peak), peak, np.float32(0))
        scores -= base
        np.exp(scores, out=scores)
        shrink = np.exp(best - base)
        weight *= shrink
        weight += scores.sum(axis=1, keepdims=True)
        total *= shrink
        value = values.load(int(table[page]), head, n, scratch)
        product = scratch.take((g * count, e))
        np.matmul(scores, value, out=product)
        total += product
        best[...] = peak
    total /= weight
    return total.reshape(g, count, e)


def _scores(flat: Float32, key: Float32, a: Attention, scratch: Scratch) -> Float32:
    """softcap(scale · flat keyᵀ), float32 [queries, n]; flat float32 [queries, E], key float32 [n, E]."""
    scores = scratch.take((len(flat), len(key)))
    np.matmul(flat, key.T, out=scores)
    scores *= np.float32(a.scale)
    if a.softcap:
        scores[...] = np.float32(a.softcap) * np.tanh(scores / np.float32(a.softcap))
    return scores


def _chosen(
    query: Float32, keys: KvPool, a: Attention, head: int, position: int, table: NDArray[np.int64], share: float,
    scratch: Scratch,
) -> NDArray[np.bool_]:  # fmt: skip
    """The positions that count for a row's queries float32 [G, 1, E]: bool [G, position + 1]. Of equal scores those of
    earlier positions count. A query that meets a NaN has all of them, and a result of NaN."""
    page_tokens, flat = keys.page_tokens, np.ascontiguousarray(query[:, 0])
    first, end = max(0, position - a.window + 1) if a.window else 0, position + 1
    scores, mark = scratch.take((len(flat), end)), scratch.mark()
    for page in range(first // page_tokens, position // page_tokens + 1):
        scratch.rewind(mark)
        begin = page * page_tokens
        n = min(page_tokens, end - begin)
        scores[:, begin : begin + n] = _scores(flat, keys.load(int(table[page]), head, n, scratch), a, scratch)
    wanted = max(1, math.ceil(share * (end - first)))
    kept = np.zeros(scores.shape, bool)
    for query_scores, of_query in zip(scores[:, first:], kept[:, first:], strict=True):
        of_query[np.argsort(-query_scores, kind="stable")[:wanted]] = True
        of_query |= np.isnan(query_scores).any()
    scratch.rewind(mark)
    return kept


def out(
    weights: Bytes, part: Part, lo: int, a: Attention, heads_out: Float32, partial: Float32, first: bool,
    scratch: Scratch,
) -> None:  # fmt: skip
    """partial float32 [T, D] (+)= heads_out float32 [T, H, E] · o, for the heads of the granules from `lo` on, granule
    by granule."""
    if first:
        partial[...] = 0
    g, t = a.heads_per_kv * part.granule_rows, heads_out.shape[0]
    start = scratch.mark()
    for i, granule in enumerate(weights):
        scratch.rewind(start)
        x = scratch.take((t, g * a.head_dim))
        x[...] = heads_out[:, (lo + i) * g : (lo + i + 1) * g].reshape(t, -1)
        multiply(x, granule, part.block("o"), partial, scratch, add=True)
    scratch.rewind(start)
