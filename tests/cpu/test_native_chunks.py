"""Calls of more rows than are laid out at a time: the last rows are what they are alone, however few are left."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.kernels import cpu
from penstock.spec.format import parse_format
from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec
from penstock.spec.parts import Block, parts
from penstock.store.quantize import encode
from tests.cpu.native_products import ALL, COMPUTE, ISAS, SCRATCH, accumulated, address, random_granules

CHUNK = 144  # a whole number of chunks of so many columns: three of 48 rows exact, one rounded
COLUMNS, GRANULES = 2816, 2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["int4", "int8", "bfloat16"])
def test_an_ffn_of_some_rows_beyond_whole_chunks(isa: str, exact: bool, name: str) -> None:
    """With 1 to 8 rows left, sums of `down` lay over each other: a prompt's last tokens came out wrong."""
    layer = Layer(Attention(2, 2, COLUMNS // 2, 1.0), FfnSpec(64 * GRANULES, "silu", True))
    norm = NormSpec("rms", 1e-5)
    spec = ModelSpec("llama", "float32", 64, COLUMNS, COLUMNS, 64, (layer,), norm, True, True)
    part = next(p for p in parts(spec, parse_format(name)) if p.kind == "ffn")
    weights = random_granules(part, 3)
    shape = cpu.ffn_shape(part, layer.ffns[0])
    h = np.random.default_rng(5).normal(size=(2 * CHUNK + 3, COLUMNS)).astype(np.float32)

    def run(rows: np.ndarray) -> np.ndarray:
        got, pending = np.full((len(rows), COLUMNS), np.nan, np.float32), np.zeros((len(rows), COLUMNS), np.float32)
        COMPUTE[isa, 3].ffn(
            weights=address(weights), count=GRANULES, stride=part.granule_bytes, shape=shape, h=address(rows),
            t=len(rows), partial=address(got), pending=address(pending), granule=0, starts_sum=True,
            continues_four=False, leaves_four=False, **ALL, exact=exact, scratch=address(SCRATCH),
            scratch_bytes=SCRATCH.nbytes,
        )  # fmt: skip
        return got

    for left in (1, 2, 5, 8, 9, CHUNK + 3):
        alone = np.concatenate([run(h[CHUNK + i : CHUNK + i + 1].copy()) for i in range(max(0, left - 9), left)])
        assert np.array_equal(run(h[: CHUNK + left].copy())[-len(alone) :], alone), left


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("exact", [True, False])
def test_projections_of_some_rows_beyond_whole_chunks(isa: str, exact: bool) -> None:
    rng = np.random.default_rng(4)
    raw = encode(rng.normal(size=(96, COLUMNS)).astype(np.float32), parse_format("int4"))
    weights = raw[None, :]
    x = rng.normal(size=(CHUNK + 8, COLUMNS)).astype(np.float32)
    for left in (1, 3, 8):
        rows = x[: CHUNK + left].copy()
        accumulated(isa, weights, Block("o", 96, COLUMNS, parse_format("int4"), 0), rows, exact)
