"""The pieces of `bench.pipo`: integer weights as floats, the session of an engine that takes less care, the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.pipo import __main__ as pipo
from bench.pipo.rounds import Row
from bench.pipo.settings import FLEXGEN, OURS, Setting, Workshop, guessed_machine
from bench.pipo.tables import QUICK
from bench.predict import Ceilings
from bench.report import Report
from penstock import _native
from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.verify import verify
from penstock.kernels import cpu
from penstock.serve.session import Running, Session
from penstock.spec.format import Format, parse_format
from penstock.spec.parts import Block
from penstock.store.packed import open_packed
from penstock.store.quantize import decode, encode
from penstock.store.synth import synth
from penstock.units import MIB
from tests.cpu.configs import TINY_CONFIGS

COMPUTE = {(isa, threads): _native.Compute(isa, threads) for isa in cpu.available() for threads in (1, 3)}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("pipo")
    (folder / "llama.json").write_text(TINY_CONFIGS["llama"])
    synth(folder / "llama.json", folder / "model", parse_format("int4"))
    return Workshop(open_packed(folder / "model"), guessed_machine(), folder)


@pytest.mark.parametrize("isa", cpu.available())
@given(
    st.sampled_from(["int4", "int4-g32", "int4-g8", "int8", "int8-g8"]), st.sampled_from(["float32", "float16"]),
    st.integers(1, 3), st.integers(1, 70), st.integers(1, 150), st.sampled_from([1, 3]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_widen(isa: str, name: str, to: str, granules: int, rows: int, cols: int, threads: int, seed: int) -> None:
    """To the bit what the reference decodes, rounded once where that is wanted; and not a byte beside it."""
    fmt, target = parse_format(name), Format(to)
    values = np.random.default_rng(seed).normal(size=(granules, rows, cols)).astype(np.float32)
    packed = np.stack([np.pad(encode(v, fmt), (64, 0)) for v in values])
    wide = np.full((granules, 128 + target.matrix_bytes(rows, cols)), 7, np.uint8)
    COMPUTE[isa, threads].widen(
        weights=packed.ctypes.data, count=granules, stride=packed.shape[1],
        matrix=cpu.matrix(Block("up", rows, cols, fmt, 64)), wide=cpu.matrix(Block("up", rows, cols, target, 64)),
        out=wide.ctypes.data, out_stride=wide.shape[1],
    )  # fmt: skip
    assert (wide[:, :64] == 7).all() and (wide[:, -64:] == 7).all()
    for raw, found in zip(packed, wide, strict=True):
        want = encode(decode(raw[64:], rows, cols, fmt), target)
        np.testing.assert_array_equal(found[64:-64], want)


def test_widen_refuses() -> None:
    four, eight = (_native.Matrix(16, 64, kind, 64, 0) for kind in ("int4", "int8"))
    compute = COMPUTE[cpu.available()[0], 1]
    nowhere = {"weights": 0, "count": 1, "stride": 0, "out": 0, "out_stride": 0}
    with pytest.raises(ValueError, match="float32 or float16"):
        compute.widen(matrix=four, wide=eight, **nowhere)
    with pytest.raises(ValueError, match="shapes"):
        compute.widen(matrix=four, wide=_native.Matrix(16, 65, "float16", 0, 0), **nowhere)


STEPS = (
    replace(FLEXGEN, batch=2, context=64, prompt=9),
    replace(FLEXGEN, batch=2, context=64, prompt=9, order="overlapped", plain=False),
    replace(OURS, batch=2, context=64, prompt=9, order="saving", plain=True),
    replace(OURS, batch=2, context=64, prompt=9, order="saving", kv_home="disk"),
)


@pytest.mark.parametrize("setting", STEPS)
def test_the_same_logits(shop: Workshop, setting: Setting) -> None:
    """As of a plain session with everything in memory: to the bit, or but for weights rounded to float16."""
    ids = np.arange(9, dtype=np.int32)

    def logits(session: Session) -> np.ndarray:
        for p in passes.prefill(session.plan, 0, len(ids), passes.DECODE):
            session.step(p, [ids])
        return session.step(passes.decode(session.plan, [0], [len(ids)], None), [ids[:1]])[0].copy()

    plan = shop.plan(setting)
    lowering = Lowering(plan)
    wanted = [*passes.prefill(plan, 0, 9, passes.DECODE), passes.decode(plan, [0], [9], None)]
    assert verify([task for p in wanted for task in lowering.step(p)], plan.arenas)
    session, oracle = (
        shop.open(setting),
        Session(
            shop.packed, shop.plan(replace(OURS, resident=1.0, batch=2, context=64)), Running(exact=setting.dequantise)
        ),
    )
    found, want = logits(session), logits(oracle)
    session.close()
    oracle.close()
    near = 2e-3 * np.abs(want).max() if setting.dequantise else 0
    np.testing.assert_allclose(found, want, rtol=0, atol=near)


def test_all_tables(shop: Workshop, tmp_path: Path) -> None:
    shop = replace(shop, folder=tmp_path)
    names = [*pipo.RUNS, *pipo.READS]
    found: dict[str, Any] = {}
    report = Report()
    pipo.measure(shop, QUICK, names, MIB, lambda: Ceilings(1.0, 1.0, 1.0), report, found)
    assert not report.failed and found.keys() == {*names, "ceilings", "table_took_s"}
    assert found["ablation"][0]["name"] == "FlexGen's order"
    assert all(
        row["decode_tokens_per_s"]["median"] > 0 for name in ("homes", "batches", "outputs") for row in found[name]
    )
    assert not list(tmp_path.iterdir())


def test_a_table_that_fails_leaves_the_others(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> list[Row]:
        raise MemoryError("no room")

    monkeypatch.setitem(pipo.RUNS, "homes", fails)
    monkeypatch.setitem(pipo.RUNS, "outputs", lambda *_: [{"name": "a row"}])
    found: dict[str, Any] = {}
    report = Report()
    shop = replace(shop, folder=tmp_path)
    pipo.measure(shop, QUICK, ["homes", "outputs"], MIB, lambda: Ceilings(1.0, 1.0, 1.0), report, found)
    assert report.failed == {"homes": "MemoryError: no room"} and found["outputs"] == [{"name": "a row"}]
    assert found["ceilings"]["disk_read_bytes_per_s"]["median"] == 0.0 and "homes" not in found
    assert "homes failed, and the bench goes on" in capsys.readouterr().err
