"""The MODEL argument, a packed model, a checkpoint folder or a Hub id, to the packed model that the engine opens."""

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
from penstock.store.locks import FolderLock
from penstock.store.pack import own_format
from penstock.store.packed import is_packed, read_config, read_manifest

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What a model needs, and no other framework's copy of the weights.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True)
class Source:
    """A packed model to load, kept where it is until `close`. `cached`: how to make it again; None where the user named
    a packed model, which is the user's own."""

    folder: Path
    lock: FolderLock | None
    cached: Cached | None = None

    def again(self, error: DamagedModel) -> Source:
        """The model packed once more, in place of this copy that loading has shown to be damaged. Raises `error` where
        the user named it, else as `resolve`."""
        if self.cached is None or self.lock is None:
            raise error
        folder, lock = self.cached.hold_again(self.folder, self.lock, copies.what_is_wrong(error))
        return Source(folder, lock, self.cached)

    def mark_damaged(self, error: DamagedModel) -> DamagedModel:
        """What to raise where a pass has met `error`: a copy in the cache is packed again when it is wanted next."""
        if self.cached is None or self.lock is None:
            return error
        why = copies.what_is_wrong(error)
        if self.lock.is_at(self.folder):
            copies.mark_damaged(self.folder, why)
        return DamagedModel(f"{why}; the next start packs it again", **error.numbers)

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()


def resolve(
    model: str,
    *,
    weights: str | None,
    cache: Path,
    cache_limit_bytes: int | None = None,
    verify: bool = True,
    on_progress: Progress | None = None,
    chat: bool = False,
) -> Source:
    """A packed model; a checkpoint is packed into `cache` the first time and found there later.

    `cache_limit_bytes`: what all copies in the cache may take; the longest unused go first. `verify`: a copy is
    compared with what was packed. `chat`: it is wanted with its chat template, which must make sense before it is
    packed. Raises BadRequest for what is no model, UnsupportedModel or BrokenModel for one that cannot be packed.
    """
    fmt = parse_format(weights) if weights else None
    path = Path(os.path.expanduser(model))
    if path.suffix == ".gguf":
        raise BadRequest(f"{model}: this version does not read GGUF files; give the model's Hugging Face folder")
    hub_id = None
    if not path.exists():
        if shapes.find(model) is not None:
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
    if not path.is_dir():
        raise BadRequest(f"{model} has no weights beside it: give the model's folder")
    path = path.resolve()
    name = hub_id.rpartition("/")[2] if hub_id else path.name  # a download's folder is called by its revision
    models = cache.absolute() / copies.MODELS
    cached = Cached(path, name, fmt or own_format(path), models, chat, cache_limit_bytes, verify, on_progress)
    folder, lock = cached.hold()
    return Source(folder, lock, cached)


def download(hub_id: str) -> Path:
    """A snapshot of a Hub repository, resumed where an earlier download stopped. Needs the extra `hub`. Raises
    BadRequest without it, and where the download fails."""
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
    found = read_manifest(path).weights
    if fmt is not None and fmt.name != found:
        raise BadRequest(f"{path} is packed with {found} weights: for {fmt.name} pack its checkpoint again")
    return path
