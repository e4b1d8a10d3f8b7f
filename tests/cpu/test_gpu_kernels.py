"""The GPU kernels against the reference on tensors of the processor: Triton's in its interpreter, torch's as they are."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

os.environ["TRITON_INTERPRET"] = "1"  # read where triton is imported first

import torch

from penstock.graph.tasks import Batch
from penstock.kernels.gpu import dense
from penstock.kernels.gpu.choose import Kernels, choose
from penstock.kernels.reference import cache
from penstock.spec.format import Format, parse_format
from penstock.spec.model import ModelSpec
from tests.kernel_cases import FORMATS, KV_FORMATS, Case, batches, layers

pytest.importorskip("triton", reason="triton is not installed: it exists for Linux alone")

CPU = torch.device("cpu")
FEW, MANY, TORCH = Kernels(triton=True), Kernels(triton=True, few_rows=0), Kernels(triton=False)


def case(spec: ModelSpec, weights: str, kv: str, batch: Batch, kernels: Kernels, seed: int) -> Case:
    return Case(spec, parse_format(weights), parse_format(kv), batch, kernels, CPU, seed)


@pytest.mark.fuzz
@pytest.mark.parametrize("kernels", [FEW, MANY, TORCH], ids=["few", "many", "torch"])
@given(layers(), batches(), st.sampled_from(FORMATS), st.sampled_from(KV_FORMATS), st.integers(0, 2**32 - 1))
def test_every_op(kernels: Kernels, spec: ModelSpec, batch: Batch, weights: str, kv: str, seed: int) -> None:
    case(spec, weights, kv, batch, kernels, seed).run()
