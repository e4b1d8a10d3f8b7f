"""Lists the cache of packed models, and keeps it small.

Only folders that packing wrote, and links that the user names, are ever removed. No link is followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import BadRequest, PenstockError
from penstock.store import copies
from penstock.store import manifest as manifests
from penstock.store.copies import PARTIAL, RECORD, REMOVED
from penstock.store.files import is_aside, read_json, storage_errors
from penstock.store.manifest import CONFIG, COPIED, PREDICTORS, PROFILE, SHARD_NAME, SUMS
from penstock.store.writer import STATE
from penstock.units import format_bytes

# States of an entry of the cache. `prune` removes those of the second line.
WHOLE, FOREIGN, LINK, NEWER = "whole", "not ours", "link", "newer format"
PARTLY, DAMAGED, OLD, ORPHANED, SUPERSEDED = "partial", "damaged", "old format", "orphaned", "superseded"
WASTE = frozenset({PARTLY, DAMAGED, OLD, ORPHANED, SUPERSEDED})

# Says of a checkpoint's path whether a newer one has taken its place, so that no name leads there any more.
Superseded = Callable[[str], bool]

_OURS = frozenset({manifests.FILE, CONFIG, RECORD, STATE, SUMS, PROFILE, PREDICTORS, *COPIED})


@dataclass(frozen=True)
class Entry:
    """One name under `models/`. `format`: of the weights, None where its name does not say it. `used_s`: when it was
    last used, or else changed, in seconds since 1970. `origins`: the folders of the checkpoints that it is a copy of.
    `why`: what is wrong with it, if anything."""

    folder: Path
    state: str
    nbytes: int
    used_s: float
    format: str | None = None
    origins: tuple[str, ...] = ()
    why: str | None = None

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class Cleared:
    """The entries that were removed, and those that could not be, because a process reads or writes them."""

    removed: tuple[Entry, ...]
    in_use: tuple[Entry, ...]

    @property
    def freed_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.removed)


def is_ours(entry: Entry) -> bool:
    """Whether packing wrote the entry. Only such entries count towards a limit, and are removed to keep it."""
    return entry.state not in (FOREIGN, LINK)


def _never(_: str) -> bool:
    return False


def entries(models: Path, superseded: Superseded = _never) -> list[Entry]:
    """All entries of the folder `models`, sorted by name; none where there is no such folder. Raises StorageFailed."""
    names: list[str] = []
    with storage_errors("read", models), suppress(FileNotFoundError):
        names = sorted(os.listdir(models))
    entries_or_none = (look(models / name, superseded) for name in names)
    return [entry for entry in entries_or_none if entry is not None]


def look(folder: Path, superseded: Superseded = _never) -> Entry | None:
    """The entry of one folder, or None if it is not there any more."""
    try:
        return _entry(folder, superseded)
    except FileNotFoundError:
        return None


def remove(models: Path, names: list[str]) -> tuple[Entry, ...]:
    """Removes entries by name. Of a link only the link is removed. Where one of them cannot be removed, none is.

    Raises BadRequest for a name that is not there, not ours, or in use; StorageFailed."""
    by_name = {entry.name: entry for entry in entries(models)}
    for name in names:
        if name not in by_name:
            raise BadRequest(f"{models} holds no {name!r}: `penstock list` says what it holds")
        entry = by_name[name]
        if entry.state == FOREIGN:
            raise BadRequest(f"{entry.folder} is not ours: {entry.why}")
        if entry.state != LINK and not copies.is_free(entry.folder):
            raise BadRequest(f"{entry.folder} is in use by another process")
    wanted = [by_name[name] for name in dict.fromkeys(names)]
    for entry in wanted:
        if entry.state == LINK:
            entry.folder.unlink(missing_ok=True)
        elif not copies.remove_free(entry.folder):
            raise BadRequest(f"{entry.folder} is in use by another process")
    return tuple(wanted)


def prune(models: Path, superseded: Superseded = _never) -> Cleared:
    """Removes entries that no command will use again: partial, damaged, of an old format, orphaned, or superseded.
    Raises StorageFailed."""
    return _clear([entry for entry in entries(models, superseded) if entry.state in WASTE])


def make_room(models: Path, limit_bytes: int, need_bytes: int = 0, partial: Path | None = None) -> Cleared:
    """Keeps the cache within `limit_bytes`, when `need_bytes` more are to be written into the folder `partial`.

    Entries that no command will use go first, then those that were not used for longest. Entries that processes read
    or write stay, even where they take more than the limit.

    Raises BadRequest, and removes nothing, where the bytes to come do not fit even so; StorageFailed.
    """
    ours = [entry for entry in entries(models) if is_ours(entry)]
    need_bytes += sum(entry.nbytes for entry in ours if entry.folder == partial)
    others = [entry for entry in ours if entry.folder != partial]
    free = [entry for entry in others if copies.is_free(entry.folder)]
    used_bytes, free_bytes = (sum(entry.nbytes for entry in kind) for kind in (others, free))
    if need_bytes and need_bytes + used_bytes - free_bytes > limit_bytes:
        held = f" with {format_bytes(used_bytes - free_bytes)} in use beside it" if used_bytes > free_bytes else ""
        raise BadRequest(
            f"the packed model takes {format_bytes(need_bytes)}: more than --cache-limit {format_bytes(limit_bytes)} "
            f"allows{held}",
            need_bytes=need_bytes + used_bytes - free_bytes,
            limit_bytes=limit_bytes,
        )
    to_remove, over_bytes = [], need_bytes + used_bytes - limit_bytes
    for entry in sorted(free, key=lambda entry: (entry.state not in WASTE, entry.used_s)):
        if over_bytes <= 0:
            break
        to_remove.append(entry)
        over_bytes -= entry.nbytes
    return _clear(to_remove)


def _clear(wanted: list[Entry]) -> Cleared:
    removed: list[Entry] = []
    in_use: list[Entry] = []
    for entry in wanted:
        (removed if copies.remove_free(entry.folder) else in_use).append(entry)
    return Cleared(tuple(removed), tuple(in_use))


def _entry(folder: Path, superseded: Superseded) -> Entry:
    """The entry of a folder. Raises FileNotFoundError where it is gone."""
    status = folder.lstat()
    used_s = status.st_mtime
    if stat.S_ISLNK(status.st_mode):
        return Entry(folder, LINK, 0, used_s, why=f"leads to {os.readlink(folder)}")
    if not stat.S_ISDIR(status.st_mode):
        return Entry(folder, FOREIGN, status.st_size, used_s, why="it is no folder")
    files = _files(folder)
    if files is None:
        return Entry(folder, FOREIGN, 0, used_s, why="it cannot be read")
    nbytes = sum(status.st_size for status in files.values())
    strange = min((name for name, status in files.items() if not _is_ours(name, status)), default=None)
    if strange is not None:
        return Entry(folder, FOREIGN, nbytes, used_s, why=f"it holds {strange!r}, which packing did not write")
    if RECORD in files:
        used_s = files[RECORD].st_mtime
    state, why = _state(folder, superseded)
    record = copies.read_record(folder)
    origins = tuple(origin.path for origin in record.origins) if record is not None else ()
    return Entry(folder, state, nbytes, used_s, copies.weights_in_name(folder.name), origins, why)


def _files(folder: Path) -> dict[str, os.stat_result] | None:
    files = {}
    try:
        with os.scandir(folder) as listed:
            for entry in listed:
                with suppress(FileNotFoundError):
                    files[entry.name] = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    return files


def _is_ours(name: str, status: os.stat_result) -> bool:
    base = name.removesuffix(".tmp")
    named = base in _OURS or SHARD_NAME.fullmatch(base) is not None or is_aside(name)
    # Anything but a folder may have such a name. A shard may be a link to a second disk (`pack --spread`), which
    # removing does not follow. A pipe or a device file holds nothing that could be lost.
    return named and not stat.S_ISDIR(status.st_mode)


def _state(folder: Path, superseded: Superseded) -> tuple[str, str | None]:
    """(state, why) of a folder that holds only files that packing writes."""
    if copies.weights_in_name(folder.name) is None:
        return FOREIGN, "its name is none that the cache gives"
    if folder.name.endswith(REMOVED):
        return PARTLY, "removing it was interrupted"
    if folder.name.endswith(PARTIAL):
        return PARTLY, "packing it was interrupted, or is under way"
    version = _version(folder)
    if version is not None and version != manifests.VERSION:
        return (
            OLD if version < manifests.VERSION else NEWER
        ), f"format {version}; this version reads {manifests.VERSION}"
    record = copies.read_record(folder)
    if record is None:
        return DAMAGED, f"{RECORD} is missing or damaged"
    if (why := copies.fault(folder)) is not None:
        return DAMAGED, why
    there = [origin.path for origin in record.origins if _may_be_there(origin.path)]
    if not there:
        return ORPHANED, "its checkpoint is gone, or holds something else"
    if all(map(superseded, there)):
        return SUPERSEDED, "its model's branch on the Hub has moved on since"
    return WHOLE, None


def _version(folder: Path) -> int | None:
    """The version of the format that penstock.json is in; None where it does not say one."""
    with suppress(PenstockError, ValueError):
        schema = read_json(folder / manifests.FILE, manifests.MAX_BYTES).get("schema")
        name, _, version = str(schema).partition("/")
        return int(version) if name == manifests.SCHEMA else None
    return None


def _may_be_there(path: str) -> bool:
    """Whether a checkpoint may still lie at this path. True also where we may not look."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return True
