"""The dense ops in numpy float32: gather, embed, norm, ffn, merge and head.

Shapes: T rows of the batch, D d_model, n rows whose logits are wanted, V vocab. Activations are float32. `weights`
uint8 [granules, granule_bytes] is a unit as packed; `edges` and `norms` uint8 [granule_bytes] are the one granule of
such a part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.graph.scratch import PREDICTED_ROWS, SLAB_BYTES
from penstock.kernels.reference.matrix import (
    Bytes,
    Float32,
    Scratch,
    add_neurons,
    multiply,
    multiply_neurons,
    table,
    take_rows,
    vector,
    widen_plain,
)
from penstock.spec.model import SWIGLU_LIMIT, FfnSpec, Layer, ModelSpec, NormSpec
from penstock.spec.parts import Part


def gather(weights: Bytes, part: Part, tokens: NDArray[np.int32], rows: Float32) -> None:
    """rows [T, d_embed] = the embedding rows of tokens int32 [T]."""
    take_rows(weights, part.block("rows"), tokens, rows)


def embed(
    rows: Float32, edges: Bytes, edges_part: Part, spec: ModelSpec, positions: NDArray[np.int64], x: Float32,
    scratch: Scratch,
) -> None:  # fmt: skip
    """x [T, D] = rows [T, d_embed] · embed_scale, projected where the model does so, plus its learned positions, if
    any. positions int64 [T]."""
    projected, start = edges_part.has("project_in"), scratch.mark()
    step = 64  # rows of a slab, so that temporaries stay small as in `multiply`: rows are as wide as the model
    for lo in range(0, len(positions), step):
        scratch.rewind(start)
        slab = slice(lo, lo + step)
        if projected:
            scaled = scratch.take(rows[slab].shape)
            np.multiply(rows[slab], np.float32(spec.embed_scale), out=scaled)
            multiply(scaled, edges, edges_part.block("project_in"), x[slab], scratch, apart=True)
        else:
            np.multiply(rows[slab], np.float32(spec.embed_scale), out=x[slab])
        if spec.position_rows:
            block = edges_part.block("positions")
            learned = table(edges, block)[positions[slab] + spec.position_offset]
            x[slab] += widen_plain(learned, block.format, scratch)
    scratch.rewind(start)


def normalise(x: Float32, norm: NormSpec, weight: Float32 | None, bias: Float32 | None, out: Float32) -> None:
    """out = norm(x) over the last axis of x, both float32 [rows, columns]. An RMS norm is x / sqrt(mean x² + eps) ·
    (weight + offset). A layer norm subtracts the mean from x first. weight and bias float32 [columns]."""
    step = max(1, SLAB_BYTES // (4 * x.shape[-1]))  # so that temporaries are of a slab of rows, not of the whole chunk
    for lo in range(0, x.shape[0], step):
        rows = x[lo : lo + step]
        if norm.kind == "layer":
            rows = rows - rows.mean(axis=-1, keepdims=True)
        variance = np.square(rows).mean(axis=-1, keepdims=True)
        np.multiply(rows, 1.0 / np.sqrt(variance + np.float32(norm.eps)), out=out[lo : lo + step])
        if weight is not None:
            out[lo : lo + step] *= weight + np.float32(norm.offset) if norm.offset else weight
        if bias is not None:
            out[lo : lo + step] += bias


def named_norm(x: Float32, norms: Bytes, part: Part, name: str, norm: NormSpec, out: Float32) -> None:
    """out float32 [T, D] = the norm `name` of x float32 [T, D], with weight and bias from the part's granule `norms`,
    uint8 [granule_bytes]."""
    weight = vector(norms, part.block(name)) if part.has(name) else None
    bias = vector(norms, part.block(name + "_bias")) if part.has(name + "_bias") else None
    normalise(x, norm, weight, bias, out)


def norm_in(
    x: Float32, norms: Bytes, part: Part, name: str, spec: ModelSpec, present: bool, h: Float32, scratch: Scratch,
    rows: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """h float32 [T, D] = norm(x float32 [T, D]), or h = x where the layer has no such norm (`present`). The final norm
    takes the rows `rows` of x, and projects down to d_embed where the model does (OPT-350m). `norms`: uint8
    [granule_bytes] of the part."""
    source = x if rows is None else x[list(rows)]
    if not part.has("project_out") or name != "final":
        if present:
            named_norm(source, norms, part, name, spec.norm, h)
        else:
            h[...] = source
        return
    wide = scratch.take(source.shape)
    if present:
        named_norm(source, norms, part, name, spec.norm, wide)
    else:
        wide[...] = source
    multiply(wide, norms, part.block("project_out"), h, scratch, apart=True)


def activate(x: Float32, activation: str) -> Float32:
    """Applies the activation to x float32 [...] in place, and returns x."""
    if activation == "silu":
        with np.errstate(over="ignore"):  # exp(-x) = inf for x < -88 gives 0, which is right
            x /= 1.0 + np.exp(-x)
    elif activation == "gelu":
        x *= 0.5 * (1.0 + _erf(x * np.float32(1 / math.sqrt(2))))
    elif activation == "gelu_tanh":
        x *= 0.5 * (1.0 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)))
    elif activation in ("gelu_quick", "swiglu_clamped"):
        if activation == "swiglu_clamped":
            np.minimum(x, np.float32(SWIGLU_LIMIT), out=x)
        with np.errstate(over="ignore"):
            x /= 1.0 + np.exp(np.float32(-1.702) * x)
    else:
        np.maximum(x, 0, out=x)
        if activation == "relu2":
            x *= x
    return x


def _erf(x: Float32) -> Float32:
    """The error function by Abramowitz and Stegun 7.1.26, since numpy has none. Its error of 1.5e-7 is about float32's
    own."""
    sign, z = np.sign(x), np.abs(x)
    t = 1.0 / (1.0 + np.float32(0.3275911) * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    result: Float32 = (sign * (1.0 - series * np.exp(-z * z))).astype(np.float32)
    return result


class FfnSum(NamedTuple):
    """Where an FFN's sums go. Granules are summed by fours (`Part.sum_granules` of them, counted from the layer's first
    granule), then the fours are. `first`: this call is the first addend of `partial`. `pending`: the sum of a four that
    is not complete. `continues`: the call before left one there. `keeps`: this call leaves one."""

    partial: Float32  # [T, D]
    pending: Float32  # [T, D]
    first: bool
    continues: bool
    keeps: bool


def predict(granule: Bytes, part: Part, h: Float32, active: NDArray[np.uint8], scratch: Scratch) -> None:
    """active uint8 [T, N] = whether neurons · relu(hidden · h + hidden_bias) + neurons_bias is above 0. `granule`: of
    the predictor, a part of its own."""
    hidden, neurons, start = part.block("hidden"), part.block("neurons"), scratch.mark()
    for lo in range(0, len(h), PREDICTED_ROWS):
        scratch.rewind(start)
        rows = h[lo : lo + PREDICTED_ROWS]
        values = scratch.take((len(rows), hidden.rows))
        multiply(rows, granule, hidden, values, scratch)
        values += vector(granule, part.block("hidden_bias"))
        np.maximum(values, 0, out=values)
        scores = scratch.take((len(rows), neurons.rows))
        multiply(values, granule, neurons, scores, scratch)
        scores += vector(granule, part.block("neurons_bias"))
        np.greater(scores, 0, out=active[lo : lo + len(rows)].view(np.bool_))
    scratch.rewind(start)


def ffn(
    weights: Bytes, part: Part, lo: int, shape: FfnSpec, h: Float32, out: FfnSum, scratch: Scratch,
    active: NDArray[np.uint8] | None = None, level: float = 0.0,
) -> None:  # fmt: skip
    """partial [T, D] (+)= down · (act(gate h) * (up h)). `weights` holds the granules of the layer from `lo` on.
    `active` uint8 [T, neurons of the layer in whole granules]: where it is 0, act(…) counts as 0; None: nowhere. So it
    does where its magnitude is below `level`."""
    if out.first:
        out.partial[...] = 0
    t, width, start = h.shape[0], part.granule_rows, scratch.mark()
    for g, granule in enumerate(weights, lo):
        scratch.rewind(start)
        if g % part.sum_granules == 0 or (g == lo and not out.continues):
            out.pending[...] = 0
        up = scratch.take((t, width))
        (multiply_neurons if part.block("up").stride else multiply)(h, granule, part.block("up"), up, scratch)
        if part.has("up_bias"):
            up += vector(granule, part.block("up_bias"))
        if shape.gated:
            gate = scratch.take((t, width))
            (multiply_neurons if part.by_records else multiply)(h, granule, part.block("gate"), gate, scratch)
            if part.has("gate_bias"):
                gate += vector(granule, part.block("gate_bias"))
            activate(gate, shape.activation)
            gate[np.abs(gate) < level] = 0
            if shape.activation == "swiglu_clamped":
                np.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT, out=up)
                up += 1
            up *= gate
        else:
            activate(up, shape.activation)
            up[np.abs(up) < level] = 0
        if active is not None:
            up[active[:, g * width : (g + 1) * width] == 0] = 0
        if part.by_neurons:
            add_neurons(up, granule, part.block("down"), out.pending, scratch)
        else:
            multiply(up, granule, part.block("down"), out.pending, scratch, add=True)
        last = g == lo + len(weights) - 1
        if ((g + 1) % part.sum_granules == 0 or last) and not (last and out.keeps):
            out.partial[...] += out.pending
    scratch.rewind(start)


def order(rows: Float32, norms: Bytes, part: Part, which: str, scratch: Scratch) -> None:
    """Column i of rows float32 [T, C] becomes what column order[i] was. Numbers that are no column count as 0. norms
    uint8 [granule_bytes]."""
    numbers = vector(norms, part.block(f"{which}_order"))
    columns = np.where((numbers >= 0) & (numbers < rows.shape[1]), numbers, 0).astype(np.intp)
    before = scratch.take(rows.shape)
    before[...] = rows
    np.take(before, columns, axis=1, out=rows, mode="clip")


def merge(
    norms: Bytes, part: Part, block: str, layer: Layer, norm: NormSpec, x: Float32, partials: Sequence[Float32],
    scratch: Scratch, routes: tuple[NDArray[np.int32], Float32] | None = None,
) -> None:  # fmt: skip
    """x += norm_out(sum of partials + bias), then x = norm_after(x). x and each partial float32 [T, D], norms uint8
    [granule_bytes]. `block`: attn or ffn. `routes`: each row's experts int32 [T, A] and their factors float32 [T, A].
    Then the bias is Σ factor · the expert's."""
    y = scratch.take(x.shape)
    y[...] = partials[0]
    for partial in partials[1:]:
        y += partial
    bias = "o_bias" if block == "attn" else "down_bias"
    if part.has(bias):
        y += vector(norms, part.block(bias))
    if routes is not None:
        biases = vector(norms, part.block("experts_down_bias")).reshape(-1, x.shape[1])
        for expert, factor in zip(routes[0].T, routes[1].T, strict=True):
            y += biases[expert] * factor[:, None]
    if layer.norm_out:
        named_norm(y, norms, part, f"{block}_out", norm, y)
    x += y
    if layer.norm_after:
        named_norm(x, norms, part, f"{block}_after", norm, x)


