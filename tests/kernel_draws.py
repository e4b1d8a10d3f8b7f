"""Random layers and batches for tests of kernels, and fixed ones that every card runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from penstock.graph.batch import Batch
from penstock.spec.model import ACTIVATIONS, Attention, FfnSpec, Layer, ModelSpec, NormSpec, Rope
from penstock.spec.parts import Part
from penstock.store.quantize import encode, encode_rows

FORMATS = ["float32", "bfloat16", "float16", "int8", "int4", "int4-g32", "int4-g128", "int8-g8", "int4-g96"]
NEURON_FORMATS = [
    f"{name}-neurons" for name in ("float32", "bfloat16", "float16", "int8", "int4", "int4-g32", "int8-g96")
]
KV_FORMATS = ["float32", "float16", "bfloat16", "int8", "int4", "int8-g32", "int4-g32", "int4-g96"]


@st.composite
def layers(draw: st.DrawFn) -> ModelSpec:
    """One small odd layer, with anything that some model has: the interpreter takes a millisecond for each tile."""
    flag = st.booleans()
    head_dim = draw(st.sampled_from([4, 8, 18, 40, 64, 80]))
    kv_heads = draw(st.integers(1, 2)) if head_dim <= 40 else 1
    group = draw(st.sampled_from([1, 3, 4, 8])) if head_dim < 18 else draw(st.sampled_from([1, 2]))
    turn = Rope(1e4, draw(st.integers(1, head_dim // 2)) * 2) if draw(flag) else None
    a = Attention(
        kv_heads * group, kv_heads, head_dim, head_dim**-0.5, draw(st.sampled_from([0.0, 5.0])),
        draw(st.sampled_from([0, 1, 7, 70])), draw(flag), draw(flag), draw(flag), turn,
        sinks=draw(flag),
    )  # fmt: skip
    gated = draw(flag)
    activation = draw(st.sampled_from([name for name in ACTIVATIONS if gated or name != "swiglu_clamped"]))
    ffn = FfnSpec(draw(st.sampled_from([5, 64, 100])), activation, gated, draw(flag), draw(flag))
    layer = Layer(a, ffn, draw(flag), draw(flag), draw(flag))
    norm = NormSpec(draw(st.sampled_from(["rms", "layer"])), 1e-5, draw(st.sampled_from([0.0, 1.0])), draw(flag))
    d = draw(st.sampled_from([1, 7, 40, 70]))
    d_embed = draw(st.sampled_from([d, d, 24]))
    return ModelSpec(
        "llama", draw(st.sampled_from(["float32", "bfloat16"])), draw(st.integers(1, 150)), d, d_embed, 4096, (layer,),
        norm, draw(flag), draw(flag), embed_scale=draw(st.sampled_from([1.0, 3.5, 1e-3])),
        position_rows=draw(st.sampled_from([0, 0, 202])), position_offset=2,
        logit_softcap=draw(st.sampled_from([0.0, 2.0])),
    )  # fmt: skip


def _fixed(
    head_dim: int, kv_heads: int, group: int, window: int, gated: bool, neurons: int, d: int, norm: str, flags: bool
) -> ModelSpec:
    turn = Rope(1e4, head_dim) if flags else None
    a = Attention(
        kv_heads * group, kv_heads, head_dim, head_dim**-0.5, 0.0, window, not flags, not flags, flags, turn,
        sinks=not flags,
    )  # fmt: skip
    layer = Layer(a, FfnSpec(neurons, "silu" if gated else "gelu", gated, not flags, not flags), True, flags, not flags)
    return ModelSpec(
        "llama", "float32", 150, d, d, 4096, (layer,), NormSpec(norm, 1e-5), True, flags, logit_softcap=2.0
    )


def _together(spec: ModelSpec) -> ModelSpec:
    """The same with all heads normed together."""
    layer = spec.layers[0]
    return replace(spec, layers=(replace(layer, attention=replace(layer.attention, norms_all_heads=True)),))


# Few enough for a card, where every shape is compiled: (model, batch, weights, KV).
FIXED = [
    (_fixed(40, 2, 4, 0, True, 172, 200, "rms", True), Batch(0, (0, 1), (63, 5), (1, 1), (0, 1)), "int4", "int4"),
    (_fixed(80, 1, 8, 70, False, 100, 130, "layer", False), Batch(0, (0,), (100,), (17,), (3, 16)), "int8", "int8"),
    (_fixed(96, 2, 1, 7, True, 64, 70, "rms", True), Batch(0, (0, 1), (1, 64), (33, 9), (41,)), "bfloat16", "bfloat16"),
    (_fixed(128, 1, 2, 0, True, 172, 256, "rms", True), Batch(0, (0,), (160,), (4,), (3,)), "int4-g96", "int4-g32"),
    (_fixed(64, 1, 4, 0, True, 64, 96, "rms", True), Batch(0, (0,), (0,), (5,), (4,)), "float32", "float32"),
    (_fixed(64, 1, 4, 0, False, 64, 96, "layer", False), Batch(0, (0, 1), (5, 9), (2, 1), (2,)), "float16", "float16"),
    (_together(_fixed(40, 2, 4, 0, True, 172, 200, "rms", True)), Batch(0, (0,), (9,), (3,), (2,)), "int4", "float16"),
]


def with_relu(spec: ModelSpec) -> ModelSpec:
    """The model with ReLU, whose FFNs may lie neuron by neuron."""
    (layer,) = spec.layers
    return replace(spec, layers=(replace(layer, ffn=replace(layer.ffns[0], activation="relu")),))


@st.composite
def batches(draw: st.DrawFn, most_rows: int = 33) -> Batch:
    """Up to three sequences, each with some rows after some context; few of them reach over a page."""
    n = draw(st.integers(1, 3))
    rows = tuple(draw(st.sampled_from([r for r in (1, 1, 2, 3, 5, 9, 17, 33) if r <= most_rows])) for _ in range(n))
    start = tuple(draw(st.sampled_from([0, 1, 5, 62, 63, 64, 100])) for _ in range(n))
    wanted = draw(st.sets(st.integers(0, sum(rows) - 1), min_size=1))
    return Batch(0, tuple(range(n)), start, rows, tuple(sorted(wanted)))


def granules_of(part: Part, rng: np.random.Generator) -> np.ndarray:
    """Random granules uint8 [n, granule_bytes]; what pads a tail is zero, as `pack` writes it."""
    found = np.zeros((part.granules, part.granule_bytes), np.uint8)
    for g, granule in enumerate(found):
        n = part.rows_of(g, g + 1)
        for block in part.blocks:
            values = rng.normal(size=(block.rows, block.cols)).astype(np.float32)
            if block.tiled:
                values *= block.cols**-0.5
            if block.stride:
                encode_rows(values[:n], block, granule)
                continue
            if block.name == "down":
                values[:, n:] = 0
            elif part.kind in ("ffn", "experts", "embed", "head") and block.rows > 1:
                values[n:] = 0
            elif part.kind in ("ffn", "experts"):
                values[:, n:] = 0
            raw = encode(values, block.format, tiled=block.tiled)
            granule[block.offset : block.offset + block.nbytes] = raw.view(np.uint8).reshape(-1)
    return found
