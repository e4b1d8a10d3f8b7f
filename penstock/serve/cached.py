"""Finds the packed copy of a checkpoint in the cache, makes it where there is none, and makes a damaged one again."""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import BadRequest, BrokenModel, StorageFailed
from penstock.runtime.host import Progress
from penstock.serve.before_packing import check_text_files
from penstock.spec.format import Format
from penstock.spec.model import ModelSpec
from penstock.store import cache, copies
from penstock.store.copies import Origin, Record
from penstock.store.identity import Stamp, find_same, require_stamps, stamps, unchanged
from penstock.store.locks import FolderLock, lock_folder
from penstock.store.own import own_format
from penstock.store.pack import pack
from penstock.store.packed import read_config
from penstock.store.unpacked import Unpacked
from penstock.store.writer import Fill, Waiting, Writing, free_bytes, partial_of
from penstock.units import format_bytes

Require = Callable[[ModelSpec, str], None]

# Another process may remove a copy between two looks at it. Where that happens so often in a row, something else is
# wrong.
_TRIES = 5


@dataclass(frozen=True)
class Cached:
    """A checkpoint, and how its packed copy in the cache is found or made.

    checkpoint    the checkpoint's path
    name          the beginning of the copy's name
    weights       the format of the copy; None for the checkpoint's own
    models        the folder of the cache that copies lie in
    chat          whether the chat template is parsed before the checkpoint is packed
    within_bytes  the most memory that this process may take; None: any
    limit_bytes   the most bytes of all copies together; None: any
    verify        whether the copy's small files are compared with their checksums
    tell          gets progress and news
    require       is called before a copy is made, with the checkpoint's spec and path. It raises BadRequest if the
                  copy would be refused afterwards, so that nothing is packed in vain
    """

    checkpoint: Path
    name: str
    weights: Format | None
    models: Path
    chat: bool
    within_bytes: int | None = None
    limit_bytes: int | None = None
    verify: bool = True
    tell: Progress | None = None
    require: Require | None = None

    def hold(self) -> tuple[Path, FolderLock]:
        """The copy's folder, and the lock that keeps it there. The copy is whole as far as can be told without reading
        its weights. Raises as `pack`."""
        held = self._hold(self._make)
        assert not isinstance(held, Unpacked)
        return held

    def hold_or_open(self) -> tuple[Path, FolderLock] | Unpacked:
        """As `hold`, but where there is no whole copy yet the checkpoint itself, to be loaded without one. The copy is
        written later, by `write`, or none is where the disk has no room for one (`Unpacked.no_copy`). Its tokenizer was
        not tried then. Raises as `hold`."""
        return self._hold(lambda now: self._open(now) or self._make(now))

    def _hold(self, make: Callable[[dict[str, Stamp]], Path | Unpacked]) -> tuple[Path, FolderLock] | Unpacked:
        """`make`: called with the files' stamps where there is no copy."""
        for _ in range(_TRIES):
            now = stamps(self.checkpoint)
            there = self._known_as_own(now) or self._find(now)
            if there is None and self.require is not None:
                self.require(read_config(self.checkpoint)[1], str(self.checkpoint))
            folder = there or make(now)
            if isinstance(folder, Unpacked):
                return folder
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
        """As `hold`, after loading has shown that the copy in `folder`, which `lock` is on, is damaged. Raises
        BrokenModel where the checkpoint can no longer be packed."""
        try:
            stamps(self.checkpoint)
        except (BadRequest, BrokenModel) as error:
            raise BrokenModel(f"{why}; it cannot be packed again: {error.message}") from None
        self._drop(folder, lock, why)
        return self.hold()

    @functools.cached_property
    def _format(self) -> Format:
        """The format that is wanted. Raises as `own_format`."""
        return self.weights or own_format(self.checkpoint)

    def _known_as_own(self, now: dict[str, Stamp]) -> Path | None:
        """A copy that is known to have the format of the very files that are there now. Their headers need not be read
        then, which takes 40 ms where a GGUF file has 128 thousand tokens. None where there is none, or another format
        is wanted."""
        if self.weights is not None:
            return None
        for folder, record in copies.records(self.models).items():
            if any(known.own and known.stamps == now for known in record.origins):
                copies.update(folder, lambda record: copies.add_origin(record, Origin(str(self.checkpoint), now, True)))
                return folder
        return None

    def _find(self, now: dict[str, Stamp]) -> Path | None:
        """A copy of what the checkpoint holds now, found by its files' stamps, or else by a comparison. None where
        there is none."""
        origin = Origin(str(self.checkpoint), now, self.weights is None)
        wanted = {f: r for f, r in copies.records(self.models).items() if r.weights == self._format.name}
        for folder, record in wanted.items():
            if same_files := [known for known in record.origins if known.stamps == now]:
                now_known = replace(origin, own=origin.own or any(known.own for known in same_files))
                copies.update(folder, functools.partial(copies.add_origin, origin=now_known))
                return folder
        whole = {f: _known(r, now) for f, r in wanted.items() if copies.fault(f) is None}
        comparing = self._progress("comparing {} with its packed copy")
        same = find_same(self.checkpoint, self._format, whole, comparing)
        if same is not None:
            require_stamps(self.checkpoint, now)
            copies.update(same, lambda record: copies.add_origin(record, origin))
        for folder in whole:
            if folder != same and origin.path in (known.path for known in wanted[folder].origins):
                copies.update(folder, lambda record: copies.without_origin(record, origin.path))
                self._say(f"{folder.name} was packed from what {origin.path} held before: `penstock prune` removes it")
        return same

    def _make(self, now: dict[str, Stamp]) -> Path:
        """Packs the checkpoint into the cache, unless another process has done so. `now`: its files' stamps."""
        folder = self._place(now, self._format)
        if os.path.lexists(folder):
            if copies.read_record(folder) is not None:
                return folder  # another process has made it just now
            self._drop(folder, None, "it has no record")
        return pack(
            self.checkpoint,
            folder,
            self._format,
            self._progress("packing {}"),
            check=self._check,
            waiting=self._waiting(folder),
            writing=self._writing(folder, now, self._format),
        )

    def _open(self, now: dict[str, Stamp]) -> Unpacked | None:
        """The checkpoint, open to be loaded. None where another process is writing its copy, or where a copy would be
        beyond the limit of the cache: packing then waits, makes room, or says what is wrong. Raises as `pack`."""
        with ExitStack() as opened:
            try:
                unpacked = Unpacked.open(self.checkpoint, self.weights, now)
            except (StorageFailed, OSError):  # as where small files have no temporary folder
                return None
            opened.callback(unpacked.close)
            folder = self._place(now, unpacked.job.weights)
            if os.path.lexists(folder) or not _is_idle(partial_of(folder)):
                return None
            if self.limit_bytes is not None:
                kept_bytes = sum(entry.nbytes for entry in cache.entries(self.models) if cache.is_ours(entry))
                if kept_bytes + unpacked.copy_bytes > self.limit_bytes:  # packing makes room, or refuses
                    return None
            unpacked = replace(unpacked, no_copy=_no_room(folder, unpacked.copy_bytes))
            opened.pop_all()
        return unpacked

    def say_writing(self, unpacked: Unpacked) -> None:
        """Tells what `write` will write, or why there will be no copy, before the weights are loaded."""
        if unpacked.no_copy:
            self._say(f"keeps no packed copy, so each start reads the checkpoint: {unpacked.no_copy}", loud=True)
            return
        folder = self._place(unpacked.stamps, unpacked.job.weights)
        free = format_bytes(free_bytes(_there(folder)))
        missing = format_bytes(_missing_bytes(folder, unpacked.copy_bytes))
        self._say(f"writes {missing} to {folder} when it is loaded, {free} free")

    def write(self, unpacked: Unpacked, fill: Fill) -> Path:
        """Writes the copy of a checkpoint that was loaded without one, unless another process has made it meanwhile,
        and returns its folder. `fill`: gives the granules. Raises as `pack`, and BrokenModel where the checkpoint
        changed."""
        fmt = unpacked.job.weights
        folder = self._place(unpacked.stamps, fmt)
        if copies.read_record(folder) is not None:
            return folder
        waiting, writing = self._waiting(folder), self._writing(folder, unpacked.stamps, fmt, said=True)
        telling = self._progress("writing the packed copy, {}")
        return unpacked.job.write(folder, fill, telling, waiting=waiting, writing=writing)

    def _place(self, now: dict[str, Stamp], fmt: Format) -> Path:
        """The folder of the copy that is to be made."""
        return self.models / copies.copy_name(self.name, now, fmt.name)

    def _writing(self, folder: Path, now: dict[str, Stamp], fmt: Format, said: bool = False) -> Writing:
        """What goes on around the writing of a copy. `now`: the stamps of what it is made from. `said`: whether it was
        told what is written."""

        @contextmanager
        def writing(aside: Path, missing_bytes: int) -> Iterator[None]:
            if self.limit_bytes is not None:
                self._clear(self.limit_bytes, missing_bytes, aside)
            if not said:
                free = format_bytes(free_bytes(aside))
                self._say(f"writes {format_bytes(missing_bytes)} to {folder}, {free} free")
            yield
            then = stamps(self.checkpoint)
            comparing = self._progress("comparing {} with its packed copy")  # a copy may be broken off there too
            if then != now and find_same(self.checkpoint, fmt, {aside: unchanged(now, then)}, comparing) is None:
                shutil.rmtree(aside)
                raise BrokenModel(f"{self.checkpoint} changed while it was packed: run the command again")
            origin = Origin(str(self.checkpoint), then, self.weights is None)
            copies.write_record(aside, Record(fmt.name, (origin,)))

        return writing

    def _check(self, folder: Path) -> None:
        check_text_files(folder, chat=self.chat, within_bytes=self.within_bytes)

    def _drop(self, folder: Path, lock: FolderLock | None, why: str) -> None:
        """Removes a damaged copy. `lock`: on the folder, where it is held already. Raises BadRequest where the folder
        holds files that packing did not write."""
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

    def _progress(self, doing: str) -> Callable[[int, int, str], None] | None:
        """A `Progress` of packing. `doing`: "packing {}", in which {} becomes the key of the part at work."""
        tell = self.tell
        if tell is None:
            return None
        return lambda done, total, key: tell(doing.format(key), done, total)

    def _say(self, text: str, loud: bool = False) -> None:
        """Tells news. `loud`: as a warning where nobody asked for progress."""
        if self.tell is not None:
            self.tell(text, 0, 0)
        elif loud:
            warnings.warn(text, stacklevel=2)


