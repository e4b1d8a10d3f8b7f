"""Rotary positions: tables of cos and sin for every kind of scaling. All implementations of `qkv` use them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from penstock.spec.model import Rope

Float32 = NDArray[np.float32]


def frequencies(rope: Rope, context: int) -> tuple[Float32, float]:
    """(inverse frequencies float32 [dims / 2], factor on cos and sin), as transformers computes them.

    `context`: the plan's KV room in tokens. longrope takes its long factors where that is beyond the original training
    length. (transformers switches by the longest position seen so far.)
    """
    exponents = np.arange(0, rope.dims, 2, dtype=np.float32) / np.float32(rope.dims)
    inv_freq: Float32 = (1.0 / np.power(rope.theta, exponents)).astype(np.float32)
    f = dict(rope.factors)
    if rope.kind == "linear":
        return (inv_freq / np.float32(f["factor"])).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(inv_freq, f), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, f)
    if rope.kind == "longrope":
        original = f["original_max_position_embeddings"]
        divisor = rope.long_factor if context > original else rope.short_factor
        return (inv_freq / np.asarray(divisor, np.float32)).astype(np.float32), f["attention_factor"]
    return inv_freq, 1.0


def tables(inv_freq: Float32, factor: float, positions: NDArray[np.int64]) -> tuple[Float32, Float32]:
    """cos and sin, float32 [T, dims / 2] each, of positions int64 [T]; `factor` multiplies both."""
    angles = positions.astype(np.float32)[:, None] * inv_freq[None, :]
    return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)


def rotate(x: Float32, cos: Float32, sin: Float32) -> None:
    """Rotates x float32 [T, heads, E] in place by cos and sin float32 [T, dims / 2]. Dimension i of the first half of
    the rotated dimensions turns with dimension i of the second half."""
    half = cos.shape[1]
    lo, hi = x[..., :half], x[..., half : 2 * half]
    turned = lo * cos[:, None] - hi * sin[:, None]
    hi[...] = hi * cos[:, None] + lo * sin[:, None]
    lo[...] = turned


def _llama3(inv_freq: Float32, f: dict[str, float]) -> Float32:
    """Frequencies of long wavelengths are divided by `factor`. Those of short wavelengths stay. Between them the two
    are blended."""
    wavelength = 2 * math.pi / inv_freq
    original = f["original_max_position_embeddings"]
    low, high = f["low_freq_factor"], f["high_freq_factor"]
    slowed = inv_freq / f["factor"]
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * slowed + smooth * inv_freq
    result = np.where(wavelength > original / low, slowed, inv_freq)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return np.where(between, blended, result).astype(np.float32)


def _yarn(rope: Rope, f: dict[str, float]) -> tuple[Float32, float]:
    factor, original = f["factor"], f["original_max_position_embeddings"]

    def turns_to_dim(turns: float) -> float:
        return rope.dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turns_to_dim(f.get("beta_fast", 32.0)), turns_to_dim(f.get("beta_slow", 1.0))
    if f.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    ramp = np.clip((np.arange(rope.dims // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    freqs = rope.theta ** (np.arange(0, rope.dims, 2, dtype=np.float32) / np.float32(rope.dims))
    kept = 1 - ramp
    inv_freq = (1.0 / (factor * freqs)) * (1 - kept) + (1.0 / freqs) * kept
    return inv_freq.astype(np.float32), f["attention_factor"]
