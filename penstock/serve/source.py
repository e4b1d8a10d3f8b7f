"""Finds or makes the packed model for a MODEL argument (`serve.named`): what it means, or the packed copy of that."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import BadRequest, DamagedModel
from penstock.hubs.where import Where
from penstock.runtime.host import Progress
from penstock.serve import shapes
from penstock.serve.before_packing import try_tokenizer
from penstock.serve.cached import Cached, Require
from penstock.serve.confined import Child
from penstock.serve.named import locate
from penstock.serve.planning import describe
from penstock.serve.tokenizer import Tokenizer
from penstock.spec.format import Format, parse_format
from penstock.spec.model import ModelSpec
from penstock.store import copies
from penstock.store.gguf.files import name_of
from penstock.store.gguf.header import is_gguf
from penstock.store.identity import require_stamps
from penstock.store.locks import FolderLock
from penstock.store.naming import naming
from penstock.store.packed import Packed, is_packed, open_packed, read_config, read_manifest
from penstock.store.unpacked import Unpacked
from penstock.store.writer import Fill


@dataclass(frozen=True)
class Source:
    """A packed model to load, which `lock` keeps in its place until `close`. `cached`: how to make it again; None where
    the user named a packed model, which is the user's own. `beside_bytes`: memory that this process has taken to
    download it. `unpacked`: the checkpoint to load from, where there was no copy; `lock` is None then, and `folder` has
    the small files. Others may read these until `close`, also where the checkpoint had to be packed first.
    `written_to`: the folder of the copy that was written since."""

    folder: Path
    lock: FolderLock | None
    cached: Cached | None = None
    beside_bytes: int = 0
    unpacked: Unpacked | None = None
    written_to: Path | None = None

    def packed(self, tell: Progress | None) -> Source:
        """Packs the checkpoint that was to be loaded without a copy. `tell`: gets progress and news. Raises as
        `resolve`."""
        assert self.cached is not None and self.unpacked is not None
        self.unpacked.end_reading()
        folder, lock = _telling(self.cached, tell).hold()
        return replace(self, folder=folder, lock=lock)

    @property
    def to_write(self) -> Unpacked | None:
        """The checkpoint that is, or will be, loaded without a copy."""
        return self.unpacked if self.lock is None else None

    def say_writing(self, tell: Progress | None) -> None:
        """Tells what `write` will write."""
        assert self.cached is not None and self.unpacked is not None
        _telling(self.cached, tell).say_writing(self.unpacked)

    def require_unchanged(self) -> None:
        """Raises BrokenModel where the checkpoint that was loaded without a copy is not what it was when it was
        opened: its weights may be of two states."""
        assert self.cached is not None and self.unpacked is not None
        require_stamps(self.cached.checkpoint, self.unpacked.stamps)

    def written(self, fill: Fill, tell: Progress | None) -> Source:
        """Writes the copy of the checkpoint that was loaded without one, and holds it. `fill`: gives its granules.
        `tell`: gets progress and news. Raises as `resolve`."""
        assert self.cached is not None and self.unpacked is not None
        copy = _telling(self.cached, tell).write(self.unpacked, fill)
        return replace(self, lock=copies.hold(copy), written_to=copy)

    def again(self, error: DamagedModel, tell: Progress | None) -> Source:
        """Packs the model once more, in place of this copy, which loading has shown to be damaged. `tell`: gets
        progress and news. Raises `error` where the user named the packed model, else as `resolve`."""
        if self.cached is None or self.lock is None:
            raise error
        cached = _telling(self.cached, tell)
        folder, lock = cached.hold_again(self.folder, self.lock, copies.what_is_wrong(error))
        return replace(self, folder=folder, lock=lock)

    def mark_damaged(self, error: DamagedModel) -> DamagedModel:
        """Notes that a pass has met `error`, so that a copy in the cache is packed again when it is next wanted.
        Returns the error to raise."""
        if not self.packs_again or self.lock is None:
            return error
        why = copies.what_is_wrong(error)
        if self.lock.is_at(self.folder):
            copies.mark_damaged(self.folder, why)
        return DamagedModel(f"{why}; it is packed again when it is next loaded", **error.numbers)

    @property
    def packs_again(self) -> bool:
        """Whether `folder` is a copy in the cache, which is packed again where it is damaged."""
        return self.cached is not None and self.lock is not None

    def spec(self, verify: bool = True) -> ModelSpec:
        """The model's. `verify`: as for `describe`, which it raises as."""
        return self.unpacked.model.spec if self.unpacked is not None else describe(self.folder, verify=verify)[0]

    def model(self, verify: bool = True) -> Packed:
        """The packed model, or what packing would make of the checkpoint. Raises as `open_packed`."""
        return open_packed(self.folder, verify) if self.to_write is None else self.to_write.model

    def open_tokenizer(
        self, within_bytes: int | None = None, verify: bool = True, spare: Child | None = None
    ) -> Tokenizer:
        """Opens the model's tokenizer, and tries that of a checkpoint which is loaded without a copy, as it is tried
        before a checkpoint is packed. The arguments are those of `Tokenizer.open`. Raises as it does, and as
        `check_text_files`."""
        with self.naming():
            tokenizer = Tokenizer.open(self.folder, within_bytes, verify, spare, self.naming)
            if self.unpacked is not None and self.cached is not None:
                try_tokenizer(tokenizer, chat=self.cached.chat)
            return tokenizer

    @property
    def called(self) -> Path:
        """The folder or file by which errors name the model."""
        return self.folder if self.unpacked is None else self.unpacked.job.checkpoint.folder

    def naming(self) -> AbstractContextManager[None]:
        """In this block errors name the checkpoint, and not the folder that was made of its small files."""
        return nullcontext() if self.unpacked is None else naming(self.called, self.unpacked.model.folder)

    def close(self) -> None:
        """Lets other processes remove the packed model."""
        if self.lock is not None:
            self.lock.close()
        if self.unpacked is not None:
            self.unpacked.close()


