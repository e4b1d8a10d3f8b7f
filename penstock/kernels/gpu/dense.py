"""The dense ops on torch tensors: gather, embed, norm_in, ffn, merge and head. `kernels.reference.dense` defines them.

Shapes: T rows, D d_model, n rows whose logits are wanted, V vocab. Activations are float32, their last axis contiguous.
`weights` uint8 [n, granule_bytes] is a unit as packed; `edges` and `norms` uint8 [granule_bytes] are the one granule of
such a part. Integer tensors are int32, and may change between replays of a recorded graph. Wrong shapes are a
programmer's error (AssertionError or torch's own).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.graph.scratch_gpu import PREDICTED_ROWS, SUM_PARTS, ffn_granules
from penstock.kernels.gpu.choose import Kernels
from penstock.kernels.gpu.memory import TensorScratch, table, vector
from penstock.kernels.gpu.neurons import add_ffn
from penstock.kernels.gpu.product import activated, add_up, hidden, spread
from penstock.kernels.gpu.widen import take_rows
from penstock.spec.model import FfnSpec, Layer, ModelSpec, NormSpec
from penstock.spec.parts import Part


def gather(weights: Tensor, part: Part, tokens: Tensor, rows: Tensor, kernels: Kernels) -> None:
    """rows [T, d_embed] = the embedding rows of tokens int32 [T]."""
    take_rows(weights, part.block("rows"), tokens, rows, kernels)


def embed(
    rows: Tensor, edges: Tensor, edges_part: Part, spec: ModelSpec, positions: Tensor, x: Tensor, kernels: Kernels,
    scratch: TensorScratch,
) -> None:  # fmt: skip
    """x [T, D] = rows [T, d_embed] · embed_scale, projected where the model does so, plus its learned positions, if
    any. positions int32 [T]. For learned positions torch makes a temporary [T, D]."""
    mark = scratch.mark()
    if edges_part.has("project_in"):
        scaled = scratch.take(rows.shape)
        torch.mul(rows, spec.embed_scale, out=scaled)
        spread(scaled, edges[None], (edges_part.block("project_in"),), (x,), kernels, scratch)
    else:
        torch.mul(rows, spec.embed_scale, out=x)
    if spec.position_rows:
        learned = table(edges, edges_part.block("positions"))
        x += learned[positions.long() + spec.position_offset]
    scratch.rewind(mark)


def norm_in(
    x: Tensor, norms: Tensor, part: Part, name: str, spec: ModelSpec, present: bool, h: Tensor, kernels: Kernels,
    scratch: TensorScratch, rows: Tensor | None = None,
) -> None:  # fmt: skip
    """h = norm(x), or h = x where the layer has no such norm (`present`). The final norm takes the rows `rows` int32
    [n] of x, and projects down to d_embed where the model does (OPT-350m)."""
    projected, mark = part.has("project_out") and name == "final", scratch.mark()
    wide = scratch.take((h.shape[0], x.shape[1])) if projected else h
    if present:
        named_norm(x, norms, part, name, spec.norm, wide, kernels, rows)
    elif rows is None:
        wide.copy_(x)
    else:
        torch.index_select(x, 0, rows, out=wide)
    if projected:
        spread(wide, norms[None], (part.block("project_out"),), (h,), kernels, scratch)
    scratch.rewind(mark)


def named_norm(
    x: Tensor, norms: Tensor, part: Part, name: str, norm: NormSpec, out: Tensor, kernels: Kernels,
    rows: Tensor | None = None,
) -> None:  # fmt: skip
    """out [n, D] = the norm `name` of the rows `rows` int32 [n] of x [T, D], or of all rows where None. out may be
    x."""
    weight, bias = _norm_vectors(norms, part, name)
    if not kernels.triton:
        out.copy_(_normalise(x if rows is None else x[rows.long()], norm, weight, bias))
        return
    from penstock.kernels.gpu import row_kernels

    d = x.shape[1]
    row_kernels.norm_kernel[(out.shape[0],)](
        x, x if rows is None else rows, _or(weight, x), _or(bias, x), out, x.stride(0), out.stride(0), norm.eps,
        norm.offset, d, norm.kind == "layer", weight is not None, bias is not None, rows is not None, **_row(d),
    )  # fmt: skip


def ffn(
    weights: Tensor, part: Part, shape: FfnSpec, h: Tensor, partial: Tensor, first: bool, kernels: Kernels,
    scratch: TensorScratch, skips: bool = False, active: Tensor | None = None,
) -> None:  # fmt: skip
    """partial [T, D] (+)= down · (act(gate h) * (up h)) over a unit's granules, h [T, D]. `first`: this call is the
    first addend. `skips`: what an activation of 0 multiplies may be left out. `active` uint8 [T, neurons]: where it is
    0, a neuron's activation counts as 0 (None: nowhere).

    The reference sums a layer's granules by fours, so that results do not depend on where units are cut, to the bit.
    Here a unit's whole sum is added to partial. That stays within the op table's tolerance, and nothing is pending."""
    n, t = weights.shape[0], h.shape[0]
    step = ffn_granules(part, t)
    mark, width = scratch.mark(), part.granule_rows
    for lo in range(0, n, step):
        scratch.rewind(mark)
        piece = weights[lo : lo + step]
        some = None if active is None else active[:, lo * width : (lo + step) * width]
        if part.by_neurons:
            add_ffn(piece, part, shape, h, partial, first and lo == 0, skips, kernels, scratch, some)
            continue
        gate, up = (scratch.take((t, piece.shape[0] * width)) for _ in range(2))
        hidden_rows = hidden(h, piece, part, shape, gate, up, kernels, scratch)
        if some is not None:
            hidden_rows.masked_fill_(some == 0, 0.0)
        add_up(hidden_rows, piece, part.block("down"), partial, first and lo == 0, kernels, scratch)
    scratch.rewind(mark)


def predict(granule: Tensor, part: Part, h: Tensor, active: Tensor, kernels: Kernels, scratch: TensorScratch) -> None:
    """active uint8 [T, N] = whether neurons · relu(hidden · h + hidden_bias) + neurons_bias is above 0, for h [T, D]
    (PowerInfer §5.1). `granule`: the predictor `part`, uint8 [its bytes]."""
    first, second, mark = part.block("hidden"), part.block("neurons"), scratch.mark()
    weights = granule[: part.granule_bytes][None]
    for lo in range(0, h.shape[0], PREDICTED_ROWS):
        scratch.rewind(mark)
        x, to = h[lo : lo + PREDICTED_ROWS], active[lo : lo + PREDICTED_ROWS]
        values, scores = (scratch.take((x.shape[0], block.rows)) for block in (first, second))
        activated(x, weights, first, part.block("hidden_bias"), "relu", values, kernels, scratch)
        spread(values, weights, (second,), (scores,), kernels, scratch)
        scores += vector(granule, part.block("neurons_bias"))
        torch.gt(scores, 0.0, out=to.view(torch.bool))
    scratch.rewind(mark)


def merge(
    norms: Tensor, part: Part, block: str, layer: Layer, norm: NormSpec, x: Tensor, partials: Sequence[Tensor],
    kernels: Kernels, scratch: TensorScratch, routes: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """x += norm_out(sum of partials + bias), then x = norm_after(x). x and each partial [T, D]. `block`: attn or ffn.
    Partials are not changed. `routes`: each row's experts, int32, and their factors, both [T, A]. Then the bias is
    Σ factor · the expert's."""
    bias_name = "o_bias" if block == "attn" else "down_bias"
    bias = vector(norms, part.block(bias_name)) if part.has(bias_name) else None
    out_weight, out_bias = _norm_vectors(norms, part, f"{block}_out")
    after_weight, after_bias = _norm_vectors(norms, part, f"{block}_after")
    biases = None if routes is None else vector(norms, part.block("experts_down_bias")).view(-1, x.shape[1])
    mark = scratch.mark()
    if not kernels.triton:
        y = scratch.take(x.shape)
        y.copy_(partials[0])
        for partial in partials[1:]:
            y += partial
        if bias is not None:
            y += bias
        if routes is not None and biases is not None:
            for rank in range(routes[0].shape[1]):
                y.addcmul_(biases[routes[0][:, rank].long()], routes[1][:, rank, None])
        x += _normalise(y, norm, out_weight, out_bias) if layer.norm_out else y
        if layer.norm_after:
            x.copy_(_normalise(x, norm, after_weight, after_bias))
        scratch.rewind(mark)
        return
    from penstock.kernels.gpu import row_kernels

    addends = list(partials)
    if len(addends) > SUM_PARTS:
        y = scratch.take(x.shape)
        torch.add(addends[0], addends[1], out=y)
        for partial in addends[2 : len(addends) - SUM_PARTS + 1]:
            y += partial
        addends = [y, *addends[len(addends) - SUM_PARTS + 1 :]]
    sources = addends + [addends[0]] * (SUM_PARTS - len(addends))
    d = x.shape[1]
    row_kernels.merge_kernel[(x.shape[0],)](
        x, *sources, *(_or(v, x) for v in (bias, out_weight, out_bias, after_weight, after_bias)),
        *(routes or (x, x)), _or(biases, x), x.stride(0), *(p.stride(0) for p in sources), norm.eps, norm.offset,
        d, len(addends), bias is not None, 0 if routes is None else routes[0].shape[1], norm.kind == "layer",
        norm.affine, norm.has_bias, layer.norm_out, layer.norm_after, **_row(d),
    )  # fmt: skip
    scratch.rewind(mark)


