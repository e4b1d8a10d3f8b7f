"""PIPO's plans on an emulated device: both pipelines, weights at every home, KV in RAM, give the same logits."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.graph.check_plan import check_plan
from penstock.planner.programs.pipo_memory import PIPELINES, Configuration
from penstock.planner.solve import pipo
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from tests.cpu.placements import DENSE, NEAR, Logits, Models
from tests.cpu.test_emulated import on_device
from tests.pure.machine import WITH_DEVICE


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("home", ["host", "disk0"])
def test_a_pipeline_is_exact(models: Models, oracle: Logits, name: str, pipeline: str, home: str) -> None:
    packed = models[name]
    ask = Ask(batch=2, context=64, prompt_tokens=32, output_tokens=8, kv="float32", score=True)
    problem = Problem(ask, packed.spec, packed.weights, WITH_DEVICE)
    for share in (0.0, 0.5):
        plan = pipo.plan(problem, Configuration(home, pipeline, share), "host", chunk_rows=32)
        check_plan(plan, packed.spec, packed.weights)
        assert np.abs(on_device(packed, plan) - oracle[name, "float32"]).max() <= NEAR["float32"]
