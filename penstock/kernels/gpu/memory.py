"""Hands out temporaries from a device tensor, and makes typed views of a granule's bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.graph.scratch_gpu import ALIGN
from penstock.spec.format import Format
from penstock.spec.parts import Block
from penstock.units import round_up


class TensorScratch:
    """Hands out temporaries from `memory`, uint8 [bytes], which one lane owns. Each call makes a new one, which
    starts from the beginning. Temporaries are not cleared. `graph.scratch_gpu` has the sizes."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._used = memory, 0

    def take(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """A temporary of this dtype, [*shape]. It holds what was there before."""
        nbytes = math.prod(shape) * dtype.itemsize
        lo = self._used
        assert lo + nbytes <= self._memory.numel(), (
            f"scratch of {self._memory.numel()} bytes is too small: {lo + nbytes}"
        )
        self._used = round_up(lo + nbytes, ALIGN)
        return self._memory[lo : lo + nbytes].view(dtype).view(tuple(shape))

    def mark(self) -> int:
        return self._used

    def rewind(self, mark: int) -> None:
        self._used = mark


def storage_dtype(fmt: Format) -> torch.dtype:
    """The torch type that holds a float format."""
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[fmt.kind]


def vector(granule: Tensor, block: Block) -> Tensor:
    """A float32 vector [columns] inside a granule uint8 [granule_bytes]: a bias, or a norm's weight. A view."""
    return granule[block.offset : block.offset + block.nbytes].view(torch.float32)


def vectors(weights: Tensor, block: Block) -> Tensor:
    """The `vector` of every granule of a unit: weights uint8 [n, granule_bytes] → float32 [n, columns], a view."""
    return weights[:, block.offset : block.offset + block.nbytes].view(torch.float32)


def table(granule: Tensor, block: Block) -> Tensor:
    """A matrix [rows, columns] that lies row by row in a granule uint8 [granule_bytes], as float32, float16 or
    bfloat16 as it is stored. A view."""
    flat = granule[block.offset : block.offset + block.nbytes].view(storage_dtype(block.format))
    return flat.view(block.rows, block.cols)