def head(
    weights: Tensor, part: Part, lo: int, h: Tensor, softcap: float, logits: Tensor, best: Tensor, best_ids: Tensor,
    starts: bool, kernels: Kernels, scratch: TensorScratch,
) -> None:  # fmt: skip
    """logits[:, 64·lo : …] = h [n, d_embed] · the vocabulary rows of `weights`, the granules from `lo` on. logits
    float32 [n, V]. `best` float32 [n] is updated to the largest logit so far, and `best_ids` int32 [n] to its id, which
    is the lowest where logits tie. Once a logit is NaN, `best` stays NaN. `starts`: this is the first unit."""
    if starts:
        best.fill_(-torch.inf)
        best_ids.zero_()
    first_id = lo * part.granule_rows
    unit_logits = logits[:, first_id : first_id + part.rows_of(lo, lo + weights.shape[0])]
    spread(h, weights, (part.block("rows"),), (unit_logits,), kernels, scratch)
    if softcap:
        unit_logits.div_(softcap).tanh_().mul_(softcap)
    largest, ids = torch.max(unit_logits, 1)  # [n] each; of equal logits, or of NaN, the first
    ids = (ids + first_id).int()
    better = (largest > best) | ((largest == best) & (ids < best_ids)) | (largest.isnan() & ~best.isnan())
    best.copy_(torch.where(better, largest, best))
    best_ids.copy_(torch.where(better, ids, best_ids))


def _norm_vectors(norms: Tensor, part: Part, name: str) -> tuple[Tensor | None, Tensor | None]:
    """(weight, bias) of a norm, each float32 [D] or None where there is none."""
    tensors = [vector(norms, part.block(key)) if part.has(key) else None for key in (name, name + "_bias")]
    return tensors[0], tensors[1]


def _normalise(x: Tensor, norm: NormSpec, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """norm(x) over the last axis by torch, with a few temporaries as large as x. weight and bias [D]."""
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    if weight is not None:
        x *= weight + norm.offset
    if bias is not None:
        x += bias
    return x


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """`tensor`, or a placeholder for an argument that a kernel does not use."""
    return other if tensor is None else tensor


def _row(d: int) -> dict[str, int]:
    """Launch arguments for programs that each take a whole row of d numbers: a warp for every 512 numbers, at most 16
    warps."""
    block = 1 << max(4, (d - 1).bit_length())
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
