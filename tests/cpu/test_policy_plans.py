"""FlexGen's policies on an emulated device and without one: blocks of batches, shares of weights and layers of KV at
every home, give the same logits."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.graph.check_plan import check_plan
from penstock.planner.programs.policy import Shares
from penstock.planner.solve.flexgen.shape import ATTENDS, BlockShape
from penstock.planner.solve.flexgen.terms import modes
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.places import GPU
from tests.cpu.placements import FORMATS, NEAR, Logits, Models
from tests.cpu.test_emulated import on_device
from tests.pure.machine import WITH_DEVICE


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("attends", ATTENDS)
def test_a_policy_is_exact(models: Models, oracle: Logits, name: str, attends: str) -> None:
    packed = models[name]
    ask = Ask(batch=2, context=64, prompt_tokens=32, output_tokens=8, kv="float32", score=True)
    shape = BlockShape(Problem(ask, packed.spec, packed.weights, WITH_DEVICE), GPU.executor, 1, 2, 32, attends)
    for mode in modes(shape):
        plan = shape.plan(_even(mode.weights), _even(mode.kv))
        check_plan(plan, packed.spec, packed.weights)
        assert np.abs(on_device(packed, plan) - oracle[name, "float32"]).max() <= NEAR["float32"]


def _even(free: tuple[bool, bool, bool]) -> Shares:
    each = 1 / sum(free)
    return each * free[0], each * free[1], each * free[2]
