"""The GPU's runtime on the processor: every placement through torch tensors gives what all in memory gives.

Streams, pinned memory and graphs need a card (tests/gpu/test_device.py); lanes here do a task at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DoesNotFit
from penstock.graph import passes
from penstock.graph.batch import Batch
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.kernels.gpu.choose import choose
from penstock.runtime.device.cuda.bind import TorchBinding
from penstock.runtime.device.cuda.device import TorchDevice
from penstock.runtime.device.cuda.tables import DeviceTables
from penstock.serve.session import Session
from penstock.spec.format import Format
from penstock.spec.parts import parts
from penstock.spec.plan import DeviceRows, Plan, Unit
from penstock.store.packed import Packed
from tests.cpu.placements import FORMATS, KV_FORMATS, NEAR, Logits, Models, require_near, run
from tests.cpu.test_emulated import all_on_device
from tests.plans import device_plans, make_plan, page_orders, resident_plan
from tests.pure.machine import model

CPU = torch.device("cpu")
ROOMY = 4 << 30
F32 = Format("float32")


def on_torch(packed: Packed, plan: Plan, **how: object) -> np.ndarray:
    return run(packed, plan, device=TorchDevice(CPU, ROOMY, 0), **how)


@pytest.mark.fuzz
@given(st.data())
def test_any_placement(models: Models, exact: Logits, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(models)))
    packed, kv = models[name], data.draw(st.sampled_from(KV_FORMATS))
    plan = data.draw(device_plans(packed.spec, packed.weights, cached=True, batch_seqs=2, kv=kv))
    plan, order = data.draw(page_orders(plan))
    require_near(on_torch(packed, plan, order=order, exact=True, poisoned=True), exact[name, kv], NEAR[kv])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_all_on_the_device(models: Models, exact: Logits, name: str) -> None:
    packed = models[name]
    assert np.abs(on_torch(packed, all_on_device(packed)) - exact[name, "float32"]).max() <= NEAR["float32"]


def test_the_cap_counts_the_context(models: Models) -> None:
    packed = models["llama"]
    plan = all_on_device(packed)
    need = plan.tier_bytes()["gpu0"] + 1000
    Session(packed, plan, device=TorchDevice(CPU, need, 1000)).close()
    with pytest.raises(DoesNotFit, match="device memory of"):
        Session(packed, plan, device=TorchDevice(CPU, need - 1, 1000))


def test_tables_are_filled_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU takes rows of a prompt, calls of a layer's FFN are for some of a batch's rows. The link may read
    the tables that were staged for attention until the pass ends, so nothing may be staged for those calls."""
    spec = model(layers=3, d=64, heads=4, kv_heads=2, neurons=200, vocab=300, max_positions=256)
    by_key = {part.key: part for part in parts(spec, F32)}
    units = [
        Unit(part.key, 0, part.granules, *(("host", "host") if part.kind == "ffn" else ("gpu0", "gpu0")), "gpu0")
        for part in by_key.values()
    ]
    nbytes = max(part.nbytes for part in by_key.values())
    plan = make_plan(
        spec, F32, units, ring_bytes={"gpu0": 3 * nbytes, "host": nbytes}, stage_bytes=nbytes, main="gpu0",
        kv_homes=[("gpu0", "gpu0")] * 3, device_rows=tuple(DeviceRows(i, (5, 7), (0, 2)) for i in range(3)),
    )  # fmt: skip
    check_plan(plan, spec, F32)
    binding = TorchBinding(plan, {}, CPU, choose(CPU)[0], lambda arena, lo, hi: [(lo, hi)])
    filled: list[Batch] = []
    fill = DeviceTables.fill
    monkeypatch.setattr(
        DeviceTables, "fill", lambda self, batch, *pages: (filled.append(batch), fill(self, batch, *pages))[1]
    )
    lowering = Lowering(plan)
    for p in (*passes.prefill(plan, 0, 40, passes.DECODE), passes.decode(plan, (0,), (40,), passes.DECODE)):
        binding.begin()
        filled.clear()
        for task in lowering.step(p):
            if task.lanes == ("gpu0",):
                binding.prepare(task)
        assert set(filled) == set(p.batches)


def test_a_second_fill_in_a_pass_is_a_fault() -> None:
    plan = resident_plan(model(layers=1, d=64, heads=4, kv_heads=2, neurons=64, vocab=64), F32)
    tables = DeviceTables(plan, 1, CPU, delegated=False)
    first, second = (Batch(0, (0,), (start,), (1,), (0,)) for start in (3, 4))
    tables.begin()
    tables.fill(first, [[0]])
    tables.fill(first, [[0]])
    with pytest.raises(AssertionError, match="two batches 0 in one pass"):
        tables.fill(second, [[0]])
    tables.begin()
    tables.fill(second, [[0]])
    assert tables.positions.tolist() == [4]


def test_tables_of_fresh_rows_only_where_attention_is_delegated() -> None:
    plan = resident_plan(model(layers=1, d=64, heads=4, kv_heads=2, neurons=64, vocab=64), F32)
    without, with_them = (DeviceTables(plan, 4, CPU, delegated=delegated) for delegated in (False, True))
    rows = max(plan.chunk_rows, plan.batch_seqs)
    assert with_them.nbytes - without.nbytes == 4 * (2 * rows + plan.batch_seqs * 4)
