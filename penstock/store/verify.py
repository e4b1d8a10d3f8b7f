"""Reads a packed model whole and compares it with its checksums, for `penstock pack --verify`."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.errors import BadRequest, BrokenModel
from penstock.spec.parts import Part
from penstock.store.blocks import is_finite
from penstock.store.files import open_regular, storage_errors
from penstock.store.manifest import SUM_BYTES
from penstock.store.packed import Packed, check_files, damaged_granule, has_sums, is_packed, open_packed
from penstock.store.predictors import FILE as PREDICTORS
from penstock.store.predictors import with_predictors
from penstock.store.quantize import decode_rows, fields
from penstock.store.writer import Progress
from penstock.units import MIB

_STEP_BYTES = 8 * MIB


def verify(folder: Path, progress: Progress | None = None) -> None:
    """Checks every byte of a packed model and of predictors beside it: all checksums, and that all scales, minimums and
    floats are finite.

    Raises DamagedModel, which names the file, and for weights the part and the granule; BrokenModel for numbers that
    are not finite, BadRequest for a model of an older version (it has no checksums to compare with), StorageFailed.
    """
    if is_packed(folder) and not has_sums(folder):
        raise BadRequest(f"{folder} was packed by an older version, without checksums of all its bytes: pack it again")
    packed = open_packed(folder)
    check_files(folder)
    if os.path.lexists(folder / PREDICTORS):
        packed = with_predictors(packed)

    def check(key: str) -> str:
        _check_part(packed, packed.parts[key])
        return key

    done_bytes = 0
    pool = ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0))), "penstock-verify")
    try:
        for key in pool.map(check, packed.parts):
            done_bytes += packed.parts[key].nbytes
            if progress is not None:
                progress(done_bytes, packed.total_bytes, key)
    finally:
        pool.shutdown(cancel_futures=True)


def _check_part(packed: Packed, part: Part) -> None:
    file, begin, _ = packed.locate(part.key, 0, 0)
    first = packed.first_granules[part.key]
    assert packed.sums is not None
    step = max(1, _STEP_BYTES // part.granule_bytes)
    buffer = np.empty((min(step, part.granules), part.granule_bytes), np.uint8)
    with storage_errors("read", file), os.fdopen(open_regular(file), "rb", buffering=0) as stream:
        for lo in range(0, part.granules, step):
            granules = buffer[: min(lo + step, part.granules) - lo]
            offset = begin + lo * part.granule_bytes
            _read_whole(stream.fileno(), offset, granules, f"{file} is truncated in part {part.key}")
            sums = _native.granule_sums(granules.ctypes.data, len(granules), part.granule_bytes)
            expected = packed.sums[SUM_BYTES * (first + lo) :][: len(sums)]
            if sums != expected:
                wrong = next(i for i in range(len(sums)) if sums[i] != expected[i])  # the first byte that differs
                raise damaged_granule(file, part.key, lo + wrong // SUM_BYTES)
            require_finite(file, part, lo, granules)


def _read_whole(fd: int, offset: int, granules: npt.NDArray[Any], truncated: str) -> None:
    """Fills `granules`, uint8 [n, granule_bytes], from `offset` of a file, and drops these bytes from the page cache.
    Raises BrokenModel with the message `truncated` where the file ends early."""
    data = granules.reshape(-1)
    read_bytes = 0
    while read_bytes < data.nbytes:
        count = os.preadv(fd, [data[read_bytes:].data], offset + read_bytes)
        if count == 0:
            raise BrokenModel(truncated)
        read_bytes += count
    os.posix_fadvise(fd, offset, read_bytes, os.POSIX_FADV_DONTNEED)


def require_finite(file: Path, part: Part, lo: int, granules: npt.NDArray[Any]) -> None:
    """Checks granules, uint8 [n, granule_bytes], of which the first is granule `lo` of the part. Raises BrokenModel
    where one holds NaN or infinite numbers."""
    for i, granule in enumerate(granules):
        for block in part.blocks:
            data = granule[block.offset : block.offset + block.nbytes]
            if block.stride:
                finite = bool(np.isfinite(decode_rows(granule, block)).all())
            elif block.format.in_blocks:
                finite = is_finite(data, block.cols, block.format)
            elif block.format.is_quantised:
                _, scales, minimums = fields(data, block.rows, block.cols, block.format)
                finite = _exponents_finite(scales, 0x7C00) and _exponents_finite(minimums, 0x7C00)
            elif block.format.kind == "float32":
                finite = bool(np.isfinite(data.view(np.float32)).all())
            else:
                finite = _exponents_finite(data, 0x7C00 if block.format.kind == "float16" else 0x7F80)
            if not finite:
                raise BrokenModel(
                    f"{file}: part {part.key}, granule {lo + i}: {block.name} holds NaN or infinite numbers"
                )


def _exponents_finite(halves: npt.NDArray[Any], limit: int) -> bool:
    """Whether all float16 or bfloat16 numbers are finite. `limit`: the bits of infinity, whose exponent is all ones."""
    bits = halves.view(np.uint16) & 0x7FFF
    return not bits.size or int(bits.max()) < limit
