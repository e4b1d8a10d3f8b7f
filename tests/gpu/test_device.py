"""Plans on a card: any placement gives what all in memory gives, and the same greedy tokens as without the card.

`pytest tests/gpu`, in a process of its own (tests/gpu/test_kernels.py says why)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DeviceFailed, DoesNotFit
from penstock.graph import passes
from penstock.kernels.gpu.choose import choose
from penstock.runtime.device import choose as choosing
from penstock.runtime.device.cuda.device import TorchDevice
from penstock.serve.session import Session
from penstock.spec.plan import Plan
from penstock.store.packed import Packed
from tests.cpu.placements import FORMATS, KV_FORMATS, NEAR, Logits, Models, require_near, run
from tests.cpu.test_emulated import all_on_device
from tests.gpu import ON_A_CARD
from tests.plans import device_plans

pytestmark = ON_A_CARD
ROOMY = 8 << 30


def card(limit_bytes: int = ROOMY, **how: object) -> TorchDevice:
    """In float32, so that what differs is the order of sums."""
    device = torch.device("cuda", 0)
    return TorchDevice(device, limit_bytes, 0, kernels=replace(choose(device)[0], matmul="float32"), **how)  # type: ignore[arg-type]


@settings(max_examples=int(os.environ.get("PENSTOCK_GPU_PLANS", "8")))
@given(st.data())
def test_any_placement(models: Models, exact: Logits, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(models)))
    packed, kv = models[name], data.draw(st.sampled_from(KV_FORMATS))
    plan = data.draw(device_plans(packed.spec, packed.weights, cached=True, batch_seqs=2, kv=kv))
    require_near(run(packed, plan, device=card(), exact=True, poisoned=True), exact[name, kv], NEAR[kv])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_recorded_steps_are_the_launched_ones(models: Models, name: str) -> None:
    """Graphs give the bits that the same calls give one by one, at every position."""
    packed = models[name]
    plan = all_on_device(packed)

    def tokens(graphs: bool) -> tuple[np.ndarray, int]:
        device = card(graphs=graphs)
        session = Session(packed, plan, device=device)
        found = []
        for at in range(12):
            (logits,) = session.step(
                passes.decode(plan, (0, 1), (at, at), passes.DECODE), [np.full(2, 3 + at, np.int32)]
            )
            found.append(logits.copy())
        replays = device._graphs.replays if device._graphs else 0
        session.close()
        return np.stack(found), replays

    recorded, replays = tokens(True)
    launched, none = tokens(False)
    assert replays >= 9 and none == 0
    assert np.array_equal(recorded, launched)


def test_the_cap_is_hard(models: Models) -> None:
    packed = models["llama"]
    plan = all_on_device(packed)
    need = plan.tier_bytes()["gpu0"]
    with pytest.raises(DoesNotFit):
        Session(packed, plan, device=card(need - 1))
    session = Session(packed, plan, device=card(need + (256 << 20)))
    try:
        with pytest.raises((DeviceFailed, torch.OutOfMemoryError)):
            torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    finally:
        session.close()
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_memory_comes_back(models: Models) -> None:
    """A closed session leaves its memory to the next one, and its host memory unpinned."""
    packed: Packed = models["llama"]
    plan: Plan = all_on_device(packed)
    free = []
    for _ in range(3):
        Session(packed, plan, device=card()).close()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert max(free) - min(free) < 64 << 20


def test_the_same_greedy_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On cuda, emulated and none, through the engine's own choice; the figures are made up."""
    from penstock.serve.engine import Engine
    from penstock.serve.loading import Loading
    from penstock.serve.sampling import SamplingParams
    from penstock.spec.ask import Ask
    from tests.cpu.engines import make_model
    from tests.pure.machine import MACHINE, WITH_DEVICE

    monkeypatch.setattr(choosing, "_figures", lambda *_: WITH_DEVICE)
    folder, found = make_model(tmp_path, "llama", "float32"), {}
    for device in ("none", "emulated", "cuda"):
        ask = Ask(prompt_tokens=20, output_tokens=24, context=64, use_device=True)
        engine = Engine.load(folder, ask, Loading(machine=MACHINE, device=device, cache=tmp_path))
        found[device] = engine.generate_ids(list(range(20)), SamplingParams(max_tokens=24, ignore_eos=True))
        engine.close()
    assert found["cuda"] == found["emulated"] == found["none"]
