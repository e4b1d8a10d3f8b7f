"""ScheInfer's plans on an emulated device: layers sliced in different ways, and prompts on either side, give the same
logits."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.graph.check_plan import check_plan
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.scheinfer import Slices, plan_of
from penstock.planner.solve.skeleton import device_skeleton
from penstock.spec.ask import Ask
from penstock.spec.parts import parts
from tests.cpu.placements import DENSE, NEAR, Logits, Models
from tests.cpu.test_emulated import on_device
from tests.pure.machine import WITH_DEVICE


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("attends", [0, 1, 99])
def test_slices_are_exact(models: Models, oracle: Logits, name: str, prompts: bool, attends: int) -> None:
    """A layer with nothing on the device, the next with a granule, and so on by turns; the link lifts more or less."""
    packed = models[name]
    spec, weights = packed.spec, packed.weights
    ask = Ask(batch=2, context=64, prompt_tokens=32, output_tokens=8, kv="float32", score=True)
    skeleton = device_skeleton(Problem(ask, spec, weights, WITH_DEVICE), 32, attention_layers=0, lifted=0.0)
    count, sizes = len(spec.layers), {part.key: part for part in parts(spec, weights)}
    there = {f"{i}.ffn": i % (sizes[f"{i}.ffn"].granules + 1) for i in range(count)}
    r_gg = tuple(there[f"{i}.ffn"] / sizes[f"{i}.ffn"].granules for i in range(count))
    r_cg = tuple((1 - r) * (i % 3) / 2 for i, r in enumerate(r_gg))
    there |= {f"{i}.attn": sizes[f"{i}.attn"].granules for i in range(min(attends, count))}
    plan = plan_of(skeleton, Slices(tuple(i < attends for i in range(count)), r_gg, r_cg, there, prompts))
    check_plan(plan, spec, weights)
    assert np.abs(on_device(packed, plan) - oracle[name, "float32"]).max() <= NEAR["float32"]
