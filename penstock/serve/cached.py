"""A checkpoint's packed copy in the cache: found, made where there is none, made again where it is damaged."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.errors import BadRequest, BrokenModel, StorageFailed
from penstock.runtime.host import Progress
from penstock.serve.before_packing import check_text_files
from penstock.spec.format import Format
from penstock.store import cache, copies
from penstock.store.copies import Origin, Record
from penstock.store.identity import Stamp, find_same, stamps, unchanged
from penstock.store.locks import FolderLock
from penstock.store.pack import pack
from penstock.store.writer import Waiting, free_bytes
from penstock.units import format_bytes

# Another process may remove a copy between two looks at it. So often in a row, something else is wrong.
_TRIES = 5


@dataclass(frozen=True)
class Cached:
    """A checkpoint's folder that is wanted in a format, and `models`, the folder of the cache that copies lie in.

    `name`: what the copy is called after. `chat`: its chat template must make sense before it is packed.
    `limit_bytes`: of all copies together. `verify`: its small files are compared with what was packed. `tell`: hears of
    progress and news.
    """

    checkpoint: Path
    name: str
    weights: Format
    models: Path
    chat: bool
    limit_bytes: int | None = None
    verify: bool = True
    tell: Progress | None = None

    def hold(self) -> tuple[Path, FolderLock]:
        """The copy's folder, whole as far as can be told without reading its weights, and the lock that keeps it
        there. Raises as `pack`."""
        for _ in range(_TRIES):
            now = stamps(self.checkpoint)
            folder = self._find(now) or self._make(now)
            lock = copies.hold(folder)
            if lock is None:
                continue
            why = copies.fault(folder, self.verify)
            if why is None:
                copies.note_use(folder)
                if self.limit_bytes is not None:
                    self._clear(self.limit_bytes)
                return folder, lock
            self._drop(folder, lock, why)
        raise StorageFailed(
            f"the copy of {self.checkpoint} in {self.models} was gone or damaged {_TRIES} times in a row"
        )

    def hold_again(self, folder: Path, lock: FolderLock, why: str) -> tuple[Path, FolderLock]:
        """The same, when loading the copy in `folder`, which `lock` is on, has shown that it is damaged. Raises
        BrokenModel where the checkpoint can no longer be packed."""
        try:
            stamps(self.checkpoint)
        except (BadRequest, BrokenModel) as error:
            raise BrokenModel(f"{why}; it cannot be packed again: {error.message}") from None
        self._drop(folder, lock, why)
        return self.hold()

    def _find(self, now: dict[str, Stamp]) -> Path | None:
        """A copy made from what the checkpoint holds now. Its files' stamps say so, or else a comparison."""
        origin = Origin(str(self.checkpoint), now)
        wanted = {f: r for f, r in copies.records(self.models).items() if r.weights == self.weights.name}
        for folder, record in wanted.items():
            if any(known.stamps == now for known in record.origins):
                copies.update(folder, lambda record: copies.add_origin(record, origin))
                return folder
        whole = {f: _known(r, now) for f, r in wanted.items() if copies.fault(f) is None}
        comparing = self._progress("comparing {} with its packed copy")
        same = find_same(self.checkpoint, self.weights, whole, comparing)
        if same is not None:
            if stamps(self.checkpoint) != now:
                raise BrokenModel(f"{self.checkpoint} changed while it was read: run the command again")
            copies.update(same, lambda record: copies.add_origin(record, origin))
        for folder in whole:
            if folder != same and origin.path in (known.path for known in wanted[folder].origins):
                copies.update(folder, lambda record: copies.without_origin(record, origin.path))
                self._say(f"{folder.name} was packed from what {origin.path} held before: `penstock prune` removes it")
        return same

    def _make(self, now: dict[str, Stamp]) -> Path:
        folder = self.models / copies.copy_name(self.name, now, self.weights.name)
        if os.path.lexists(folder):
            if copies.read_record(folder) is not None:
                return folder  # another process has made it just now
            self._drop(folder, None, "it has no record")

        @contextmanager
        def writing(aside: Path, missing_bytes: int) -> Iterator[None]:
            if self.limit_bytes is not None:
                self._clear(self.limit_bytes, missing_bytes, aside)
            free = format_bytes(free_bytes(aside))
            self._say(f"writes {format_bytes(missing_bytes)} to {folder}, {free} free")
            yield
            then = stamps(self.checkpoint)
            if then != now and find_same(self.checkpoint, self.weights, {aside: unchanged(now, then)}) is None:
                shutil.rmtree(aside)
                raise BrokenModel(f"{self.checkpoint} changed while it was packed: run the command again")
            copies.write_record(aside, Record(self.weights.name, (Origin(str(self.checkpoint), then),)))

        packing, check = self._progress("packing {}"), partial(check_text_files, chat=self.chat)
        waiting = self._waiting(folder)
        return pack(self.checkpoint, folder, self.weights, packing, check=check, waiting=waiting, writing=writing)

    def _drop(self, folder: Path, lock: FolderLock | None, why: str) -> None:
        """`lock`: on the folder, where it is held already. Raises BadRequest where the folder holds what packing did
        not write, which no damage makes ours."""
        entry = cache.look(folder)
        if entry is not None and not cache.is_ours(entry):
            raise BadRequest(f"{folder} is in the way of a packed copy: {entry.why}; move it away ({why})")
        lock = lock or copies.hold(folder)
        if lock is not None:
            with lock:
                self._say(f"packing {folder.name} again: {why}", loud=True)
                copies.drop(folder, lock)

    def _clear(self, limit_bytes: int, need_bytes: int = 0, partial: Path | None = None) -> None:
        for entry in cache.make_room(self.models, limit_bytes, need_bytes, partial).removed:
            freed, limit = format_bytes(entry.nbytes), format_bytes(limit_bytes)
            self._say(f"removed {entry.name} ({freed}) to keep the cache within {limit}", loud=True)

    def _waiting(self, folder: Path) -> Waiting:
        said = False

        def waiting(done_bytes: int, total_bytes: int) -> None:
            nonlocal said
            if not said:
                said = True
                self._say(f"another process is packing {folder.name}: waiting for it")
            if self.tell is not None:
                self.tell("waiting for another process to pack", done_bytes, total_bytes)

        return waiting

    def _progress(self, what: str) -> Callable[[int, int, str], None] | None:
        """`what` with the key of the part at work in it."""
        tell = self.tell
        if tell is None:
            return None
        return lambda done, total, key: tell(what.format(key), done, total)

    def _say(self, text: str, loud: bool = False) -> None:
        """News. `loud`: also where nobody asked to hear of progress."""
        if self.tell is not None:
            self.tell(text, 0, 0)
        elif loud:
            warnings.warn(text, stacklevel=2)


def _known(record: Record, now: dict[str, Stamp]) -> frozenset[str]:
    """Files of a checkpoint that stamps show to be those that a copy was made from."""
    return frozenset().union(*(unchanged(origin.stamps, now) for origin in record.origins))
