"""Finds the GPU that torch can use here, and checks that it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_MARGIN = 0.98  # of the free memory is counted: allocations are rounded up, and the driver keeps a little


@dataclass(frozen=True)
class Card:
    """A GPU. `type`: torch's name for its kind: cuda (AMD's too), xpu, …. `free_bytes`: of its memory now, after this
    process's context took its part."""

    type: str
    name: str
    free_bytes: int

    @property
    def device(self) -> torch.device:
        return torch.device(self.type, 0)


def find() -> Card | str:
    """The first GPU that the system shows this process; or why there is none, as half a sentence."""
    try:
        if not torch.accelerator.is_available():
            return "torch finds no GPU that it can use (a driver for it, and CUDA_VISIBLE_DEVICES, decide what it sees)"
        seen = torch.accelerator.current_accelerator()
        device = torch.device(seen.type if seen is not None else "cuda", 0)
        module: Any = torch.get_device_module(device)
        # A card that is too old for this torch says so when it is first asked to compute.
        if float((torch.ones(8, device=device) * 2).sum().item()) != 16.0:
            return "the GPU computes 8 times 2 wrongly"
        name = str(module.get_device_name(device))
        free, _ = module.mem_get_info(device)
    except (RuntimeError, AssertionError, AttributeError, TypeError) as error:
        lines = str(error).strip().splitlines()
        return f"the GPU cannot be used: {lines[0] if lines else type(error).__name__}"
    return Card(device.type, name, int(free * _MARGIN))