def _telling(cached: Cached, tell: Progress | None) -> Cached:
    """The same, which tells `tell`; where that is None, whom it told so far. That one's line on a terminal may have
    ended by now."""
    return cached if tell is None else replace(cached, tell=tell)


def resolve(
    model: str,
    *,
    weights: str | None,
    cache: Path,
    host_memory_bytes: int | None = None,
    cache_limit_bytes: int | None = None,
    verify: bool = True,
    on_progress: Progress | None = None,
    chat: bool = False,
    where: Where | None = None,
    unpacked: bool = False,
    require: Require | None = None,
) -> Source:
    """The packed model of `model`. A checkpoint is packed into `cache` the first time, and found there later.

    `weights`: the format, None for the model's own. `host_memory_bytes`: the limit of this process, which a tokenizer
    that is tried before the packing is held to. `cache_limit_bytes`: the most bytes of all copies in the cache;
    those unused for longest are removed first. `verify`: whether a copy's small files are compared with their
    checksums. `chat`: whether the chat template is parsed before the model is packed. `where`: places to look for it
    besides paths. `unpacked`: a checkpoint that has no copy may be given as it is, to be loaded and packed after that.
    Its tokenizer was not tried then: the caller opens it by `Source.open_tokenizer` before it loads. `require`: as for
    `Cached`.

    Raises BadRequest where `model` is no model, and as `require`; UnsupportedModel or BrokenModel where it cannot be
    packed; StorageFailed.
    """
    fmt = parse_format(weights) if weights else None
    # What cannot run, or not with these weights, is refused before it is downloaded.
    located = locate(model, where or Where(), on_progress, lambda path: describe(path, fmt))
    with located.naming():
        path = located.path
        if path.is_dir() and is_packed(path):
            source = Source(_already_packed(path, fmt), copies.hold(path))
            copies.note_use(path)
            return source
        path = _checkpoint(path, model, fmt)
        name = located.name or (path.name if path.is_dir() else name_of(path))
        models = cache.absolute() / copies.MODELS
        kept = host_memory_bytes, cache_limit_bytes
        cached = Cached(path, name, fmt, models, chat, *kept, verify, on_progress, require)
        held = cached.hold_or_open() if unpacked else cached.hold()
        if isinstance(held, Unpacked):
            return Source(held.model.folder, None, cached, located.beside_bytes, held)
        folder, lock = held
        return Source(folder, lock, cached, located.beside_bytes)


def _checkpoint(path: Path, model: str, fmt: Format | None) -> Path:
    """The folder or GGUF file of a checkpoint, absolute. Raises BadRequest where there is none, and as `read_config`
    where its headers are not read anyway."""
    shape = None if path.exists() else shapes.find(model)
    if shape is not None:
        read_config(shape)  # raises for a shape that can only be planned
        raise BadRequest(
            f"{model} is a bundled shape, without weights: `penstock plan {model}` tells its speed, "
            f"`penstock synth {model} DIR` makes random ones"
        )
    gguf = is_gguf(path)
    if fmt is not None or not gguf:  # else `Cached` reads the same, where it has to
        read_config(path)
    if not path.is_dir() and not gguf:
        raise BadRequest(f"{model} has no weights beside it: give the model's folder")
    # The name of a GGUF file says which file of several it is. A link to it may lead to another name.
    return path.absolute() if gguf else path.resolve()


def _already_packed(path: Path, fmt: Format | None) -> Path:
    packed_format = read_manifest(path).weights
    if fmt is not None and fmt.name != packed_format:
        raise BadRequest(f"{path} is packed with {packed_format} weights: for {fmt.name} pack its checkpoint again")
    return path
