"""Keeps packed copies of checkpoints in the cache: records what each was made from, finds its faults, removes it.

A copy is a packed model in a folder of its own under `models/`. The file `source.json` in that folder is the copy's
record. The time of that file is when the copy was last used. A process that loads a copy holds a shared lock on its
folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import BadRequest, BrokenModel, PenstockError, StorageFailed
from penstock.spec import codec
from penstock.store import manifest as manifests
from penstock.store.files import read_text, storage_errors, write_bytes
from penstock.store.identity import Stamp
from penstock.store.locks import FolderLock, lock_folder
from penstock.store.packed import check_files, has_sums, open_packed

MODELS = "models"
RECORD = manifests.RECORD
PARTIAL, REMOVED = ".partial", ".removed"
_SCHEMA = "penstock.copy"
_MAX_RECORD_BYTES = 16_000_000
# The most folders that a record names as holding the same checkpoint. One that fell out of the record is compared with
# the copy when it is used again.
_MAX_ORIGINS = 8
# Bytes of a model's own name in the name of its copy. With the digest, the format and the endings it stays within the
# 255 bytes that a file system allows.
_MAX_NAME_BYTES = 100
# A model's name, a digest, a format, and the endings that are appended while the copy is written or removed.
_COPY_NAME = re.compile(
    rf".+-[0-9a-f]{{12}}-([a-z][a-z0-9_+-]*)({re.escape(PARTIAL)})?(\.[0-9]+{re.escape(REMOVED)})?", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Origin:
    """A folder of a checkpoint that the copy was made from, or that held the same. `stamps`: of its files then. `own`:
    whether the copy is known to have the very format that these files have."""

    path: str
    stamps: dict[str, Stamp]
    own: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """A copy's record. `weights`: the format, by name. `origins`: the latest first. `damaged`: the fault that a run met
    in the copy, if any."""

    weights: str
    origins: tuple[Origin, ...]
    damaged: str | None = None


def copy_name(name: str, stamps: dict[str, Stamp], weights: str) -> str:
    """The name of a new copy: the checkpoint's own name, a digest of its files' stamps, and the format."""
    plain = "".join(c if c.isprintable() and c != "/" else "_" for c in name).lstrip("-. ")
    short = plain.encode(errors="replace")[:_MAX_NAME_BYTES].decode(errors="ignore") or "model"
    return f"{short}-{_digest(stamps)[:12]}-{weights}"


def made_from(stamps: dict[str, Stamp], weights: str) -> str:
    """What a checkpoint is called that has no copy yet: by its files' stamps and the format that is wanted of it."""
    return f"{_digest(stamps)}-{weights}"


def _digest(stamps: dict[str, Stamp]) -> str:
    return hashlib.sha256(repr((manifests.VERSION, sorted(stamps.items()))).encode()).hexdigest()


def weights_in_name(name: str) -> str | None:
    """The format of a copy of this name, also of one that is being written or removed. None where no copy has such a
    name."""
    match = _COPY_NAME.fullmatch(name)
    return match[1] if match else None


def read_record(folder: Path) -> Record | None:
    """A copy's record. None where there is none, or none that this version wrote."""
    file = folder / RECORD
    try:
        return codec.loads(Record, read_text(file, _MAX_RECORD_BYTES), _SCHEMA, manifests.VERSION, str(file))
    except (BadRequest, BrokenModel, StorageFailed):
        return None


def write_record(folder: Path, record: Record) -> None:
    """Writes a copy's record. Raises OSError."""
    write_bytes(folder / RECORD, codec.dumps(record, _SCHEMA, manifests.VERSION).encode())


def records(models: Path) -> dict[Path, Record]:
    """The records of all copies that this version can use, by folder. Raises StorageFailed."""
    by_folder = {}
    for folder in sorted(_folders(models)):
        if not folder.name.endswith((PARTIAL, REMOVED)) and (record := read_record(folder)) is not None:
            by_folder[folder] = record
    return by_folder


def _folders(models: Path) -> list[Path]:
    with storage_errors("read", models), suppress(FileNotFoundError):
        return [Path(entry.path) for entry in os.scandir(models) if entry.is_dir()]
    return []


