"""The kernels of `penstock.kernels.gpu` on a card against the reference: `pytest tests/gpu`, in a process of its own.

Fixed layers alone: every shape is compiled, a second or so for each kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.graph.batch import Batch
from penstock.kernels.gpu.choose import choose
from penstock.spec.format import parse_format
from penstock.spec.model import ModelSpec
from tests.gpu import ON_A_CARD
from tests.kernel_cases import Case
from tests.kernel_draws import FIXED, with_relu

pytestmark = ON_A_CARD
LAYERS = pytest.mark.parametrize(("spec", "batch", "weights", "kv"), FIXED, ids=[f"{f[2]}-{f[3]}" for f in FIXED])


@LAYERS
@pytest.mark.parametrize("few_rows", [64, 0], ids=["few", "many"])
def test_every_op(few_rows: int, spec: ModelSpec, batch: Batch, weights: str, kv: str) -> None:
    """In float32, as exact as the op table asks; a card's own exponentials and another order of sums cost a little."""
    device = torch.device("cuda")
    kernels = replace(choose(device)[0], few_rows=few_rows, matmul="float32")
    Case(spec, parse_format(weights), parse_format(kv), batch, kernels, device, 0, near=2.0).run()


@LAYERS
def test_many_rows_in_tf32(spec: ModelSpec, batch: Batch, weights: str, kv: str) -> None:
    """Inputs of products rounded to 10 bits of mantissa: some 5e-4 of a term."""
    device = torch.device("cuda")
    kernels = replace(choose(device)[0], few_rows=0)
    Case(spec, parse_format(weights), parse_format(kv), batch, kernels, device, 0, near=200.0).run()


@LAYERS
def test_by_torch(spec: ModelSpec, batch: Batch, weights: str, kv: str) -> None:
    device = torch.device("cuda")
    kernels = replace(choose(device)[0], triton=False, matmul="float32")
    Case(spec, parse_format(weights), parse_format(kv), batch, kernels, device, 0, near=2.0).run()


@LAYERS
def test_ffns_neuron_by_neuron(spec: ModelSpec, batch: Batch, weights: str, kv: str) -> None:
    if parse_format(weights).group % 32:
        pytest.skip(f"{weights}: groups inside a neuron are multiples of 32")
    device = torch.device("cuda")
    kernels, fmt = replace(choose(device)[0], matmul="float32"), parse_format(f"{weights}-neurons")
    Case(with_relu(spec), fmt, parse_format(kv), batch, kernels, device, 0, near=2.0).ffn()
