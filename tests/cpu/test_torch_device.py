"""The GPU's runtime on the processor: every placement through torch tensors gives what all in memory gives.

Streams, pinned memory and graphs need a card (tests/gpu/test_device.py); lanes here do a task at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DoesNotFit
from penstock.runtime.device.cuda.device import TorchDevice
from penstock.serve.session import Session
from penstock.spec.plan import Plan
from penstock.store.packed import Packed
from tests.cpu.test_emulated import all_on_device
from tests.cpu.test_placement import FORMATS, KV_FORMATS, NEAR, models, run  # noqa: F401 (a fixture)
from tests.plans import device_plans, page_orders, resident_plan

CPU = torch.device("cpu")
ROOMY = 4 << 30


def on_torch(packed: Packed, plan: Plan, **how: object) -> np.ndarray:
    return run(packed, plan, device=TorchDevice(CPU, ROOMY, 0), **how)


@pytest.fixture(scope="module")
def exact(models: dict[str, Packed]) -> dict[tuple[str, str], np.ndarray]:  # noqa: F811
    """All in memory, with float32 activations, as torch multiplies."""
    return {
        (name, kv): run(
            packed, resident_plan(packed.spec, packed.weights, batch_seqs=2, kv=kv), serial=True, exact=True
        )
        for name, packed in models.items()
        for kv in KV_FORMATS
    }


@pytest.mark.fuzz
@given(st.data())
def test_any_placement(
    models: dict[str, Packed],  # noqa: F811
    exact: dict[tuple[str, str], np.ndarray],
    data: st.DataObject,
) -> None:
    name = data.draw(st.sampled_from(sorted(models)))
    packed, kv = models[name], data.draw(st.sampled_from(KV_FORMATS))
    plan = data.draw(device_plans(packed.spec, packed.weights, cached=True, batch_seqs=2, kv=kv))
    plan, order = data.draw(page_orders(plan))
    found, expected, near = on_torch(packed, plan, order=order, exact=True, poisoned=True), exact[name, kv], NEAR[kv]
    assert np.abs(found - expected).max() <= near
    ordered = np.sort(expected, axis=1)
    decided = ordered[:, -1] - ordered[:, -2] > 2 * near
    assert (found.argmax(axis=1) == expected.argmax(axis=1))[decided].all()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_all_on_the_device(
    models: dict[str, Packed],  # noqa: F811
    exact: dict[tuple[str, str], np.ndarray],
    name: str,
) -> None:
    packed = models[name]
    assert np.abs(on_torch(packed, all_on_device(packed)) - exact[name, "float32"]).max() <= NEAR["float32"]


def test_the_cap_counts_the_context(models: dict[str, Packed]) -> None:  # noqa: F811
    packed = models["llama"]
    plan = all_on_device(packed)
    need = plan.tier_bytes()["gpu0"] + 1000
    Session(packed, plan, device=TorchDevice(CPU, need, 1000)).close()
    with pytest.raises(DoesNotFit, match="device memory of"):
        Session(packed, plan, device=TorchDevice(CPU, need - 1, 1000))
