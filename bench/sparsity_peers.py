"""Products of a 4096 × 4096 matrix with a vector where a share of the rows is 0, by libraries for sparse matrices
(PowerInfer, Figure 16): torch.sparse and scipy, in CSR and float32, and torch dense. Laying the matrix out as CSR is
not timed. There are several matrices, more than any cache holds, as in `bench.sparsity_ops.Operator`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import matmul
from typing import Any

import numpy as np

Matrices = list[np.ndarray[Any, np.dtype[np.float32]]]
# What each library needs to be there (`bench.throughput_engines.MODULES`).
LIBRARIES = {"torch.sparse": "torch", "scipy.sparse": "scipy", "torch dense": "torch"}


def milliseconds(
    size: int, copies: int, zeros: Sequence[int], threads: int, rounds: int, without: Collection[str] = ()
) -> dict[str, dict[str, float] | None]:
    """Name → percent of zeros → milliseconds of a product, the median of `rounds`. Scipy's products have one thread.
    `without`: what is not installed; libraries that need it are None."""
    rng = np.random.default_rng(0)
    vector = rng.normal(size=size).astype(np.float32)
    found: dict[str, dict[str, float] | None] = {
        name: None if needs in without else {} for name, needs in LIBRARIES.items()
    }
    for percent in zeros:
        dense = []
        for _ in range(copies):
            matrix = rng.normal(size=(size, size)).astype(np.float32)
            matrix[rng.random(size) < percent / 100] = 0
            dense.append(matrix)
        for name, of in found.items():
            if of is not None:
                products = (
                    _by_scipy(dense, vector) if name == "scipy.sparse" else _by_torch(name, dense, vector, threads)
                )
                of[str(percent)] = _ms(products, rounds)
    return found


def _by_torch(
    name: str, dense: Matrices, vector: np.ndarray[Any, np.dtype[np.float32]], threads: int
) -> list[Callable[[], object]]:  # fmt: skip
    import torch

    torch.set_num_threads(threads)
    x, matrices = torch.from_numpy(vector), [torch.from_numpy(matrix) for matrix in dense]
    if name == "torch.sparse":
        matrices = [matrix.to_sparse_csr() for matrix in matrices]
    return [partial(matmul, matrix, x) for matrix in matrices]


def _by_scipy(dense: Matrices, vector: np.ndarray[Any, np.dtype[np.float32]]) -> list[Callable[[], object]]:
    import scipy.sparse

    return [partial(matmul, scipy.sparse.csr_array(matrix), vector) for matrix in dense]


def _ms(products: Sequence[Callable[[], object]], rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        start_s = time.perf_counter()
        for product in products:
            product()
        times.append(1e3 * (time.perf_counter() - start_s) / len(products))
    return statistics.median(times[1:])
