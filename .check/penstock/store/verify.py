"""`verify`: reads a packed model whole and compares it with its checksums."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import BrokenModel, StorageFailed
from penstock.spec.parts import Part
from penstock.store.manifest import PackedPart
from penstock.store.packed import open_packed, read_manifest
from penstock.store.quantize import fields
from penstock.store.writer import Progress
from penstock.units import MIB

_STEP_BYTES = 8 * MIB


def verify(folder: Path, progress: Progress | None = None) -> None:
    """Checks every byte of a packed model: checksums, and that all scales, minimums and floats are finite.

    Raises BrokenModel naming file, part and, for numbers that are not finite, the granule; StorageFailed.
    """
    packed = open_packed(folder)

    def check(listed: PackedPart) -> PackedPart:
        _check_part(folder / listed.file, packed.parts[listed.key], listed)
        return listed

    done = 0
    pool = ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0))), "penstock-verify")
    try:
        for listed in pool.map(check, read_manifest(folder).parts):
            done += listed.nbytes
            if progress is not None:
                progress(done, packed.total_bytes, listed.key)
    finally:
        pool.shutdown(cancel_futures=True)


def _check_part(file: Path, part: Part, listed: PackedPart) -> None:
    try:
        crc = _read_part(file, part, listed)
    except OSError as error:
        raise StorageFailed(f"cannot read {file}: {error.strerror}") from None
    if crc != listed.crc32:
        raise BrokenModel(f"{file}: part {part.key} is corrupt (checksum {crc:08x}, should be {listed.crc32:08x})")


def _read_part(file: Path, part: Part, listed: PackedPart) -> int:
    step = max(1, _STEP_BYTES // part.granule_bytes)
    buffer = np.empty(min(step, part.granules) * part.granule_bytes, np.uint8)
    crc = 0
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for lo in range(0, part.granules, step):
            data = buffer[: (min(lo + step, part.granules) - lo) * part.granule_bytes]
            offset = listed.offset + lo * part.granule_bytes
            done = 0
            while done < data.nbytes:
                count = os.preadv(fd, [data[done:].data], offset + done)
                if count == 0:
                    raise BrokenModel(f"{file} is truncated in part {part.key}")
                done += count
            os.posix_fadvise(fd, offset, done, os.POSIX_FADV_DONTNEED)
            crc = zlib.crc32(data.data, crc)
            _require_finite(file, part, lo, data.reshape(-1, part.granule_bytes))
    finally:
        os.close(fd)
    return crc


def _require_finite(file: Path, part: Part, lo: int, granules: npt.NDArray[Any]) -> None:
    """granules uint8 [n, granule_bytes]."""
    for i, granule in enumerate(granules):
        for block in part.blocks:
            data = granule[block.offset : block.offset + block.nbytes]
            if block.format.is_quantised:
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
    """float16 or bfloat16 numbers, judged by their bits: at most the exponent below all ones."""
    bits = halves.view(np.uint16) & 0x7FFF
    return not bits.size or int(bits.max()) < limit
