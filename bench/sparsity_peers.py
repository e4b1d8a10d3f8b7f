"""Products of a 4096 × 4096 matrix with a vector where a share of the rows is 0, by libraries for sparse matrices
(PowerInfer, Figure 16): torch.sparse and scipy, in CSR and float32, and torch dense. Laying the matrix out as CSR is
not timed. There are several matrices, more than any cache holds, as in `bench.sparsity.Operator`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import matmul

import numpy as np
import scipy.sparse
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
        found["torch dense"][str(percent)] = _ms([partial(matmul, each, x) for each in dense], rounds)
        by_torch = [matrix.to_sparse_csr() for matrix in dense]
        found["torch.sparse"][str(percent)] = _ms([partial(matmul, each, x) for each in by_torch], rounds)
        del by_torch
        by_scipy = [scipy.sparse.csr_array(matrix.numpy()) for matrix in dense]
        found["scipy.sparse"][str(percent)] = _ms([partial(matmul, each, vector) for each in by_scipy], rounds)
    return found


def _ms(products: Sequence[Callable[[], object]], rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        start_s = time.perf_counter()
        for product in products:
            product()
        times.append(1e3 * (time.perf_counter() - start_s) / len(products))
    return statistics.median(times[1:])
