"""Passes of one shape whose sequences have other rows each, and want logits of others: one native program for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from penstock.graph.batch import Batch
from penstock.graph.passes import DECODE
from penstock.graph.tasks import Pass
from penstock.runtime.device.emulated import EmulatedDevice
from penstock.serve.session import Session
from penstock.spec.plan import Plan, Unit
from penstock.store.packed import Packed, open_packed
from tests.cpu.engines import make_model
from tests.plans import make_plan, resident_plan

SIZES = {"batch_seqs": 3, "chunk_rows": 16, "logits_rows": 8, "context": 64}
# The rows of three sequences in passes of one shape, and which rows of the batch want logits.
PASSES = [((3, 1, 5), (2, 8)), ((5, 3, 1), (7, 8)), ((1, 1, 7), (0, 4)), ((3, 3, 3), (5, 8)), ((3, 1, 5), (0, 1))]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return open_packed(make_model(tmp_path_factory.mktemp("models"), "qwen3", "int4"))


def steps(session: Session) -> Iterator[np.ndarray]:
    """The logits of each pass."""
    rng, starts = np.random.default_rng(4), [0, 0, 0]
    for rows, logits in PASSES:
        batch = Batch(0, (0, 1, 2), tuple(starts), rows, logits, (), ((2,), (1,), (0,)))
        yield session.step(Pass("mixed", (batch,), DECODE), [rng.integers(0, 200, 9).astype(np.int32)])[0].copy()
        starts = [start + count for start, count in zip(starts, rows, strict=True)]


def on_device(packed: Packed) -> Plan:
    units = [Unit(part.key, 0, part.granules, "gpu0", "gpu0", "gpu0") for part in packed.parts.values()]
    stage, homes = max(part.granule_bytes for part in packed.parts.values()), [("gpu0", "gpu0")]
    return make_plan(
        packed.spec, packed.weights, units, ring_bytes={}, stage_bytes=stage, main="gpu0",
        kv_homes=homes * len(packed.spec.layers), **SIZES,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_rows_are_data(packed: Packed, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside passes whose calls are lowered each time, and run one by one."""
    plain = resident_plan(packed.spec, packed.weights, **SIZES)
    with closing(Session(packed, plain)) as session:
        monkeypatch.setattr(session.lowering._repeats, "nothing_streams", False)
        expected = list(steps(session))
    plan, device = (plain, None) if where == "cpu" else (on_device(packed), EmulatedDevice(1 << 30))
    with closing(Session(packed, plan, device=device)) as session:
        found = list(steps(session))
        repeats = session.lowering._repeats
        assert len(repeats._of_form if where == "cpu" else repeats._known) == 1
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
