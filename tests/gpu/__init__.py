"""Tests that need a card. They run in a process of their own: tests on the processor turn Triton's interpreter on."""

import os

import pytest
import torch

ON_A_CARD = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device that torch sees"),
    pytest.mark.skipif(
        bool(os.environ.get("TRITON_INTERPRET")),
        reason="Triton's interpreter is on in this process: run tests/gpu alone",
    ),
]