def _no_room(folder: Path, nbytes: int) -> str:
    """Why a copy of so many bytes cannot be made in a folder, which is not there yet; "" where it can."""
    there, need = _there(folder.parent), _missing_bytes(folder, nbytes)
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written to"
    have = free_bytes(there)
    return "" if need <= have else f"{there} needs {format_bytes(need)}, {format_bytes(have)} are free"


def _missing_bytes(folder: Path, nbytes: int) -> int:
    """What a copy of so many bytes still takes where it was begun, whole shards of which stay."""
    there = 0
    with suppress(OSError):  # another process may be done with it, or remove it
        there = sum(file.stat().st_size for file in partial_of(folder).glob("model-*") if file.suffix != ".tmp")
    return max(0, nbytes - there)


def _is_idle(partial: Path) -> bool:
    """Whether a folder in which a copy was begun is there no more, or no process is at it. What else stands in its
    place is for packing to complain of."""
    if not os.path.lexists(partial):
        return True
    if partial.is_symlink() or not partial.is_dir() or not os.access(partial, os.R_OK | os.W_OK | os.X_OK):
        return False
    lock = lock_folder(partial, exclusive=True, wait=False)
    if lock is not None:
        lock.close()
    return lock is not None


def _there(folder: Path) -> Path:
    """The folder, or the nearest one above it that there is."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def _known(record: Record, now: dict[str, Stamp]) -> frozenset[str]:
    """Names of the checkpoint's files that the copy was made from, by their stamps."""
    return frozenset().union(*(unchanged(origin.stamps, now) for origin in record.origins))
