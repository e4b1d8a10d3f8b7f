"""The ops of FFNs with experts on torch tensors: route, experts, combine and gate. `kernels.reference.experts` defines
them.

Shapes: T rows of the batch, X experts, A experts that a row goes to, D d_model, N neurons of an expert as its granules
hold them. h and partial are float32 [T, D]. A pair is a row and one of its A experts.

By Triton nothing waits for what routers say, so a step can be recorded. By torch alone the rows of each expert are
looked up, and the caller waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.graph.scratch_gpu import expert_rows
from penstock.kernels.gpu import dense, product
from penstock.kernels.gpu.choose import Kernels
from penstock.kernels.gpu.memory import TensorScratch, vector
from penstock.kernels.gpu.widen import typed, word_bytes
from penstock.spec.format import tiles
from penstock.spec.model import Routed, Router
from penstock.spec.parts import GRANULE_ROWS, PAGE_BYTES, Block, Part

_SMALLEST_SUM = 1e-20  # as in the reference
# A block has up to _BLOCK_PAIRS pairs of an expert. A program multiplies it with _BLOCK_COLUMNS columns at a time, of
# as many rows of a matrix as a granule has. These are the least that tensor cores take at a time, and as much as the
# registers of four warps hold. None of this was measured yet.
_BLOCK_PAIRS, _BLOCK_COLUMNS = 16, 32
_COMBINED = 1024  # columns of a row that a program of `combine_kernel` adds up


class TensorRoutes(NamedTuple):
    """A router's answer: the experts of each row in rising order, the factors of their outputs, and the factor of the
    shared expert's output."""

    ids: Tensor  # int32 [T, A]
    factors: Tensor  # float32 [T, A]
    shared: Tensor  # float32 [T]

    def rows(self, lo: int, hi: int) -> TensorRoutes:
        return TensorRoutes(self.ids[lo:hi], self.factors[lo:hi], self.shared[lo:hi])


def routes_of(answer: Tensor, t: int, active: int) -> TensorRoutes:
    """The parts of an answer for t rows: uint8 [bytes], laid out as `graph.ops` says."""
    n = 4 * t * active
    ids, factors, shared = answer[:n], answer[n : 2 * n], answer[2 * n : 2 * n + 4 * t]
    return TensorRoutes(
        ids.view(torch.int32).view(t, active), factors.view(torch.float32).view(t, active), shared.view(torch.float32)
    )


def route(
    weights: Tensor,
    part: Part,
    routed: Routed,
    h: Tensor,
    routes: TensorRoutes,
    kernels: Kernels,
    scratch: TensorScratch,
) -> None:
    """Fills `routes` for h. `weights` uint8 [granule_bytes] is the router's granule. A row with a score that is no
    finite number has factors NaN."""
    t, mark = h.shape[0], scratch.mark()
    scores, gates = scratch.take((t, routed.experts)), scratch.take((t, 1))
    blocks = [(part.block("scores"), scores)]
    blocks += [(part.block("shared_gate"), gates)] if routed.shared_gate else []
    product.spread(h, weights[None], [b for b, _ in blocks], [out for _, out in blocks], kernels, scratch)
    bias = vector(weights, part.block("bias")) if routed.router.bias else None
    if kernels.triton:
        from penstock.kernels.gpu import expert_kernels

        router, size = routed.router, routed.experts // routed.router.groups
        expert_kernels.route_kernel[(t,)](
            scores, gates, scores if bias is None else bias, *routes, scores.stride(0), router.scale, router.groups,
            size, router.groups_kept, routed.active, router.score == "sigmoid", router.bias and not router.bias_scored,
            router.bias_scored, router.normalised,
            routed.shared_gate, product.pow2(router.groups), product.pow2(size),
        )  # fmt: skip
    else:
        _route_by_torch(scores, gates, bias, routed, routes)
    scratch.rewind(mark)


def _route_by_torch(scores: Tensor, gates: Tensor, bias: Tensor | None, routed: Routed, routes: TensorRoutes) -> None:
    """scores float32 [T, X], gates [T, 1], bias [X]. scores are overwritten."""
    if bias is not None and routed.router.bias_scored:
        scores, bias = scores.add_(bias), None
    damaged = ~scores.isfinite().all(1)
    scores.masked_fill_(damaged[:, None], 0.0)
    scores = scores.softmax(1) if routed.router.score == "softmax" else scores.sigmoid()
    ranked = scores if bias is None else scores + bias
    if routed.router.groups > 1:
        ranked = _kept_groups(ranked, routed.router)
    # The highest are chosen, of equal ones the lowest ids. Then ids rise: that is the order of the sum.
    ids = torch.sort(ranked, dim=1, descending=True, stable=True).indices[:, : routed.active].sort(1).values
    chosen = scores.gather(1, ids)
    if routed.router.normalised:
        chosen = chosen / (chosen.sum(1, keepdim=True) + _SMALLEST_SUM)
    routes.ids.copy_(ids)
    routes.factors.copy_(chosen * routed.router.scale).masked_fill_(damaged[:, None], torch.nan)
    routes.shared.copy_(gates[:, 0].sigmoid() if routed.shared_gate else torch.ones_like(routes.shared))


