"""The GPU kernels of routers and experts against the reference on tensors of the processor: Triton's in its interpreter
(tests/cpu/conftest.py turns it on), torch's as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.gpu.choose import Kernels
from penstock.kernels.gpu.experts import _blocks
from penstock.spec.model import ACTIVATIONS, FfnSpec, Routed, Router
from tests.expert_cases import FIXED, ExpertCase

pytest.importorskip("triton", reason="triton is not installed: it exists for Linux alone")

pytestmark = pytest.mark.usefixtures("one_torch_thread")
CPU = torch.device("cpu")
FEW, MANY, TORCH = Kernels(triton=True), Kernels(triton=True, few_rows=0), Kernels(triton=False)
ALL = pytest.mark.parametrize("kernels", [FEW, MANY, TORCH], ids=["few", "many", "torch"])
CASES = pytest.mark.parametrize("case", FIXED, ids=[case[-1] for case in FIXED])


@pytest.mark.thinned(3)
@ALL
@CASES
def test_fixed_experts(kernels: Kernels, case: tuple[Any, ...]) -> None:
    routed, d, rows, weights = case
    few = 1 if weights in ("int4", "bfloat16") else 2  # the interpreter takes a while for each pair
    ExpertCase(routed, d, few if kernels is FEW else rows, weights, kernels, CPU).run()


@ALL
@CASES
def test_a_row_that_is_not_finite_has_factors_nan(kernels: Kernels, case: tuple[Any, ...]) -> None:
    with np.errstate(all="ignore"):
        want, got = ExpertCase(*case, kernels, CPU).route(damaged=True)
    assert np.isnan(want.factors[-1]).all() and got.factors[-1].isnan().all()


@st.composite
def routers(draw: st.DrawFn) -> Routed:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    size = draw(st.integers(2 if groups > 1 else 1, 6))
    kept = draw(st.integers(1, groups))
    flag, biased = st.booleans(), draw(st.booleans())
    router = Router(
        draw(st.sampled_from(["softmax", "sigmoid"])), draw(flag), biased, groups, kept,
        draw(st.sampled_from([1.0, 2.5])), biased and draw(flag),
    )  # fmt: skip
    gated = draw(flag)
    activation = draw(st.sampled_from([name for name in ACTIVATIONS if gated or name != "swiglu_clamped"]))
    expert = FfnSpec(draw(st.sampled_from([1, 40, 64, 70])), activation, gated, draw(flag), draw(flag))
    return Routed(groups * size, draw(st.integers(1, min(4, kept * size))), expert, router)


@pytest.mark.fuzz
@given(routers(), st.integers(1, 30), st.sampled_from([1, 30, 70]), st.sampled_from(["float32", "int4", "int8"]),
       st.integers(0, 2**32 - 1))  # fmt: skip
def test_any_experts_by_torch(routed: Routed, rows: int, d: int, weights: str, seed: int) -> None:
    ExpertCase(routed, d, rows, weights, TORCH, CPU, seed).run()


@pytest.mark.fuzz
@settings(max_examples=max(1, settings.default.max_examples // 6))  # the interpreter takes a tenth of a second for each
@given(routers(), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_any_router_by_triton(routed: Routed, rows: int, seed: int) -> None:
    ExpertCase(routed, 8, rows, "float32", FEW, CPU, seed).route()


@given(st.integers(1, 9), st.data())
def test_blocks_hold_each_pair_once(experts: int, data: st.DataObject) -> None:
    """Sorted by expert, at most 16 to a block."""
    drawn = st.lists(st.integers(0, experts - 1), min_size=1, max_size=100)
    ids = np.array(data.draw(drawn), np.int32)
    order, blocks = _blocks(torch.from_numpy(ids[:, None]), experts)
    seen = []
    for expert, lo, hi in blocks.tolist():
        pairs = order[lo:hi].tolist()
        assert len(pairs) <= 16 and all(ids[pair] == expert for pair in pairs)
        seen += pairs
    assert sorted(seen) == list(range(len(ids)))
