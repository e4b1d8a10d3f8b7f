"""Computes the activations of an FFN with numpy, from the packed weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.reference.blocks import widen_blocks
from penstock.kernels.reference.dense import activate
from penstock.runtime.movers import DiskReader
from penstock.spec.format import tiles
from penstock.spec.parts import PAGE_BYTES, Block, Part
from penstock.store.quantize import decode_block

Float32 = NDArray[np.float32]


def activations(reader: DiskReader, part: Part, g: int, activation: str, h: Float32) -> Float32:
    """The activations of granule g of an FFN for h float32 [T, D]: act(gate h), or act(up h) without a gate, float32
    [T, neurons of the granule]. Raises StorageFailed, DamagedModel."""
    granule, first = _granule(reader, part, g), part.blocks[0]
    values: Float32 = h @ _matrix(granule, first).T
    if part.has(f"{first.name}_bias"):
        bias = part.block(f"{first.name}_bias")
        values += granule[bias.offset : bias.offset + bias.nbytes].view(np.float32)
    return activate(values, activation)


def _matrix(granule: NDArray[np.uint8], block: Block) -> Float32:
    """A block of a granule uint8 [granule_bytes], in whatever format → float32 [rows, cols]."""
    if block.format.in_blocks:
        packed = granule[block.offset : block.end].reshape(tiles(block.rows), -1)
        return widen_blocks(packed, block.cols, block.format.kind)[: block.rows]
    return decode_block(granule, block)


def _granule(reader: DiskReader, part: Part, g: int) -> NDArray[np.uint8]:
    room = np.empty(part.granule_bytes + PAGE_BYTES, np.uint8)
    begin = -room.ctypes.data % PAGE_BYTES  # direct reads go to whole pages
    granule = room[begin : begin + part.granule_bytes]
    reader.start(part.key, g, g + 1, granule.ctypes.data).wait()
    return granule