def add_origin(record: Record, origin: Origin) -> Record:
    """The record with this origin as the latest, in place of an earlier one at its path."""
    others = tuple(other for other in record.origins if other.path != origin.path)
    return replace(record, origins=(origin, *others)[:_MAX_ORIGINS])


def without_origin(record: Record, path: str) -> Record:
    """The record without the origin at this path."""
    return replace(record, origins=tuple(origin for origin in record.origins if origin.path != path))


def update(folder: Path, change: Callable[[Record], Record]) -> None:
    """Changes a copy's record, and not the time of its last use. In a cache that cannot be written the old record
    stays."""
    with suppress(OSError), _alone(folder.parent):
        before = read_record(folder)
        if before is not None and (after := change(before)) != before:
            used_ns = (folder / RECORD).stat().st_mtime_ns
            write_record(folder, after)
            os.utime(folder / RECORD, ns=(used_ns, used_ns))


def note_use(folder: Path) -> None:
    """Sets the time of last use to now. A folder without a record is no copy, and is left alone. In a cache that cannot
    be written the time stays as it was."""
    if read_record(folder) is not None:
        with suppress(OSError):
            os.utime(folder / RECORD)


def mark_damaged(folder: Path, why: str) -> None:
    """Notes the fault in the copy's record, so that the next process that wants the copy makes it again."""
    update(folder, lambda record: replace(record, damaged=why))


def fault(folder: Path, verify: bool = True) -> str | None:
    """What is wrong with a copy, as far as can be told without reading its weights; None where nothing is wrong.
    Without `verify` a mark as damaged and changed small files are no faults."""
    try:
        if verify:
            record = read_record(folder)
            if record is not None and record.damaged is not None:
                return record.damaged
            if not has_sums(folder):
                return f"{folder} was packed by an older version, without checksums"
            check_files(folder)
        open_packed(folder, verify)
    except PenstockError as error:
        return what_is_wrong(error)
    return None


def what_is_wrong(error: PenstockError) -> str:
    """An error's message without its advice to pack the checkpoint again: a damaged copy is packed again anyway."""
    return error.message.removesuffix(f"; {manifests.AGAIN}").removesuffix("; pack the checkpoint again")


def hold(folder: Path) -> FolderLock | None:
    """A shared lock on a copy for a process that reads it, so that nobody removes it. None where it is gone. Raises
    StorageFailed."""
    with storage_errors("open", folder):
        return lock_folder(folder, exclusive=False, wait=True)


def is_free(folder: Path) -> bool:
    """Whether no process reads or writes the folder just now."""
    try:
        lock = lock_folder(folder, exclusive=True, wait=False)
    except OSError:
        return False
    if lock is not None:
        lock.close()
    return lock is not None


def remove_free(folder: Path) -> bool:
    """Removes a folder from the cache. Returns False where some process reads or writes it. Raises StorageFailed."""
    with storage_errors("remove", folder):
        lock = lock_folder(folder, exclusive=True, wait=False)
        if lock is None:
            return not folder.exists()
        with lock:
            away = _rename_away(folder, lock)
        _remove(away)
        return True


def drop(folder: Path, lock: FolderLock) -> None:
    """Removes the damaged copy that `lock` is on from the cache, even while others read it: the files that they have
    open stay. Does nothing where another process has removed it. Raises StorageFailed."""
    with storage_errors("remove", folder):
        _remove(_rename_away(folder, lock))


def _rename_away(folder: Path, lock: FolderLock) -> Path | None:
    """Renames the folder, so that its name is free at once: removing takes time, and may be interrupted. Returns the
    new name; None where the folder is not there any more."""
    with _alone(folder.parent):
        if not lock.is_at(folder):
            return None
        if folder.name.endswith(REMOVED):
            return folder
        away = folder.with_name(f"{folder.name}.{time.time_ns()}{REMOVED}")
        folder.rename(away)
        return away


def _remove(away: Path | None) -> None:
    """Removes a folder that was renamed, following no link. Another process may be removing it too."""
    with suppress(FileNotFoundError):
        if away is not None:
            shutil.rmtree(away)


@contextmanager
def _alone(models: Path) -> Iterator[None]:
    """Keeps other processes from renaming or marking copies."""
    lock = lock_folder(models, exclusive=True, wait=True)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()
