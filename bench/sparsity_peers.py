"""Products of a 4096 × 4096 matrix with a vector where a share of the rows is 0, by libraries for sparse matrices
(PowerInfer, Figure 16): torch.sparse and scipy, in CSR and float32, and torch dense. Laying the matrix out as CSR is
not timed. There are several matrices, more than any cache holds, as in `bench.sparsity.Operator`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import scipy.sparse  # type: ignore[import-untyped]
import torch


def milliseconds(
    size: int, copies: int, zeros: Sequence[int], threads: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Name → percent of zeros → milliseconds of a product, the median of `rounds`. Scipy's products have one thread."""
    torch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    vector = rng.normal(size=size).astype(np.float32)
    x = torch.from_numpy(vector)
    found: dict[str, dict[str, float]] = {"torch.sparse": {}, "scipy.sparse": {}, "torch dense": {}}
    for percent in zeros:
        dense = []
        for _ in range(copies):
            matrix = rng.normal(size=(size, size)).astype(np.float32)
            matrix[rng.random(size) < percent / 100] = 0
            dense.append(torch.from_numpy(matrix))
        found["torch dense"][str(percent)] = _ms(lambda i, m=dense: m[i] @ x, copies, rounds)
        by_torch = [matrix.to_sparse_csr() for matrix in dense]
        found["torch.sparse"][str(percent)] = _ms(lambda i, m=by_torch: m[i] @ x, copies, rounds)
        del by_torch
        by_scipy = [scipy.sparse.csr_array(matrix.numpy()) for matrix in dense]
        found["scipy.sparse"][str(percent)] = _ms(lambda i, m=by_scipy: m[i] @ vector, copies, rounds)
    return found


def _ms(call: Callable[[int], object], copies: int, rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        start_s = time.perf_counter()
        for i in range(copies):
            call(i)
        times.append(1e3 * (time.perf_counter() - start_s) / copies)
    return statistics.median(times[1:])
