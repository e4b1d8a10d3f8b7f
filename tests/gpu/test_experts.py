"""The kernels of routers and experts on a card against the reference: `pytest tests/gpu`, in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.kernels.gpu import experts
from penstock.kernels.gpu.choose import choose
from penstock.spec.model import FfnSpec, Routed, Router
from tests.expert_cases import FIXED, ExpertCase
from tests.gpu import ON_A_CARD
from tests.kernel_draws import granules_of

pytestmark = ON_A_CARD
CASES = pytest.mark.parametrize("case", FIXED, ids=[case[-1] for case in FIXED])


@CASES
@pytest.mark.parametrize("few_rows", [64, 0], ids=["few", "many"])
def test_every_op(few_rows: int, case: tuple[Any, ...]) -> None:
    """In float32, as exact as the op table asks; a card's own exponentials and another order of sums cost a little."""
    device = torch.device("cuda")
    kernels = replace(choose(device)[0], few_rows=few_rows, matmul="float32")
    ExpertCase(*case, kernels, device, near=2.0).run()


@CASES
def test_by_torch(case: tuple[Any, ...]) -> None:
    device = torch.device("cuda")
    ExpertCase(*case, replace(choose(device)[0], triton=False, matmul="float32"), device, near=2.0).run()


@pytest.mark.parametrize("few_rows", [64, 0], ids=["few", "many"])
def test_nothing_waits_for_a_router(few_rows: int) -> None:
    """Router, experts and their sum are recorded as a graph, and a replay follows another answer."""
    device = torch.device("cuda")
    routed = Routed(8, 2, FfnSpec(64, "silu", True), Router("softmax", True))
    case = ExpertCase(routed, 40, 6, "int4", replace(choose(device)[0], few_rows=few_rows), device)
    router, part = (case.parts[kind] for kind in ("router", "experts"))
    gate, weights = (case.put(granules_of(each, case.rng)) for each in (router, part))
    h, scratch = case.put(case.h), case.scratch(1 << 24)
    partial, (_, routes) = torch.zeros_like(h), case.answer()

    def step() -> None:
        experts.route(gate[0], router, routed, h, routes, case.kernels, scratch)
        experts.experts([weights], [0], part, routed, h, routes, partial, None, True, case.kernels, scratch)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        h.copy_(torch.randn_like(h))
        graph.replay()
        replayed = partial.clone()
        step()
        torch.cuda.synchronize()
        assert torch.equal(replayed, partial)