def _kept_groups(ranked: Tensor, router: Router) -> Tensor:
    """The scores float32 [T, X], but -inf outside of the groups that are kept."""
    grouped = ranked.unflatten(1, (router.groups, -1))
    two_best = grouped.topk(2, dim=2).values.sum(2)  # [T, groups]
    kept = torch.sort(two_best, dim=1, descending=True, stable=True).indices[:, : router.groups_kept]
    is_kept = torch.zeros_like(two_best, dtype=torch.bool).scatter_(1, kept, True)
    return grouped.masked_fill(~is_kept[:, :, None], -torch.inf).flatten(1)


def experts(
    weights: Sequence[Tensor], first_experts: Sequence[int], part: Part, routed: Routed, h: Tensor,
    routes: TensorRoutes, partial: Tensor, outputs: Tensor | None, starts_sum: bool, kernels: Kernels,
    scratch: TensorScratch,
) -> None:  # fmt: skip
    """partial (+)= Σ factor · FFN of h over the experts in `weights`, each uint8 [granules of whole experts,
    granule_bytes], from the expert `first_experts` of the same index on. With `outputs` float32 [T, A, D] the FFNs'
    outputs are stored there instead. Without it the experts follow one another without a gap."""
    ranges = [
        (first, first + w.shape[0] // part.expert_granules) for first, w in zip(first_experts, weights, strict=True)
    ]  # fmt: skip
    if not kernels.triton:
        if starts_sum and outputs is None:
            partial.zero_()
        _experts_by_torch(weights, ranges, part, routed, h, routes, partial, outputs, kernels, scratch)
        return
    (t, d), mark = h.shape, scratch.mark()
    step = expert_rows(part, routed.active, t)
    for lo in range(0, t, step):
        scratch.rewind(mark)
        rows, here = h[lo : lo + step], routes.rows(lo, lo + step)
        into = scratch.take((len(rows), routed.active, d)) if outputs is None else outputs[lo : lo + step]
        _by_pairs(weights, ranges, part, routed, rows, here, into.view(-1, d), kernels, scratch)
        if outputs is None:
            assert all(last == first for (_, last), (first, _) in pairwise(ranges)), ranges
            _add_up(here, into, partial[lo : lo + step], starts_sum, ranges[0][0], ranges[-1][1])
    scratch.rewind(mark)


def combine(routes: TensorRoutes, outputs: Tensor, partial: Tensor, starts_sum: bool, kernels: Kernels) -> None:
    """partial (+)= Σ factor · outputs float32 [T, A, D], experts in rising order."""
    if kernels.triton:
        _add_up(routes, outputs, partial, starts_sum, 0, 2**31 - 1)
        return
    if starts_sum:
        partial.zero_()
    for rank in range(outputs.shape[1]):
        partial += outputs[:, rank] * routes.factors[:, rank, None]


def gate(routes: TensorRoutes, partial: Tensor) -> None:
    """partial float32 [T, D] = partial times the shared expert's factor of each row."""
    partial.mul_(routes.shared[:, None])


def _experts_by_torch(
    weights: Sequence[Tensor], ranges: Sequence[tuple[int, int]], part: Part, routed: Routed, h: Tensor,
    routes: TensorRoutes, partial: Tensor, outputs: Tensor | None, kernels: Kernels, scratch: TensorScratch,
) -> None:  # fmt: skip
    n, mark = part.expert_granules, scratch.mark()
    for granules, (first, last) in zip(weights, ranges, strict=True):
        for expert in range(first, last):
            rows, rank = torch.nonzero(routes.ids == expert, as_tuple=True)  # waits
            if not len(rows):
                continue
            scratch.rewind(mark)
            x, y = (scratch.take((len(rows), h.shape[1])) for _ in range(2))
            torch.index_select(h, 0, rows, out=x)
            of_expert = granules[(expert - first) * n : (expert - first + 1) * n]
            dense.ffn(of_expert, part, routed.expert, x, y, True, kernels, scratch)
            if outputs is not None:
                outputs[rows, rank] = y
            else:
                partial[rows] += y * routes.factors[rows, rank, None]
    scratch.rewind(mark)


# -- Triton ---------------------------------------------------------------------------------------------


class _Launch(NamedTuple):
    """Up to eight slots of one arena. `base`: the first of them. `scalars`: pages from it to each slot, the first
    experts, the ends."""

    base: Tensor
    scalars: list[int]


def _launches(weights: Sequence[Tensor], ranges: Sequence[tuple[int, int]]) -> Iterator[_Launch]:
    from penstock.kernels.gpu.expert_kernels import SLOTS

    by_arena: dict[int, list[int]] = {}
    for i, granules in enumerate(weights):
        by_arena.setdefault(granules.untyped_storage().data_ptr(), []).append(i)
    for numbers in by_arena.values():
        for some in (numbers[i : i + SLOTS] for i in range(0, len(numbers), SLOTS)):
            base, none = weights[some[0]], [0] * (SLOTS - len(some))
            pages = [(weights[i].storage_offset() - base.storage_offset()) // PAGE_BYTES for i in some]
            firsts, lasts = zip(*(ranges[i] for i in some), strict=True)
            yield _Launch(base, [*pages, *none, *firsts, *none, *lasts, *none])


def _by_pairs(
    weights: Sequence[Tensor], ranges: Sequence[tuple[int, int]], part: Part, routed: Routed, h: Tensor,
    routes: TensorRoutes, outputs: Tensor, kernels: Kernels, scratch: TensorScratch,
) -> None:  # fmt: skip
    """outputs float32 [pairs, D] = the FFN of each pair whose expert is there. The others are left as they are."""
    from penstock.kernels.gpu import expert_kernels

    pairs, width = outputs.shape[0], part.expert_granules * part.granule_rows
    hidden = scratch.take((pairs, width))
    ids, few = routes.ids, product.few_rows(kernels, h.shape[0])
    order, blocks = (ids, ids) if few else _blocks(ids, routed.experts)
    up, down, f = part.block("up"), part.block("down"), routed.expert
    size = word_bytes(up.format)
    biases = [part.block(name).offset // 4 if part.has(name) else -1 for name in ("gate_bias", "up_bias")]
    gate_at = part.block("gate").offset // size if f.gated else -1
    hidden_of = (routed.active, gate_at, up.offset // size, *biases, f.activation, up.rows, product.tile_words(up))
    down_of = (down.offset // size, down.rows, product.tile_words(down))
    both = (PAGE_BYTES // size, part.expert_granules)
    for base, scalars in _launches(weights, ranges):
        words, halves = typed(base, up.format)
        floats, strides = base.view(torch.float32), (h.stride(0), hidden.stride(0), words.stride(0))
        down_strides = (hidden.stride(0), outputs.stride(0), words.stride(0))
        if few:
            grid = (pairs, part.expert_granules * tiles(up.rows))
            expert_kernels.pair_hidden_kernel[grid](
                words, halves, floats, h, ids, hidden, *scalars, *strides, *product.exponents(), *both, *hidden_of,
                **product.walk(up, grid[0] * grid[1], 1),
            )  # fmt: skip
            grid = (pairs, tiles(down.rows))
            expert_kernels.pair_down_kernel[grid](
                words, halves, hidden, ids, outputs, *scalars, *down_strides, *product.exponents(), *both, *down_of,
                **product.walk(down, grid[0] * grid[1], 1, part.expert_granules),
            )  # fmt: skip
            continue
        expert_kernels.block_hidden_kernel[(len(blocks), part.expert_granules)](
            words, halves, floats, h, order, blocks, hidden, *scalars, *strides, *both, *hidden_of,
            **_block_walk(up, kernels),
        )  # fmt: skip
        expert_kernels.block_down_kernel[(len(blocks), -(-down.rows // GRANULE_ROWS))](
            words, halves, hidden, order, blocks, outputs, *scalars, *down_strides, *both, *down_of,
            COLUMNS=GRANULE_ROWS, **_block_walk(down, kernels),
        )  # fmt: skip


def _block_walk(block: Block, kernels: Kernels) -> dict[str, Any]:
    """Compile-time arguments that say how `_block_dot` walks a block."""
    fmt = block.format
    return {
        "KIND": fmt.kind, "COLS": block.cols, "GROUP": fmt.group,
        "GROUP_WORDS": fmt.group_bytes // 4 if fmt.is_quantised else 0, "ROWS": _BLOCK_PAIRS,
        "BLOCK": _BLOCK_COLUMNS, "DOT": kernels.dot,
    }  # fmt: skip


def _blocks(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(the pairs sorted by expert, int32 [pairs]; blocks of them int32 [n, 3]: an expert, and a range of the sorted
    pairs). There are as many blocks as there can be, and those that are not needed are empty. Nothing is waited for."""
    pairs = ids.numel()
    found, order = torch.sort(ids.reshape(-1), stable=True)
    edges = torch.searchsorted(found, torch.arange(experts + 1, dtype=torch.int32, device=ids.device))
    starts, ends = edges[:-1], edges[1:]  # of each expert's pairs
    count = (ends - starts + _BLOCK_PAIRS - 1) // _BLOCK_PAIRS
    until = count.cumsum(0)
    number = torch.arange(pairs // _BLOCK_PAIRS + min(experts, pairs), device=ids.device)
    expert = torch.searchsorted(until, number, right=True).clamp_(max=experts - 1)
    lo = starts[expert] + (number - (until - count)[expert]) * _BLOCK_PAIRS
    hi = torch.minimum(lo + _BLOCK_PAIRS, ends[expert])
    return order.int(), torch.stack([expert, lo, hi], 1).int()


def _add_up(routes: TensorRoutes, outputs: Tensor, partial: Tensor, starts_sum: bool, first: int, last: int) -> None:
    from penstock.kernels.gpu import expert_kernels

    t, active, d = outputs.shape
    expert_kernels.combine_kernel[(t, -(-d // _COMBINED))](
        outputs, routes.ids, routes.factors, partial, first, last, partial.stride(0), d, active, not starts_sum,
        min(_COMBINED, product.pow2(d)),
    )  # fmt: skip
