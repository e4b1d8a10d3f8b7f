"""The MODEL argument: a packed model, a checkpoint folder or a Hub id, to the folder that the engine opens."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from penstock.errors import BadRequest
from penstock.serve import shapes
from penstock.serve.session import Progress
from penstock.spec.format import Format, parse_format
from penstock.store import manifest as manifests
from penstock.store.pack import COPIED, pack
from penstock.store.packed import is_packed, read_config, read_manifest

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What a model needs, and no other framework's copy of the weights.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve(model: str, *, weights: str | None, cache: Path, on_progress: Progress | None = None) -> Path:
    """A packed model's folder; a checkpoint is packed into `cache` the first time and found there later.

    Raises BadRequest for what is no model, UnsupportedModel or BrokenModel for one that cannot be packed.
    """
    fmt = parse_format(weights) if weights else None
    path = Path(os.path.expanduser(model))
    if path.suffix == ".gguf":
        raise BadRequest(f"{model}: this version does not read GGUF files; give the model's Hugging Face folder")
    if not path.exists():
        if shapes.find(model) is not None:
            raise BadRequest(
                f"{model} is a bundled shape, without weights: `penstock plan {model}` tells its speed, "
                f"`penstock synth {model} DIR` makes random ones"
            )
        if _HUB_ID.fullmatch(model):
            path = download(model)
    if path.is_dir() and is_packed(path):
        return _already_packed(path, fmt)
    _, spec = read_config(path)
    if not path.is_dir():
        raise BadRequest(f"{model} has no weights beside it: give the model's folder")
    name = (fmt or Format(spec.dtype)).name
    target = cache / "models" / f"{path.resolve().name}-{_digest(path)}-{name}"
    if not is_packed(target):
        pack(path, target, fmt, progress=_named(on_progress))
    return target


def download(hub_id: str) -> Path:
    """A snapshot of a Hub repository, resumed where an earlier download stopped. Needs the extra `hub`."""
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


def _digest(path: Path) -> str:
    """Tells checkpoints of the same name apart, and a copy from one of a newer checkpoint or penstock."""
    files = [*sorted(path.glob("*.safetensors")), *(path / name for name in ("config.json", *COPIED))]
    stamps = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in dict.fromkeys(files) if f.is_file()]
    told = repr((manifests.VERSION, str(path.resolve()), stamps))
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def _named(on_progress: Progress | None) -> Callable[[int, int, str], None] | None:
    if on_progress is None:
        return None
    return lambda done, total, key: on_progress(f"packing {key}", done, total)
