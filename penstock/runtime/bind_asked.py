"""What numpy computes of units that are asked for (`graph/asked`): which neurons fire, and whole granules."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.graph.records import Records
from penstock.kernels.reference.dense import activate
from penstock.kernels.reference.matrix import Scratch, multiply, vector
from penstock.spec.model import FfnSpec
from penstock.spec.parts import Part

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]


def whole(kept: Bytes, picked: Bytes, fires: NDArray[np.bool_], part: Part) -> Bytes:
    """Granules uint8 [n, granule_bytes], put together of the bytes that stay in RAM, `kept` uint8 [n, kept_bytes], and
    the pages with records, `picked` uint8 [n, page_bytes]. `fires` [n, 64]: the records of neurons that do not fire are
    zeros."""
    records = Records.of(part)
    granules = np.zeros((len(kept), part.granule_bytes), np.uint8)
    granules[:, : records.head], granules[:, records.tail :] = kept[:, : records.head], kept[:, records.head :]
    span = slice(records.lo, records.hi)
    shape = (len(kept), -1, records.stride)
    rows = picked[:, records.lo - records.first : records.hi - records.first].reshape(shape)
    granules[:, span] = np.where(fires[:, :, None], rows, 0).reshape(len(kept), -1)
    return granules


def fire(kept: Bytes, part: Part, shape: FfnSpec, h: Float32, values: Float32, scratch: Scratch) -> None:
    """values [n, T, 64] = act(gate h), or act(up h), of each granule. `kept`: uint8 [n, kept_bytes]."""
    none = np.zeros((len(kept), part.granule_rows), np.bool_)
    granules = whole(kept, np.zeros((len(kept), Records.of(part).page_bytes), np.uint8), none, part)
    name = "gate" if shape.gated else "up"
    for granule, to in zip(granules, values, strict=True):
        start = scratch.mark()
        multiply(h, granule, part.block(name), to, scratch)
        scratch.rewind(start)
        if part.has(f"{name}_bias"):
            to += vector(granule, part.block(f"{name}_bias"))
        activate(to, shape.activation)