def head(
    weights: Bytes, part: Part, lo: int, h: Float32, softcap: float, logits: Float32, best: Float32,
    best_ids: NDArray[np.int32], starts: bool, scratch: Scratch,
) -> None:  # fmt: skip
    """logits[:, 64·lo : …] = h [n, d_embed] · the vocabulary rows of `weights`, the granules from `lo` on. logits
    float32 [n, V]. `best` float32 [n] is updated to the largest logit so far, and `best_ids` int32 [n] to its id, which
    is the lowest where logits tie. Once a logit is NaN, `best` stays NaN. `starts`: this is the first unit."""
    if starts:
        best[...], best_ids[...] = -np.inf, 0
    block, width = part.block("rows"), part.granule_rows
    start = scratch.mark()
    for i, granule in enumerate(weights):
        scratch.rewind(start)
        out = scratch.take((h.shape[0], width))
        multiply(h, granule, block, out, scratch)
        if softcap:
            out[...] = np.float32(softcap) * np.tanh(out / np.float32(softcap))
        first_id = (lo + i) * width
        keep = min(width, part.rows - first_id)
        logits[:, first_id : first_id + keep] = out[:, :keep]
        ids = np.argmax(out[:, :keep], axis=1)  # argmax gives the first NaN, where there is one
        largest = out[np.arange(len(out)), ids]
        better = (largest > best) | ((largest == best) & (first_id + ids < best_ids)) | np.isnan(largest)
        best_ids[better] = first_id + ids[better]
        best[better] = largest[better]
        # A NaN stays, since no comparison with it is true.
    scratch.rewind(start)
