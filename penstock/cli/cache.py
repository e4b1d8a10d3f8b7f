"""`penstock list`, `rm` and `prune`: lists the cache of packed models, and removes models from it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from penstock.cli.cache_flag import cache_folder
from penstock.cli.options import CacheName, Json
from penstock.cli.output import note, one_line, print_json, table
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.store.cache import Entry

_HEAD = ("name", "format", "size", "last used", "state", "packed from")


def list_(cache: CacheName = None, as_json: Json = False) -> None:
    """What lies in the cache of packed models.

    Name, format, size, when it was last used, its state, and the folder that it was packed from. States: whole; in use;
    partial (packing or removing was interrupted); damaged; orphaned (its checkpoint is gone or holds something else);
    superseded (its model's branch on the Hub has moved on since); old format or newer format (of another version);
    link; not ours (penstock did not write it, and leaves it alone).
    """
    from penstock.hubs.transfer import is_superseded
    from penstock.store import cache as caches
    from penstock.store import copies

    models = _models(cache)
    entries = caches.entries(models, is_superseded)
    in_use = {entry.name for entry in entries if caches.is_ours(entry) and not copies.is_free(entry.folder)}
    total_bytes = sum(entry.nbytes for entry in entries if caches.is_ours(entry))
    if as_json:
        listed = [{**_report(entry), "in_use": entry.name in in_use} for entry in entries]
        print_json({"folder": str(models), "bytes": total_bytes, "models": listed})
        return
    if not entries:
        note(f"{models} holds no packed models")
        return
    print(table([_HEAD, *(_row(entry, entry.name in in_use) for entry in entries)], right=[2]))
    for entry in entries:
        if entry.why is not None:
            note(f"{entry.name}: {entry.why}")
    note(f"{format_bytes(total_bytes)} in {models}")


def rm(
    names: Annotated[list[str], Argument(metavar="NAME…", help="Packed models, as `penstock list` names them.")],
    cache: CacheName = None,
    as_json: Json = False,
) -> None:
    """Removes packed models from the cache.

    All that are named, or none where one is not there, in use, or not ours. What they were packed from stays, downloads
    too: a line says where.
    """
    from penstock.store import cache as caches

    removed = caches.remove(_models(cache), names)
    _tell_cleared(removed, (), as_json)
    for origin in dict.fromkeys(origin for entry in removed for origin in entry.origins):
        if os.path.exists(origin):  # Path's raises where a folder above may not be searched
            note(f"stays: {one_line(origin)}, which it was packed from")


def prune(cache: CacheName = None, as_json: Json = False) -> None:
    """Removes from the cache what no command will use again.

    What is partial, damaged, of an old format, or packed from a checkpoint that is gone, holds something else, or is of
    a commit that the model's branch on the Hub has left. What a process uses stays, and so do downloads.
    """
    from penstock.hubs.transfer import is_superseded
    from penstock.store import cache as caches

    cleared = caches.prune(_models(cache), is_superseded)
    _tell_cleared(cleared.removed, cleared.in_use, as_json)


def _models(cache: str | None) -> Path:
    from penstock.store.copies import MODELS

    return cache_folder(cache).absolute() / MODELS


def _tell_cleared(removed: Iterable[Entry], in_use: Iterable[Entry], as_json: bool) -> None:
    freed_bytes = sum(entry.nbytes for entry in removed)
    for entry in removed:
        note(f"removed {entry.name}, {entry.state}, {format_bytes(entry.nbytes)}")
    for entry in in_use:
        note(f"{entry.name} is in use by another process and stays")
    if as_json:
        names = {"removed": [entry.name for entry in removed], "in_use": [entry.name for entry in in_use]}
        print_json({**names, "freed_bytes": freed_bytes})
        return
    note(f"freed {format_bytes(freed_bytes)}")


def _report(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "format": entry.format,
        "bytes": entry.nbytes,
        "last_used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.used_s)),
        "state": entry.state,
        "packed_from": list(entry.origins),
        "why": entry.why,
    }


def _row(entry: Entry, in_use: bool) -> tuple[str, ...]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_s))
    state = f"{entry.state}, in use" if in_use else entry.state
    cells = (entry.name, entry.format or "–", format_bytes(entry.nbytes), used, state, ", ".join(entry.origins) or "–")
    return tuple(one_line(cell) for cell in cells)
