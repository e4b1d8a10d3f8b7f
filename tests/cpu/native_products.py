"""Calls of the native kernels on bare arrays: what tests of their formats share."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from penstock import _native
from penstock.kernels import cpu
from penstock.spec.parts import Block, Part
from penstock.store.quantize import encode

ISAS = list(cpu.available())
SCRATCH = np.zeros(1 << 22, np.uint8)
COMPUTE = {(isa, threads): _native.Compute(isa, threads) for isa in ISAS for threads in (1, 2, 3)}

# An FFN that computes all neurons, and nobody asks who fires.
ALL = {"skips": False, "fired": 0, "fired_stride": 0, "active": 0, "active_stride": 0, "level": 0.0, "values": 0}
ALL |= {"biases": 0, "bias_stride": 0}


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def accumulated(isa: str, weights: np.ndarray, block: Block, x: np.ndarray, exact: bool) -> np.ndarray:
    """The sum of products float32 [t, R] of granules uint8 [n, stride] with float32 rows [t, n · C]. Asserts that its
    bits are the same in one call and in two, on one thread, two and three, and for each row alone."""
    granules, t = len(weights), len(x)

    def run(x: np.ndarray, cuts: list[int], threads: int) -> np.ndarray:
        total = np.full((len(x), block.rows), np.nan, np.float32)
        for lo, hi in pairwise(cuts):
            COMPUTE[isa, threads].out(
                weights=address(weights[lo]), count=hi - lo, stride=weights.shape[1], matrix=cpu.matrix(block),
                a=address(x) + 4 * lo * block.cols, a_stride=x.shape[1], t=len(x), partial=address(total),
                starts_sum=lo == 0, exact=exact, scratch=address(SCRATCH), scratch_bytes=SCRATCH.nbytes,
            )  # fmt: skip
        return total

    whole = run(x, [0, granules], 1)
    assert np.array_equal(run(x, [0, granules], 3), whole)
    for threads in (2, 3):
        assert np.array_equal(run(x, sorted({0, granules // 2, granules}), threads), whole)
    alone = np.concatenate([run(x[i : i + 1].copy(), [0, granules], 1) for i in range(t)])
    assert np.array_equal(alone, whole)
    return whole


def random_granules(part: Part, seed: int) -> np.ndarray:
    """All granules of a part whose blocks all lie in tiles, uint8 [granules, granule_bytes]: random, and whole."""
    rng = np.random.default_rng(seed)
    weights = np.zeros((part.granules, part.granule_bytes), np.uint8)
    for granule in weights:
        for block in part.blocks:
            values = (rng.normal(size=(block.rows, block.cols)) * 0.1).astype(np.float32)
            granule[block.offset : block.offset + block.nbytes] = encode(values, block.format)
    return weights
