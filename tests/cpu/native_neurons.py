"""Calls of the native kernels on FFNs that lie neuron by neuron, and on predictors: what their tests share."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from penstock import _native
from penstock.graph.scratch_native import predict_bytes
from penstock.kernels import cpu
from penstock.kernels.reference import dense
from penstock.kernels.reference.matrix import Scratch
from penstock.serve.fitting import Fitted
from penstock.spec.format import parse_format
from penstock.spec.model import FfnSpec
from penstock.spec.parts import Part, _ffn_part
from penstock.store.quantize import encode, encode_rows

FORMATS = ["float32", "bfloat16", "float16", "int8", "int8-g32", "int4", "int4-g32", "int4-g96"]
KERNELS = {(isa, threads): _native.Compute(isa, threads) for isa in cpu.available() for threads in (1, 3)}


def ffn_part(neurons: int, d: int, gated: bool, bias: bool, name: str) -> tuple[Part, FfnSpec]:
    ffn = FfnSpec(neurons, "relu", gated, bias, False)
    return _ffn_part(0, "ffn", ffn, d, parse_format(name)), ffn


def granules(part: Part, rng: np.random.Generator, live: float) -> np.ndarray:
    """Random weights [granules, granule_bytes] of which about a share `live` of the neurons fires for a row. Some
    granules have none at all."""
    out = np.zeros((part.granules, part.granule_bytes), np.uint8)
    for g, granule in enumerate(out):
        n = part.rows_of(g, g + 1)
        for block in part.blocks:
            values = rng.normal(size=(block.rows, block.cols)).astype(np.float32) * 0.3
            if block.name == part.blocks[0].name and g % 3 == 1:
                values = -np.abs(values)  # with inputs of one sign none of them fires
            if block.name in ("gate_bias", "up_bias"):
                values[:, n:] = 0
                values -= np.float32(2 * (1 - live)) * (values != 0)
            elif block.name == "down" and not block.stride:
                values[:, n:] = 0
            else:
                values[n:] = 0
            if block.stride:
                encode_rows(values[:n], block, granule)
            elif block.tiled:
                granule[block.offset : block.offset + block.nbytes] = encode(values, block.format)
            else:
                granule[block.offset : block.offset + block.nbytes] = values.view(np.uint8).reshape(-1)
    return out


def run(
    on: _native.Compute, part: Part, ffn: FfnSpec, weights: np.ndarray, h: np.ndarray, cuts: tuple[int, ...],
    skips: bool, scratch_bytes: int | None = None, active: np.ndarray | None = None, level: float = 0.0,
    exact: bool = True,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(partial [T, D], fired [T, neurons]) of an FFN that is computed in units that begin at granules `cuts`. `active`:
    uint8 [T, neurons in whole granules]."""
    t, d = h.shape
    partial, pending = np.full((2, t, d), np.nan, np.float32)
    fired = np.full((t, part.granules * part.granule_rows), 7, np.uint8)
    shape = cpu.ffn_shape(part, ffn)
    scratch = np.empty(scratch_bytes or _native.ffn_scratch(shape, part.granules, t), np.uint8)
    edges = (0, *cuts, part.granules)
    for lo, hi in pairwise(edges):
        on.ffn(
            weights=weights[lo:].ctypes.data, count=hi - lo, stride=part.granule_bytes, shape=shape, h=h.ctypes.data,
            t=t, partial=partial.ctypes.data, pending=pending.ctypes.data, granule=lo, starts_sum=lo == 0,
            continues_four=lo % part.sum_granules != 0, leaves_four=hi % part.sum_granules != 0 and hi < part.granules,
            skips=skips, fired=fired.ctypes.data, fired_stride=fired.shape[1],
            level=level, active=0 if active is None else active.ctypes.data,
            active_stride=0 if active is None else active.shape[1], exact=exact, values=0, biases=0, bias_stride=0,
            scratch=scratch.ctypes.data, scratch_bytes=scratch.nbytes,
        )  # fmt: skip
    return partial, fired


def reference(
    part: Part, ffn: FfnSpec, weights: np.ndarray, h: np.ndarray, active: np.ndarray | None = None
) -> np.ndarray:
    partial, pending = np.zeros((2, *h.shape), np.float32)
    out = dense.FfnSum(partial, pending, True, False, False)
    dense.ffn(weights, part, 0, ffn, h, out, Scratch(np.empty(1 << 23, np.uint8)), active)
    return partial


def as_rounded(h: np.ndarray, part: Part) -> np.ndarray:
    """Activations float32 [T, D] as kernels round them: each group to 127 steps of its largest. A product with them
    alone may be far from that with `h`, where it nearly cancels."""
    t, d = h.shape
    group = part.blocks[0].format.group
    padded = np.zeros((t, -(-d // group), group), np.float32)
    padded.reshape(t, -1)[:, :d] = h
    most = np.abs(padded).max(axis=2, keepdims=True)
    steps = np.rint(padded * (np.float32(127) / np.where(most > 0, most, 1)))
    return np.ascontiguousarray((steps * (most / 127)).reshape(t, -1)[:, :d].astype(np.float32))


def drawn_mask(share: float | None, part: Part, t: int, rng: np.random.Generator) -> np.ndarray | None:
    """uint8 [T, neurons in whole granules], of which about a share is active; None for None."""
    return None if share is None else (rng.random((t, part.granules * 64)) < share).astype(np.uint8)


def random_predictor(part: Part, neurons: int, rng: np.random.Generator, shift: float = 0.0) -> Fitted:
    """`shift`: added to what is above 0 where a neuron is active."""
    d, rank = part.block("hidden").cols, part.block("hidden").rows
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return Fitted(normal(d, rank) * 0.3, normal(rank) * 0.1, normal(rank, neurons), normal(neurons) + np.float32(shift))


def predicted(on: _native.Compute, part: Part, granule: np.ndarray, h: np.ndarray, exact: bool = True) -> np.ndarray:
    hidden, neurons = (cpu.matrix(part.block(name)) for name in ("hidden", "neurons"))
    active = np.full((len(h), part.block("neurons").rows), 7, np.uint8)
    scratch = np.empty(_native.predict_scratch(hidden, neurons, len(h)), np.uint8)
    assert scratch.nbytes == predict_bytes(part, len(h))
    on.predict(
        weights=granule.ctypes.data, hidden=hidden, neurons=neurons, hidden_bias=part.block("hidden_bias").offset,
        neurons_bias=part.block("neurons_bias").offset, h=h.ctypes.data, t=len(h), active=active.ctypes.data,
        exact=exact, scratch=scratch.ctypes.data, scratch_bytes=scratch.nbytes,
    )  # fmt: skip
    return active
