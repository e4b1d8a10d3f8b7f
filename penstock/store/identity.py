"""Finds the packed model in the cache that a checkpoint was packed to.

As long as size, times and inode of a checkpoint's files stay the same, their content is taken to be the same. Where
they have changed, the checkpoint is packed again without writing, and the checksums of the result decide.

No hash of the checkpoint is kept, for every first start would pay for it. SHA-256 takes 1.0 to 1.8 s of processor time
per GB and reads the checkpoint once more, where packing takes 2.6 s (int4) or 1.4 s (bfloat16). The packed model's own
checksums tell as much. To compare them costs as much as packing without the writing, and only where files changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock import _native
from penstock.errors import BrokenModel
from penstock.spec.format import Format
from penstock.spec.parts import Part
from penstock.store.checkpoint import weight_files
from penstock.store.direct import STAGE_BYTES
from penstock.store.files import MAX_COPIED_BYTES, read_bytes, reading, require_regular
from penstock.store.gguf.files import files_of
from penstock.store.gguf.header import is_gguf
from penstock.store.index import INDEX
from penstock.store.manifest import CONFIG, COPIED, SUM_BYTES
from penstock.store.pack import opened, threads
from penstock.store.packed import Packed, open_packed
from penstock.store.packing import Packing
from penstock.store.writer import Fill, Progress


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file as the file system describes it. The time of change (ctime) is in it, for no program can set it: where two
    archives with the same fixed times are unpacked one over the other, files of the same size may differ in nothing
    else, if the inode is taken again."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def stamps(folder: Path) -> dict[str, Stamp]:
    """The stamp of every file of a checkpoint that packing reads, by name. `folder`: or a GGUF file.

    Raises BadRequest (no checkpoint), BrokenModel, StorageFailed.
    """
    if is_gguf(folder):
        return {file.name: _stamp(file) for file in files_of(folder)}
    others = (folder / name for name in (CONFIG, *COPIED))
    return {file.name: _stamp(file) for file in (*weight_files(folder), *(f for f in others if f.is_file()))}


def require_stamps(folder: Path, known: Mapping[str, Stamp]) -> None:
    """Raises BrokenModel where a checkpoint is not what it was before it was read, and as `stamps`."""
    if stamps(folder) != known:
        raise BrokenModel(f"{folder} changed while it was read: run the command again")


def unchanged(before: Mapping[str, Stamp], now: Mapping[str, Stamp]) -> frozenset[str]:
    """Names of the files whose stamps are the same. Empty where the index changed, for a tensor's name may then lead to
    another file."""
    if before.get(INDEX) != now.get(INDEX):
        return frozenset()
    return frozenset(name for name in now if before.get(name) == now[name])


def find_same(
    src: Path, weights: Format, candidates: Mapping[Path, Collection[str]], progress: Progress | None = None
) -> Path | None:
    """The packed model among `candidates` that packing the checkpoint `src` would write again, to the byte. None where
    there is none. `candidates`: packed model → names of files of `src` that it is known to come from; a part that comes
    from these alone is not compared.

    The smallest parts are compared first, for models that differ mostly differ in their norms. Raises as `pack`.
    """
    if not candidates:
        return None
    with opened(src, weights) as packing, ThreadPoolExecutor(threads(), "penstock-pack") as pool:
        alike = {folder: packed for folder in candidates if (packed := _alike(folder, packing)) is not None}
        fill, done_bytes = packing.filler(pool), 0
        total_bytes = sum(part.nbytes for part in packing.parts)
        for part in sorted(packing.parts, key=lambda part: part.nbytes):
            files = packing.files(part)
            in_doubt = {f: packed.sums_of(part.key) for f, packed in alike.items() if not files <= set(candidates[f])}
            for lo, sums in _sums(part, fill) if in_doubt else ():
                in_doubt = {f: expected for f, expected in in_doubt.items() if expected[lo : lo + len(sums)] == sums}
                if not in_doubt:
                    break
            alike = {f: packed for f, packed in alike.items() if files <= set(candidates[f]) or f in in_doubt}
            if not alike:
                return None
            done_bytes += part.nbytes
            if progress is not None:
                progress(done_bytes, total_bytes, part.key)
    return next(iter(alike), None)


def _alike(folder: Path, packing: Packing) -> Packed | None:
    """Opens the packed model `folder`. None where its small files or the layout of its parts differ from what packing
    would write, so that its weights need not be compared."""
    for name in (CONFIG, *COPIED):
        content = read_bytes(folder / name, MAX_COPIED_BYTES) if (folder / name).is_file() else None
        if content != packing.extras.get(name):
            return None
    packed = open_packed(folder)
    return packed if packed.sums is not None and tuple(packed.parts.values()) == packing.parts else None


def _sums(part: Part, fill: Fill) -> Iterator[tuple[int, bytes]]:
    """Checksums of the granules that packing would write, some granules at a time: (offset in bytes among the part's
    checksums, checksums)."""
    step = max(1, STAGE_BYTES // part.granule_bytes)
    buffer = np.empty((min(step, part.granules), part.granule_bytes), np.uint8)
    for lo in range(0, part.granules, step):
        granules = buffer[: min(lo + step, part.granules) - lo]
        filled = fill(part, lo, lo + len(granules), granules.reshape(-1))
        if filled is not None:
            filled()
        yield SUM_BYTES * lo, _native.granule_sums(granules.ctypes.data, len(granules), part.granule_bytes)


def _stamp(file: Path) -> Stamp:
    with reading(file):
        status = file.stat()
    require_regular(file, status)
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
