"""Chooses which implementation of the ops a device gets, and says why."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from penstock.graph.scratch_gpu import FEW_ROWS


@dataclass(frozen=True)
class Kernels:
    """Choices for one device.

    triton    False: everything is done by torch, and weights are widened first
    few_rows  the most rows that are multiplied without widening weights
    matmul    how widened integer and 16-bit weights are multiplied by many rows, "float32" or "tf32". TF32 rounds
              inputs to 10 bits of mantissa for tensor cores. Its error is some 5e-4 of a term: more than the op table's
              tolerance, and as much as that of float16 activations. float32 weights are always multiplied in float32
    dot       the precision of Triton's products in attention: "ieee", "tf32" or "tf32x3" (three products on tensor
              cores, as accurate as float32 except for the last bits)
    """

    triton: bool
    few_rows: int = FEW_ROWS
    matmul: str = "tf32"
    dot: str = "ieee"


def choose(device: torch.device) -> tuple[Kernels, str]:
    """(what to use on the device, the reason as a sentence for the user)."""
    if device.type == "cpu":
        return Kernels(triton=False, matmul="float32"), "torch kernels: tensors on the processor"
    if importlib.util.find_spec("triton") is None:
        return Kernels(triton=False), "torch kernels, which widen weights before every product: triton is not installed"
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 7:
            return Kernels(triton=False, matmul="float32"), (
                f"torch kernels, which widen weights before every product: Triton needs compute capability 7.0, "
                f"this card has {major}.{minor}"
            )
        if major >= 8:
            return Kernels(triton=True, dot="tf32x3"), f"Triton kernels: compute capability {major}.{minor}"
        return Kernels(triton=True, matmul="float32"), (
            f"Triton kernels: compute capability {major}.{minor}; no TF32 before 8.0"
        )
    return Kernels(triton=True), f"Triton kernels on {device.type}"
