"""The part `ops` of `bench.sparsity`: 4096 × 4096 weights that a share of zeros multiplies, as rows of neurons, beside
the dense kernel (PowerInfer, Figure 16)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from bench.sparsity_models import tell
from bench.sparsity_peers import milliseconds
from penstock import _native
from penstock.kernels import cpu
from penstock.spec.format import parse_format
from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec
from penstock.spec.parts import Part, parts
from penstock.store.quantize import encode, encode_rows

ZEROS = (90, 50, 10)  # percent
FORMATS = ("int4", "float16")
SIZE, COPIES = 4096, 8  # of the matrix; so many of them are larger than any cache

Figures = dict[str, float]


def operators(rounds: int, threads: int, without: Collection[str]) -> Iterator[dict[str, Any]]:
    """The keys `ops` and `ops_by_format`, then `ops_peers`."""
    by_format: dict[str, Figures] = {}
    for name in FORMATS:
        operator = Operator(name, threads)
        operator.round()  # not counted
        by_format[name] = median_of([operator.round() for _ in range(4 * rounds)])
        tell(f"{name}: { ({k: round(v, 3) for k, v in by_format[name].items()}) }")
        of_int4 = by_format.get("int4", {})
        yield {"ops": {str(zeros): of_int4.get(str(zeros)) for zeros in ZEROS}, "ops_by_format": by_format}
        del operator
    yield {"ops_peers": milliseconds(SIZE, COPIES // 2, ZEROS, threads, rounds, without)}


def median_of(columns: Sequence[Figures]) -> Figures:
    return {name: statistics.median(column[name] for column in columns) for name in columns[0]}


class Operator:
    """The second matrix of FFNs without a gate, [SIZE, SIZE], in rows of neurons of which a share fires. What the first
    matrix takes is measured with no neuron firing, and taken away."""

    def __init__(self, name: str, threads: int) -> None:
        self._compute = _native.Compute(cpu.best_isa()[0], threads)
        self._ffn = FfnSpec(SIZE, "relu", False, True, False)
        layer = Layer(Attention(1, 1, 64, 1.0), self._ffn)
        spec = ModelSpec("opt", "float32", 64, SIZE, SIZE, 64, (layer,), NormSpec("layer", 1e-5), True, True)
        self._part = next(p for p in parts(spec, parse_format(f"{name}-neurons")) if p.kind == "ffn")
        self._tiled = next(p for p in parts(spec, parse_format(name)) if p.kind == "ffn")
        self._rng = np.random.default_rng(0)
        self._neurons, self._dense = (
            [self._weights(part) for _ in range(COPIES)] for part in (self._part, self._tiled)
        )
        self._h = self._rng.normal(size=(1, SIZE)).astype(np.float32)
        self._out = np.zeros((2, 1, SIZE), np.float32)
        shape = cpu.ffn_shape(self._part, self._ffn)
        self._scratch = np.empty(8 << 20, np.uint8)
        assert _native.ffn_scratch(shape, self._part.granules, 1) <= self._scratch.nbytes

    def _weights(self, part: Part) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """One random granule, again and again."""
        granule = np.zeros(part.granule_bytes, np.uint8)
        for block in part.blocks[:2]:
            values = self._rng.normal(size=(block.rows, block.cols)).astype(np.float32) * SIZE**-0.5
            if block.stride:
                encode_rows(values, block, granule)
            else:
                granule[block.offset : block.offset + block.nbytes] = encode(values, block.format)
        return np.tile(granule, (part.granules, 1))

    def _fires(self, share: float) -> None:
        """Sets biases so that this share of the neurons fires, whatever the input."""
        at = self._part.block("up_bias").offset
        for weights in self._neurons:
            fires = self._rng.random((self._part.granules, self._part.granule_rows)) < share
            weights[:, at : at + 4 * fires.shape[1]] = np.where(fires, 10, -10).astype(np.float32).view(np.uint8)

    def _time(self, call: Callable[[int], None]) -> float:
        start_s = time.perf_counter()
        for i in range(COPIES):
            call(i)
        return (time.perf_counter() - start_s) / COPIES

    def _sparse(self, i: int) -> None:
        partial, pending = (at.ctypes.data for at in self._out)
        self._compute.ffn(
            weights=self._neurons[i].ctypes.data, count=self._part.granules, stride=self._part.granule_bytes,
            shape=cpu.ffn_shape(self._part, self._ffn), h=self._h.ctypes.data, t=1, partial=partial, pending=pending,
            granule=0, starts_sum=True, continues_four=False, leaves_four=False, skips=True, fired=0, fired_stride=0,
            active=0, active_stride=0, level=0.0, values=0, biases=0,
            bias_stride=0,
            exact=False, scratch=self._scratch.ctypes.data, scratch_bytes=self._scratch.nbytes,
        )  # fmt: skip

    def _tiles(self, i: int) -> None:
        up = self._tiled.block("up")
        self._compute.project(
            weights=self._dense[i].ctypes.data, count=self._tiled.granules, stride=self._tiled.granule_bytes,
            matrix=cpu.matrix(up), x=self._h.ctypes.data, x_stride=SIZE, t=1, out=self._out.ctypes.data,
            out_stride=SIZE, out_cols=SIZE, exact=False, scratch=self._scratch.ctypes.data,
            scratch_bytes=self._scratch.nbytes,
        )  # fmt: skip

    def round(self) -> Figures:
        """Time at so many percent of zeros over the dense kernel's, and that in milliseconds."""
        dense_s = self._time(self._tiles)
        self._fires(0)
        first_s = self._time(self._sparse)
        found = {}
        for zeros in ZEROS:
            self._fires(1 - zeros / 100)
            found[str(zeros)] = (self._time(self._sparse) - first_s) / dense_s
        return {**found, "dense_ms": 1e3 * dense_s}
