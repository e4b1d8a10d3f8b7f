"""Products with packed weights on a device. Few rows are multiplied straight from the tiles, many rows by widened
pieces.

`spread` gives one result per granule (q, k, v, the head). `add_up` sums over granules (o, down). `hidden` is the first
half of an FFN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.graph.scratch_gpu import pieces, sum_splits
from penstock.kernels.gpu.choose import Kernels
from penstock.kernels.gpu.memory import TensorScratch, vectors
from penstock.kernels.gpu.widen import columns_of, typed, widen, word_bytes
from penstock.spec.format import TILE_ROWS, tiles
from penstock.spec.model import SWIGLU_LIMIT, FfnSpec
from penstock.spec.parts import Block, Part

# Rows that a program multiplies with the numbers it has unpacked. Each takes four sums per thread. With four rows a
# thread needs 128 registers. With eight it needs 200, and few programs would share a processor.
ROWS_AT_ONCE = 4
# A program ends with a sum over its warps, so few warps with many chunks each are best: one row through an 8B layer's
# down takes an H200 22 µs by 512 programs of 4 warps, and 30 µs by 256 of 16 (docs/LOG.md has all sizes).
# _WARPS: beyond so many in all, more of them gain nothing. _LEAST_WARPS, _MOST_WARPS: of a program. _CHUNKS: that each
# warp of a program of more than the least has, where each processor of a large card has a program (_PROGRAMS).
_WARPS, _LEAST_WARPS, _MOST_WARPS, _CHUNKS, _PROGRAMS = 3072, 4, 16, 16, 128
# Chunks that a warp asks for before it waits, 16 bytes a thread each, for one row. For more rows there are fewer, since
# the compiler takes half a minute over so many.
_UNROLL = 4


def _warps(programs: int, chunks: int) -> int:
    """Warps of a program: a power of 2, never more than the program has chunks."""
    warps, least_chunks = 1, _CHUNKS if programs >= _PROGRAMS else 1
    while warps < _LEAST_WARPS and 2 * warps <= chunks:
        warps *= 2
    while 2 * warps <= _MOST_WARPS and 2 * warps * programs <= _WARPS and 2 * warps * least_chunks <= chunks:
        warps *= 2
    return warps


def few_rows(kernels: Kernels, rows: int) -> bool:
    """Whether so many rows are multiplied straight from packed weights."""
    return kernels.triton and rows <= kernels.few_rows


def exponents() -> tuple[int, int]:
    from penstock.kernels.gpu import tile_kernels

    return tile_kernels.EXPONENT4, tile_kernels.EXPONENT8


def pow2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def tile_words(block: Block) -> int:
    return block.format.tile_bytes(block.cols) // word_bytes(block.format)


def _chunks(block: Block) -> tuple[int, int, int, int]:
    """For a row of the block: (groups, lines of a group, lines of a chunk, chunks of a group). Float formats have one
    group."""
    fmt, per_word = block.format, columns_of(block.format)
    groups = fmt.groups(block.cols) if fmt.is_quantised else 1
    group_lines = fmt.group // per_word if fmt.is_quantised else -(-block.cols // per_word)
    lines = min(8, pow2(group_lines))
    return groups, group_lines, lines, -(-group_lines // lines)


def walk(block: Block, programs: int, rows: int, granules: int = 1, splits: int = 1) -> dict[str, Any]:
    """Compile-time arguments that say how `_tile_dot` walks a tile of the block, and `num_warps`. `programs`: in the
    grid. `granules`: over how many the sum goes. `splits`: into how many parts it is split."""
    fmt = block.format
    per_word, (groups, group_lines, lines, group_chunks) = columns_of(fmt), _chunks(block)
    per_granule = groups * group_chunks
    warps = _warps(programs, per_granule * granules // splits)
    at_once = min(pow2(rows), ROWS_AT_ONCE)
    columns = fmt.group if fmt.is_quantised else lines * per_word
    return {
        "KIND": fmt.kind, "COLS": block.cols, "PER_WORD": per_word, "GROUP": fmt.group,
        "GROUP_WORDS": fmt.group_bytes // 4 if fmt.is_quantised else 0,
        "GROUP_LINES": group_lines, "GROUP_CHUNKS": group_chunks, "GRANULE_CHUNKS": per_granule, "LINES": lines,
        "TAILS": bool(group_lines % lines or block.cols % columns), "CHUNKS": warps,
        "ROWS": at_once, "UNROLL": max(1, _UNROLL // at_once), "num_warps": warps,
    }  # fmt: skip


def spread(
    x: Tensor,
    weights: Tensor,
    blocks: Sequence[Block],
    outs: Sequence[Tensor],
    kernels: Kernels,
    scratch: TensorScratch,
) -> None:
    """outs[i] [T, n · R_i] = x [T, C] · block i of each of the n granules, transposed. x and outs are float32 with
    contiguous rows; weights uint8 [n, granule_bytes]. outs[0] may have fewer columns: then the rest is left out."""
    if not few_rows(kernels, x.shape[0]):
        for block, out in zip(blocks, outs, strict=True):
            _spread_many(x, weights, block, out, kernels, scratch)
        return
    from penstock.kernels.gpu import tile_kernels

    n, t = weights.shape[0], x.shape[0]
    words, halves = typed(weights, blocks[0].format)
    rows = [block.rows for block in blocks] + [0] * (3 - len(blocks))
    offsets = [block.offset // word_bytes(block.format) for block in blocks] + [0] * (3 - len(blocks))
    ys = [*outs, *[outs[0]] * (3 - len(outs))]
    programs = n * sum(tiles(r) for r in rows)
    how = walk(blocks[0], programs, t)
    tile_kernels.spread_kernel[(programs, -(-t // how["ROWS"]))](
        words, halves, x, *ys, t, outs[0].shape[1], x.stride(0), *[y.stride(0) for y in ys], words.stride(0),
        *exponents(), *offsets, *rows, tile_words(blocks[0]), **how,
    )  # fmt: skip


def _spread_many(
    x: Tensor, weights: Tensor, block: Block, out: Tensor, kernels: Kernels, scratch: TensorScratch
) -> None:
    mark = scratch.mark()
    for p in pieces(weights.shape[0], block):
        scratch.rewind(mark)
        rows = p.row_hi - p.row_lo
        wide = scratch.take(((p.hi - p.lo) * rows, block.cols))
        widen(weights[p.lo : p.hi], block, p.row_lo, wide.view(p.hi - p.lo, rows, block.cols), kernels)
        lo = p.lo * block.rows + p.row_lo
        hi = min(lo + len(wide), out.shape[1])
        if lo < hi:
            with precision(kernels, block, x):
                torch.mm(x, wide[: hi - lo].T, out=out[:, lo:hi])
    scratch.rewind(mark)


def add_up(
    x: Tensor, weights: Tensor, block: Block, partial: Tensor, first: bool, kernels: Kernels, scratch: TensorScratch
) -> None:
    """partial [T, R] = (first) or += the sum over the n granules of x [T, n · C] · block [R, C]ᵀ. partial and x are
    float32; weights uint8 [n, granule_bytes]. The order of the sum is fixed, but differs from the CPU's. So bits may
    differ, within the op table's tolerance."""
    n, t = weights.shape[0], x.shape[0]
    if not few_rows(kernels, t):
        _add_up_many(x, weights, block, partial, first, kernels, scratch)
        return
    from penstock.kernels.gpu import tile_kernels

    words, halves = typed(weights, block.format)
    n_tiles, mark = tiles(block.rows), scratch.mark()
    groups, _, _, group_chunks = _chunks(block)
    chunks = groups * group_chunks * n
    splits = max(1, min(sum_splits(block.rows), chunks // _UNROLL))
    how = walk(block, n_tiles * splits, t, n, splits)
    parts = scratch.take((splits, t, block.rows)) if splits > 1 else partial
    tile_kernels.add_up_kernel[(n_tiles, splits, -(-t // how["ROWS"]))](
        words, halves, x, parts, t, chunks, x.stride(0), parts.stride(-2), parts.stride(0), words.stride(0),
        *exponents(), block.offset // word_bytes(block.format), block.rows, tile_words(block), splits,
        splits == 1 and not first, **how,
    )  # fmt: skip
    if splits > 1:
        sum_parts(parts, partial, first)
    scratch.rewind(mark)


def sum_parts(parts: Tensor, out: Tensor, first: bool) -> None:
    """out float32 [T, R] = (first) or += the sum of parts float32 [S, T, R], in order. Needs Triton."""
    from penstock.kernels.gpu import tile_kernels

    splits, t, r = parts.shape
    tile_kernels.sum_parts_kernel[(-(-t * r // 1024),)](
        parts, out, t * r, r, out.stride(0), parts.stride(0), splits, not first, 1024
    )


def _add_up_many(
    x: Tensor, weights: Tensor, block: Block, partial: Tensor, first: bool, kernels: Kernels, scratch: TensorScratch
) -> None:
    mark = scratch.mark()
    for p in pieces(weights.shape[0], block):
        scratch.rewind(mark)
        rows, granules = p.row_hi - p.row_lo, p.hi - p.lo
        wide = scratch.take((rows, granules, block.cols))
        widen(weights[p.lo : p.hi], block, p.row_lo, wide.transpose(0, 1), kernels)
        source, target = x[:, p.lo * block.cols : p.hi * block.cols], partial[:, p.row_lo : p.row_hi]
        with precision(kernels, block, x):
            if first and p.lo == 0:
                torch.mm(source, wide.view(rows, -1).T, out=target)
            else:
                torch.addmm(target, source, wide.view(rows, -1).T, out=target)
    scratch.rewind(mark)


def hidden(
    x: Tensor,
    weights: Tensor,
    part: Part,
    f: FfnSpec,
    gate: Tensor,
    up: Tensor,
    kernels: Kernels,
    scratch: TensorScratch,
) -> Tensor:
    """Returns act(x · gateᵀ) · (x · upᵀ), or act(x · upᵀ), of n granules: float32 [T, n · neurons]. x float32 [T, D];
    weights uint8 [n, granule_bytes]. `gate` and `up` are room for results of that shape. The result is in one of
    them."""
    bias = {name: part.block(name + "_bias") for name in ("gate", "up") if part.has(name + "_bias")}
    if not f.gated:
        activated(x, weights, part.block("up"), bias.get("up"), f.activation, up, kernels, scratch)
        return up
    if few_rows(kernels, x.shape[0]):
        blocks = (part.block("up"), bias.get("up"), part.block("gate"), bias.get("gate"))
        _few_hidden(x, weights, *blocks, f.activation, up)
        return up
    activated(x, weights, part.block("gate"), bias.get("gate"), f.activation, gate, kernels, scratch)
    _biased(x, weights, part.block("up"), bias.get("up"), up, kernels, scratch)
    if f.activation == "swiglu_clamped":
        up.clamp_(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1.0)
    return gate.mul_(up)


def activated(
    x: Tensor, weights: Tensor, block: Block, bias: Block | None, activation: str, out: Tensor, kernels: Kernels,
    scratch: TensorScratch,
) -> None:  # fmt: skip
    """out [T, n · R] = act(x · blockᵀ + bias) of n granules. x and out float32, weights uint8 [n, granule_bytes]."""
    if few_rows(kernels, x.shape[0]):
        _few_hidden(x, weights, block, bias, None, None, activation, out)
    else:
        _biased(x, weights, block, bias, out, kernels, scratch)
        activate(out, activation)


def _biased(
    x: Tensor, weights: Tensor, block: Block, bias: Block | None, out: Tensor, kernels: Kernels, scratch: TensorScratch
) -> None:
    """out [T, n · R] = x · blockᵀ + bias of n granules."""
    spread(x, weights, (block,), (out,), kernels, scratch)
    if bias is not None:
        addend = vectors(weights, bias)  # [n, R]
        by_granule = out.unflatten(1, tuple(addend.shape))
        by_granule += addend


def _few_hidden(
    x: Tensor, weights: Tensor, up: Block, up_bias: Block | None, gate: Block | None, gate_bias: Block | None,
    activation: str, out: Tensor,
) -> None:  # fmt: skip
    """out = act(x · gateᵀ) · (x · upᵀ), or act(x · upᵀ) where there is no gate, straight from packed weights."""
    from penstock.kernels.gpu import tile_kernels

    t, size = x.shape[0], word_bytes(up.format)
    words, halves = typed(weights, up.format)
    floats = weights.view(torch.float32)
    programs = weights.shape[0] * tiles(up.rows)
    how = walk(up, programs, t)
    biases = [-1 if bias is None else bias.offset // 4 for bias in (gate_bias, up_bias)]
    tile_kernels.hidden_kernel[(programs, -(-t // how["ROWS"]))](
        words, halves, floats, x, out, t, x.stride(0), out.stride(0), words.stride(0), floats.stride(0), *exponents(),
        -1 if gate is None else gate.offset // size, up.offset // size, *biases, activation, up.rows, tile_words(up),
        **how,
    )  # fmt: skip


def activate(x: Tensor, activation: str) -> Tensor:
    """Applies the activation to x float32 [...] in place, and returns x. For the gelus torch has no such variant: they
    make temporaries as large as x."""
    if activation == "silu":
        return torch.nn.functional.silu(x, inplace=True)
    if activation in ("gelu", "gelu_tanh"):
        return x.copy_(torch.nn.functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none"))
    if activation in ("gelu_quick", "swiglu_clamped"):
        x = x.clamp_(max=SWIGLU_LIMIT) if activation == "swiglu_clamped" else x
        return x.mul_(torch.sigmoid(1.702 * x))
    x.relu_()
    return x.mul_(x) if activation == "relu2" else x


@contextlib.contextmanager
def precision(kernels: Kernels, block: Block, x: Tensor) -> Iterator[None]:
    """On a device, sets whether torch may round the inputs of a product of x float32 [T, N] to TF32, and sets it back
    afterwards."""
    if x.device.type == "cpu":
        yield
        return
    wanted = "high" if kernels.matmul == "tf32" and block.format.kind != "float32" else "highest"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


assert TILE_ROWS == 16, "tile_kernels counts on tiles of 16 rows"
