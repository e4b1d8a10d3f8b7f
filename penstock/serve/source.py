"""Finds or makes the packed model for a MODEL argument: a packed model, a checkpoint's folder, a GGUF file or a Hub
id."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import BadRequest, DamagedModel
from penstock.runtime.host import Progress
from penstock.serve import shapes
from penstock.serve.cached import Cached
from penstock.spec.format import Format, parse_format
from penstock.store import copies
from penstock.store.gguf.files import name_of
from penstock.store.gguf.header import is_gguf
from penstock.store.locks import FolderLock
from penstock.store.own import own_format
from penstock.store.packed import is_packed, read_config, read_manifest

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# The files that are downloaded: none of another framework's copies of the weights.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True)
class Source:
    """A packed model to load, which `lock` keeps in its place until `close`. `cached`: how to make it again; None where
    the user named a packed model, which is the user's own."""

    folder: Path
    lock: FolderLock | None
    cached: Cached | None = None

    def again(self, error: DamagedModel) -> Source:
        """Packs the model once more, in place of this copy, which loading has shown to be damaged. Raises `error` where
        the user named the packed model, else as `resolve`."""
        if self.cached is None or self.lock is None:
            raise error
        folder, lock = self.cached.hold_again(self.folder, self.lock, copies.what_is_wrong(error))
        return Source(folder, lock, self.cached)

    def mark_damaged(self, error: DamagedModel) -> DamagedModel:
        """Notes that a pass has met `error`, so that a copy in the cache is packed again when it is next wanted.
        Returns the error to raise."""
        if self.cached is None or self.lock is None:
            return error
        why = copies.what_is_wrong(error)
        if self.lock.is_at(self.folder):
            copies.mark_damaged(self.folder, why)
        return DamagedModel(f"{why}; the next start packs it again", **error.numbers)

    def close(self) -> None:
        """Lets other processes remove the packed model."""
        if self.lock is not None:
            self.lock.close()


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
) -> Source:
    """The packed model of `model`. A checkpoint is packed into `cache` the first time, and found there later.

    `weights`: the format, None for the model's own. `host_memory_bytes`: the limit of this process, which a tokenizer
    that is tried before the packing is held to. `cache_limit_bytes`: the most bytes of all copies in the cache;
    those unused for longest are removed first. `verify`: whether a copy's small files are compared with their
    checksums. `chat`: whether the chat template is parsed before the model is packed.

    Raises BadRequest where `model` is no model; UnsupportedModel or BrokenModel where it cannot be packed;
    StorageFailed.
    """
    fmt = parse_format(weights) if weights else None
    path = Path(os.path.expanduser(model))
    hub_id = None
    if not path.exists():
        shape = shapes.find(model)
        if shape is not None:
            read_config(shape)  # raises for a shape that can only be planned
            raise BadRequest(
                f"{model} is a bundled shape, without weights: `penstock plan {model}` tells its speed, "
                f"`penstock synth {model} DIR` makes random ones"
            )
        if _HUB_ID.fullmatch(model):
            path, hub_id = download(model), model
    if path.is_dir() and is_packed(path):
        source = Source(_already_packed(path, fmt), copies.hold(path))
        copies.note_use(path)
        return source
    read_config(path)
    gguf = is_gguf(path)
    if not path.is_dir() and not gguf:
        raise BadRequest(f"{model} has no weights beside it: give the model's folder")
    # The name of a GGUF file says which file of several it is. A link to it may lead to another name.
    path = path.absolute() if gguf else path.resolve()
    name = name_of(path) if gguf else path.name
    if hub_id is not None:
        name = hub_id.rpartition("/")[2]  # a download's folder is called by its revision
    models = cache.absolute() / copies.MODELS
    kept = host_memory_bytes, cache_limit_bytes
    cached = Cached(path, name, fmt or own_format(path), models, chat, *kept, verify, on_progress)
    folder, lock = cached.hold()
    return Source(folder, lock, cached)


def download(hub_id: str) -> Path:
    """The folder of a Hub repository's snapshot. An earlier download that was interrupted goes on. Needs the extra
    `hub`. Raises BadRequest without it, and where the download fails."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise BadRequest(f"{hub_id} is no folder here; to download it from the Hub install penstock[hub]") from None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadRequest(f"{hub_id} is no folder here, and the download failed: {reason}") from None


def _already_packed(path: Path, fmt: Format | None) -> Path:
    packed_format = read_manifest(path).weights
    if fmt is not None and fmt.name != packed_format:
        raise BadRequest(f"{path} is packed with {packed_format} weights: for {fmt.name} pack its checkpoint again")
    return path
