"""Plans of the papers' solvers on an emulated device give the logits of all in memory: PIPO's pipelines, FlexGen's
policies, ScheInfer's slices."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.graph.check_plan import check_plan
from penstock.planner.programs.pipo_memory import PIPELINES, Configuration
from penstock.planner.programs.policy import Shares
from penstock.planner.solve import pipo
from penstock.planner.solve.flexgen.shape import ATTENDS, BlockShape
from penstock.planner.solve.flexgen.terms import modes
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.scheinfer import Slices, plan_of
from penstock.planner.solve.skeleton import device_skeleton
from penstock.spec.ask import Ask
from penstock.spec.parts import parts
from penstock.spec.places import GPU
from penstock.spec.plan import Plan
from penstock.store.packed import Packed
from tests.cpu.placements import DENSE, FORMATS, NEAR, Logits, Models
from tests.cpu.test_emulated import on_device
from tests.pure.machine import WITH_DEVICE

ASK = Ask(batch=2, context=64, prompt_tokens=32, output_tokens=8, kv="float32", score=True)


def problem_of(packed: Packed) -> Problem:
    return Problem(ASK, packed.spec, packed.weights, WITH_DEVICE)


def require_exact(packed: Packed, plan: Plan, expected: np.ndarray) -> None:
    """Asserts that a plan is one, and gives these logits [rows, vocab]."""
    check_plan(plan, packed.spec, packed.weights)
    assert np.abs(on_device(packed, plan) - expected).max() <= NEAR["float32"]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("home", ["host", "disk0"])
def test_a_pipeline_is_exact(models: Models, oracle: Logits, name: str, pipeline: str, home: str) -> None:
    """Weights at every home, KV in RAM."""
    packed = models[name]
    problem = problem_of(packed)
    for share in (0.0, 0.5):
        plan = pipo.plan(problem, Configuration(home, pipeline, share), "host", chunk_rows=32)
        require_exact(packed, plan, oracle[name, "float32"])


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("attends", [0, 1, 99])
def test_slices_are_exact(models: Models, oracle: Logits, name: str, prompts: bool, attends: int) -> None:
    """A layer with nothing on the device, the next with a granule, and so on by turns; the link lifts more or less."""
    packed = models[name]
    spec, weights = packed.spec, packed.weights
    skeleton = device_skeleton(problem_of(packed), 32, attention_layers=0, lifted=0.0)
    count, sizes = len(spec.layers), {part.key: part for part in parts(spec, weights)}
    there = {f"{i}.ffn": i % (sizes[f"{i}.ffn"].granules + 1) for i in range(count)}
    r_gg = tuple(there[f"{i}.ffn"] / sizes[f"{i}.ffn"].granules for i in range(count))
    r_cg = tuple((1 - r) * (i % 3) / 2 for i, r in enumerate(r_gg))
    there |= {f"{i}.attn": sizes[f"{i}.attn"].granules for i in range(min(attends, count))}
    plan = plan_of(skeleton, Slices(tuple(i < attends for i in range(count)), r_gg, r_cg, there, prompts))
    require_exact(packed, plan, oracle[name, "float32"])


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("attends", ATTENDS)
def test_a_policy_is_exact(models: Models, oracle: Logits, name: str, attends: str) -> None:
    """Blocks of batches, shares of weights and layers of KV at every home."""
    packed = models[name]
    shape = BlockShape(problem_of(packed), GPU.executor, 1, 2, 32, attends)
    for mode in modes(shape):
        plan = shape.plan(_even(mode.weights), _even(mode.kv))
        require_exact(packed, plan, oracle[name, "float32"])


def _even(free: tuple[bool, bool, bool]) -> Shares:
    each = 1 / sum(free)
    return each * free[0], each * free[1], each * free[2]
