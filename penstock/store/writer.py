"""Writes packed models shard by shard, at disk speed, without filling the page cache; an interrupted call can go on.

Everything is made in the folder DST.partial. A shard is written as *.tmp, synced and renamed, and then noted in
`resume.json` with the checksums of its granules. One rename turns DST.partial into DST. So at any moment DST is whole,
or is not there, and after a kill the same command goes on with the next shard.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.errors import BadRequest, BrokenModel, StorageFailed
from penstock.spec.format import Format
from penstock.spec.order import NeuronOrder
from penstock.spec.parts import Part
from penstock.store import manifest as manifests
from penstock.store.direct import STAGE_BYTES, DirectWriter
from penstock.store.files import is_aside, read_json, storage_errors, sync_folder, write_bytes
from penstock.store.locks import FolderLock, lock_folder
from penstock.store.manifest import SHARD_NAME, SUM_BYTES, SUMS, Manifest, Shard
from penstock.units import GIB, format_bytes

SHARD_BYTES = GIB
STATE = "resume.json"

# Called with bytes done, bytes in total, and the key of the part that is being written.
Progress = Callable[[int, int, str], None]

# Name of each shard that is whole → the checksums of its granules, 8 bytes each, in the order of the granules.
Done = dict[str, bytes]

# fill(part, lo, hi, out) writes granules lo..hi of a part to out, uint8 [(hi - lo) * granule_bytes], which may hold
# other bytes before. Or it only begins to, and returns a function that returns when they are written.
Fill = Callable[[Part, int, int, npt.NDArray[Any]], Callable[[], None] | None]

# Called several times a second while another process writes the same packed model, with the bytes that it has written
# and the bytes in total.
Waiting = Callable[[int, int], None]

# writing(DST.partial, bytes still to be written) is entered when this process alone may write to that folder. It is
# left when all is written, right before the rename to DST.
Writing = Callable[[Path, int], AbstractContextManager[None]]

_POLL_S = 0.2
NOTHING: Mapping[str, bytes] = MappingProxyType({})
# One stage is written while the others are filled: what reads a checkpoint begins with the next ranges early enough.
_STAGES = 4


def write_packed(
    dst: Path, parts: tuple[Part, ...], weights: Format, fingerprint: dict[str, Any], fill: Fill,
    extras: dict[str, bytes], progress: Progress | None = None, shard_bytes: int = SHARD_BYTES,
    spread: Path | None = None, waiting: Waiting | None = None, writing: Writing | None = None,
    orders: tuple[NeuronOrder, ...] = (), beside: Mapping[str, bytes] = NOTHING,
    last: Callable[[Path], None] | None = None,
) -> Path:  # fmt: skip
    """Writes the packed model `dst` and returns it. `extras`: the small files beside the shards, by name. `orders`: as
    in `Manifest`. `beside`: small files that are there as soon as `dst` is, but are none of the manifest's: they may be
    replaced. `last`: is called with the folder when all else is written, and may write predictors there.

    `fingerprint`: everything that the result depends on, as JSON. A call with the same fingerprint goes on where an
    interrupted one stopped, a call with another one starts over. `spread`: a folder on another disk. Half of the bytes
    go into its subfolder of the same name, and `dst` has links to them. With `waiting` this call waits for another
    process that writes `dst`. That one's model is the result, also where it is whole already; where it ends early, this
    call goes on with its work.

    Raises BadRequest where `dst` is there or is being written, and there is no `waiting`; StorageFailed.
    """
    if waiting is None:
        _refuse_existing(dst)
    if shard_bytes < 1:
        raise BadRequest(f"shards of {shard_bytes} bytes make no sense")
    shards, on_second = manifests.shards(parts, shard_bytes), frozenset[str]()
    if spread is not None:
        spread = (spread / dst.name).absolute()
        if dst.resolve() in (spread.resolve(), *spread.resolve().parents):
            raise BadRequest(f"{spread} is the model's own folder: half of the bytes should go to another disk")
        fingerprint = {**fingerprint, "spread": str(spread)}
        shards, on_second = manifests.spread_shards(parts, shard_bytes)
    state = {"fingerprint": {**fingerprint, "format": manifests.VERSION, "shard_bytes": shard_bytes}, "shards": {}}
    partial = partial_of(dst)
    second = _Second(spread, on_second)
    watch = None if waiting is None else _watch(waiting, partial, sum(shard.nbytes for shard in shards))
    with storage_errors("write", partial), _locked(dst, partial, watch) as ours:
        if not ours:
            return dst
        second.make(partial)
        others = {*extras, *beside, manifests.FILE, manifests.RECORD, SUMS, manifests.PREDICTORS}
        done = _resume(partial, state, shards, others)
        try:
            _note(partial, state, done)
            missing_bytes = sum(s.nbytes for s in shards if s.name not in done) + sum(map(len, extras.values()))
            missing_there = sum(s.nbytes for s in shards if s.name not in done and s.name in on_second)
            with nullcontext() if writing is None else writing(partial, missing_bytes):
                _require_room(partial, missing_bytes - missing_there)
                if spread is not None:
                    _require_room(spread, missing_there)
                _write_shards(partial, shards, state, done, fill, progress, second)
                for name, content in beside.items():
                    write_bytes(partial / name, content)
                _describe(partial, shards, parts, weights, done, extras, orders)
                if last is not None:
                    last(partial)
            _finish(dst, partial)
        except BaseException as error:
            for file in [*partial.glob("*.tmp"), *second.unfinished()]:
                file.unlink(missing_ok=True)
            if not done:
                second.remove()
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                left = sum(s.nbytes for s in shards if s.name not in done)
                raise _disk_full(partial, left, bool(done)) from None
            raise
    return dst


def partial_of(dst: Path) -> Path:
    """The folder in which `dst` is made."""
    return dst.with_name(dst.name + ".partial")


class _Second:
    """The folder on a second disk, if there is one, that the shards of these names go to. The model's own folder has
    links to these shards."""

    def __init__(self, spread: Path | None, names: frozenset[str]) -> None:
        self._spread, self._names = spread, names

    def make(self, partial: Path) -> None:
        """Makes the folder. Raises BadRequest where it holds files that this packing did not write."""
        if self._spread is None:
            return
        if self._spread.exists() and any(self._spread.iterdir()) and not self._began(partial):
            raise BadRequest(f"{self._spread} holds files already: remove it or choose another folder")
        self._spread.mkdir(parents=True, exist_ok=True)
        for file in self.unfinished():  # left by a process that was killed
            file.unlink()

    def _began(self, partial: Path) -> bool:
        """Whether an interrupted packing of this model wrote to this very folder."""
        try:
            fingerprint = read_json(partial / STATE, manifests.MAX_BYTES).get("fingerprint")
        except BrokenModel:
            return False
        return isinstance(fingerprint, dict) and fingerprint.get("spread") == str(self._spread)

    def folder(self, name: str, partial: Path) -> Path:
        """The folder that the shard of this name goes to."""
        return self._spread if self._spread is not None and name in self._names else partial

    def link(self, name: str, partial: Path) -> None:
        """Links to the shard of this name, which is whole, if it lies on the second disk."""
        folder = self.folder(name, partial)
        if folder != partial:
            sync_folder(folder)
            (partial / name).unlink(missing_ok=True)
            (partial / name).symlink_to(folder / name)

    def unfinished(self) -> list[Path]:
        """Shards on the second disk that are not whole."""
        if self._spread is None:
            return []
        return [file for name in self._names if os.path.lexists(file := self._spread / f"{name}.tmp")]

    def remove(self) -> None:
        """Removes all shards on the second disk, and the folder if nothing else is in it. Called when no shard is
        whole."""
        if self._spread is not None:
            for name in self._names:
                (self._spread / name).unlink(missing_ok=True)
            with suppress(OSError):
                self._spread.rmdir()


def _write_shards(
    partial: Path, shards: tuple[Shard, ...], state: dict[str, Any], done: Done, fill: Fill,
    progress: Progress | None, second: _Second,
) -> None:  # fmt: skip
    total = sum(part.nbytes for shard in shards for part, _ in shard.parts)
    written = 0
    longest = max(max(len(shard.header), *(part.granule_bytes for part, _ in shard.parts)) for shard in shards)
    begun: deque[tuple[Part, npt.NDArray[Any], Callable[[], None] | None]] = deque()
    for shard in shards:
        if shard.name in done:
            written += sum(part.nbytes for part, _ in shard.parts)
            continue
        aside = second.folder(shard.name, partial) / (shard.name + ".tmp")
        sums = b""
        with DirectWriter(aside, max(STAGE_BYTES, longest), _STAGES) as file:

            def finish(file: DirectWriter = file) -> None:
                """Waits for the oldest range that was begun."""
                nonlocal sums, written
                part, out, filled = begun.popleft()
                if filled is not None:
                    filled()
                # On this thread, while others encode: at 10 GB/s and more it takes little time.
                sums += _native.granule_sums(out.ctypes.data, out.nbytes // part.granule_bytes, part.granule_bytes)
                file.complete()
                written += out.nbytes
                if progress is not None:
                    progress(written, total, part.key)

            file.reserve(len(shard.header))[:] = np.frombuffer(shard.header, np.uint8)
            file.complete()
            for part, _ in shard.parts:
                step = max(1, STAGE_BYTES // part.granule_bytes)
                for lo in range(0, part.granules, step):
                    hi = min(lo + step, part.granules)
                    while not file.has_room((hi - lo) * part.granule_bytes):
                        finish()
                    out = file.reserve((hi - lo) * part.granule_bytes)
                    begun.append((part, out, fill(part, lo, hi, out)))
            while begun:
                finish()
            file.sync()
        aside.rename(aside.with_suffix(""))
        second.link(shard.name, partial)
        done[shard.name] = sums
        _note(partial, state, done)
        sync_folder(partial)


def _note(partial: Path, state: dict[str, Any], done: Done) -> None:
    """Writes to resume.json which shards are whole."""
    hex_sums = {name: sums.hex() for name, sums in done.items()}
    write_bytes(partial / STATE, json.dumps({**state, "shards": hex_sums}).encode())


def _from_hex(text: Any) -> bytes:
    """Checksums out of resume.json; no bytes where it holds something else."""
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError):
        return b""


def _describe(
    partial: Path, shards: tuple[Shard, ...], parts: tuple[Part, ...], weights: Format,
    done: Done, extras: dict[str, bytes], orders: tuple[NeuronOrder, ...],
) -> None:  # fmt: skip
    """Writes the small files, the checksums and penstock.json."""
    described, sums = {}, {}
    for shard in shards:
        lo = 0  # in bytes, among the shard's checksums
        for part, offset in shard.parts:
            described[part.key] = manifests.describe(part, shard.name, offset)
            sums[part.key] = done[shard.name][lo : lo + SUM_BYTES * part.granules]
            lo += SUM_BYTES * part.granules
    listed = tuple(described[part.key] for part in parts)
    small = {**extras, SUMS: b"".join(sums[part.key] for part in parts)}
    files = tuple(manifests.describe_file(name, content) for name, content in sorted(small.items()))
    manifest = Manifest(weights.name, sum(part.nbytes for part in listed), listed, files, orders)
    for name, content in small.items():
        write_bytes(partial / name, content)
    write_bytes(partial / manifests.FILE, manifests.dumps(manifest).encode())


def _finish(dst: Path, partial: Path) -> None:
    sync_folder(partial)
    partial.rename(dst)
    (dst / STATE).unlink()  # only after the rename: a kill before it, without this file, would cost all packed shards
    sync_folder(dst.parent)


def _resume(partial: Path, state: dict[str, Any], shards: tuple[Shard, ...], others: set[str]) -> Done:
    """The checksums of all shards that an interrupted call with the same fingerprint completed. Removes all other files
    that packing left. Raises BadRequest where the folder holds a file that packing did not write."""
    present = {file.name for file in partial.iterdir()}
    if not present:
        return {}
    ours = others | {STATE}
    strange = [
        name
        for name in present
        if not (SHARD_NAME.fullmatch(name.removesuffix(".tmp")) or name in ours or is_aside(name))
    ]
    if strange or not (STATE in present or all(map(is_aside, present))):
        raise BadRequest(f"{partial} holds {min(strange or present)!r}, which packing did not write: move it away")
    done: Any = None
    with suppress(BrokenModel):  # a state that cannot be read counts as none
        noted = read_json(partial / STATE, manifests.MAX_BYTES)
        if noted.get("fingerprint") == json.loads(json.dumps(state["fingerprint"])):
            done = noted.get("shards")
    whole = {}
    for shard in shards:
        sums = _from_hex(done.get(shard.name) if isinstance(done, dict) else None)
        if len(sums) == SUM_BYTES * sum(part.granules for part, _ in shard.parts) and shard.name in present:
            if (partial / shard.name).stat().st_size == shard.nbytes:
                whole[shard.name] = sums
    for name in present - whole.keys() - {STATE}:
        (partial / name).unlink()
    return whole


@contextmanager
def _locked(dst: Path, partial: Path, watch: Callable[[], None] | None) -> Iterator[bool]:
    """Makes the folder DST.partial and keeps other processes out of it.

    `watch` is called while another process writes there. Yields False where that process has made DST meanwhile.
    Raises BadRequest where DST is there, and where another process writes it and there is no `watch`.
    """
    dst.parent.mkdir(parents=True, exist_ok=True)
    lock = _take(partial, watch)
    try:
        made = watch is not None and os.path.lexists(dst)
        if not made:
            _refuse_existing(dst)  # another process may just have made it
        yield not made
    finally:
        with suppress(OSError):  # the folder is gone, or it holds shards: both are fine
            partial.rmdir()
        lock.close()


def _take(partial: Path, watch: Callable[[], None] | None) -> FolderLock:
    while True:
        if partial.is_symlink():  # our files would go to another folder
            raise BadRequest(f"{partial} is a link, where packing makes a folder: remove it")
        partial.mkdir(exist_ok=True)
        lock = lock_folder(partial, exclusive=True, wait=False)
        if lock is not None:
            return lock
        if not partial.exists():  # its writer has finished, or given up, since `mkdir`
            continue
        if watch is None:
            raise BadRequest(f"another process is writing {partial}: wait for it")
        watch()
        time.sleep(_POLL_S)


def _watch(waiting: Waiting, partial: Path, total_bytes: int) -> Callable[[], None]:
    def watch() -> None:
        written = 0
        for shard in partial.glob("model-*"):
            with suppress(OSError):  # the shard was renamed or removed meanwhile
                written += shard.stat().st_size
        waiting(min(written, total_bytes), total_bytes)

    return watch


def _refuse_existing(dst: Path) -> None:
    if os.path.lexists(dst):
        raise BadRequest(f"{dst} exists already: remove it or choose another name")


def free_bytes(folder: Path) -> int:
    """Bytes that a user may still write to the file system of an existing folder."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _require_room(partial: Path, need_bytes: int) -> None:
    have = free_bytes(partial)
    if need_bytes > have:
        raise StorageFailed(
            f"the disk is too full: {partial} needs {format_bytes(need_bytes)}, {format_bytes(have)} are free",
            need_bytes=need_bytes,
            have_bytes=have,
        )


def _disk_full(partial: Path, need_bytes: int, resumable: bool) -> StorageFailed:
    have = free_bytes(partial.parent)
    after = "; the finished shards are kept, make room and the same command goes on" if resumable else ""
    return StorageFailed(
        f"the disk became full: {partial} needs {format_bytes(need_bytes)} more, {format_bytes(have)} are free{after}",
        need_bytes=need_bytes,
        have_bytes=have,
    )
