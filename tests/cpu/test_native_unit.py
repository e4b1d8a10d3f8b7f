"""AMX's kernels over a model of their instructions: the bits of the AVX-512 kernels, whatever shares a call. The
instructions themselves run only where the processor has them."""

from __future__ import annotations

import numpy as np
import pytest

from penstock import _native
from penstock.cli.options import Machine
from penstock.errors import BadRequest
from penstock.kernels import cpu
from penstock.spec.format import parse_format
from penstock.spec.parts import Block
from tests.cpu.native_products import ALL, SCRATCH, address
from tests.cpu.test_native_kernels import encoded

pytestmark = pytest.mark.skipif("avx512" not in cpu.available(), reason="AVX-512 computes what is not in tiles")
FAMILIES = ["amx-model"] + (["amx"] if "amx" in cpu.nameable() else [])
FORMATS = ["int4", "int4-g32", "int4-g128", "int8", "int4-g16", "int4-g8"]  # the last: the vectors compute it


@pytest.mark.parametrize("isa", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("granules", "rows", "cols", "t", "threads"), [(2, 40, 200, 16, 1), (1, 64, 128, 53, 3), (3, 17, 70, 37, 2)]
)
def test_project_has_the_bits_of_vectors(
    isa: str, name: str, granules: int, rows: int, cols: int, t: int, threads: int
) -> None:
    fmt, rng = parse_format(name), np.random.default_rng(3)
    weights, _ = encoded(rng.normal(size=(granules, rows, cols)).astype(np.float32), fmt, granules)
    x = (rng.normal(size=(t, cols)) * 3).astype(np.float32)
    m = cpu.matrix(Block("up", rows, cols, fmt, 0))

    def run(family: str, part: np.ndarray) -> np.ndarray:
        out = np.full((len(part), granules * rows), np.nan, np.float32)
        _native.Compute(family, threads).project(
            weights=address(weights), count=granules, stride=weights.shape[1], matrix=m, x=address(part),
            x_stride=cols, t=len(part), out=address(out), out_stride=out.shape[1], out_cols=out.shape[1],
            exact=False, scratch=address(SCRATCH), scratch_bytes=SCRATCH.nbytes,
        )  # fmt: skip
        return out

    want = run("avx512", x)
    assert np.isfinite(want).all() and np.array_equal(run(isa, x), want)
    assert np.array_equal(run(isa, x[3:20].copy()), want[3:20])


@pytest.mark.parametrize("isa", FAMILIES)
@pytest.mark.parametrize("name", ["int4", "int4-g32", "int8"])
def test_ffn_has_the_bits_of_vectors(isa: str, name: str) -> None:
    fmt, rng, d, granules, t = parse_format(name), np.random.default_rng(5), 192, 5, 70
    parts = [encoded(rng.normal(size=(granules, *shape)).astype(np.float32) * 0.2, fmt, granules)[0]
             for shape in ((64, d), (64, d), (d, 64))]  # fmt: skip
    weights = np.concatenate(parts, axis=1)
    at = np.cumsum([0] + [p.shape[1] for p in parts])
    gate, up = (_native.Matrix(64, d, fmt.kind, fmt.group, int(at[i])) for i in (0, 1))
    shape = _native.FfnShape(gate, up, _native.Matrix(d, 64, fmt.kind, fmt.group, int(at[2])), "silu", 0, 0)
    h = rng.normal(size=(t, d)).astype(np.float32)
    results = []
    for family, threads in (("avx512", 1), (isa, 1), (isa, 3)):
        got, pending = np.full((t, d), np.nan, np.float32), np.zeros((t, d), np.float32)
        _native.Compute(family, threads).ffn(
            weights=address(weights), count=granules, stride=weights.shape[1], shape=shape, h=address(h), t=t,
            partial=address(got), pending=address(pending), granule=0, starts_sum=True, continues_four=False,
            leaves_four=False, **ALL, exact=False, scratch=address(SCRATCH), scratch_bytes=SCRATCH.nbytes,
        )  # fmt: skip
        results.append(got)
    assert np.isfinite(results[0]).all()
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


def test_it_is_taken_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "UNPROVEN_ISAS", ("amx-model",))  # in place of AMX, which may not be here
    assert "amx-model" not in cpu.available() and cpu.best_isa()[0] == "avx512"
    Machine(isa="amx-model").prepare()
    monkeypatch.setattr(cpu, "UNPROVEN_ISAS", ())
    with pytest.raises(BadRequest, match="this processor and build have avx512"):
        Machine(isa="amx-model").prepare()
