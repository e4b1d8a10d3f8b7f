"""The models that Ollama keeps on this machine: `ollama:llama3.2:1b`, run from its files in place.

    manifests/registry.ollama.ai/library/llama3.2/1b    which layers a model has: host / namespace / model / tag
    blobs/sha256-DIGEST                                 a layer

Source: Ollama's types/model (names) and server/manifest.go (layers and their media types). A name leaves away the host
registry.ollama.ai, the namespace library, and the tag latest.

Manifests are other people's files. Their size is bounded, digests have one form, and a blob must be a regular file
in the folder of blobs, or a link to one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import BadRequest, BrokenModel, PenstockError
from penstock.hubs.found import Found
from penstock.hubs.where import Where, ollama_folders
from penstock.store.files import read_json, storage_errors
from penstock.store.header import quoted

SCHEME = "ollama:"
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_MAX_MANIFEST_BYTES, _MAX_LAYERS, _MAX_MANIFESTS = 1 << 20, 100, 10_000
_DEPTH = 4  # host, namespace, model, tag
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})", re.ASCII)
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}", re.ASCII)
_MEDIA = "application/vnd.ollama.image."
# Layers that penstock does without, by what it has instead.
_LEFT_OUT = {
    "template": "its template (the model file's own chat template is used)",
    "system": "its system prompt",
    "params": "its parameters (stop, temperature)",
    "messages": "its messages",
    "projector": "its projector (no pictures)",
}


def listed(where: Where) -> Iterator[Found]:
    """All models of all folders, by name. What is no manifest is passed over."""
    seen = set()
    for folder in ollama_folders(where):
        for path in _manifests(folder / "manifests"):
            kept = _found(folder, path)
            if kept.name not in seen:
                seen.add(kept.name)
                yield kept


def find(text: str, where: Where) -> Found:
    """The model that `text`, a name with `ollama:` before it, means. Raises BadRequest where there is none, or where it
    cannot be run."""
    parts = _parts(text.removeprefix(SCHEME))
    if parts is None:
        raise BadRequest(
            f"{text:.200} is no name of Ollama's: write ollama:llama3.2:1b, as `penstock import` lists them"
        )
    unread = ""
    for folder in ollama_folders(where):
        path = folder.joinpath("manifests", *parts)
        try:
            if not path.is_file():
                continue
        except OSError as error:  # the service's folder may be closed to this user
            unread = f"; {folder} cannot be read: {error.strerror}"
            continue
        kept = _found(folder, path)
        if kept.path is None:
            raise BadRequest(f"{text:.200} cannot be run: {kept.why}")
        return kept
    names = [kept.name for kept in listed(where)]
    there = f"there are {', '.join(names[:10])}" if names else "Ollama keeps none here (OLLAMA_MODELS names its folder)"
    raise BadRequest(f"{text:.200} is not on this machine: {there}{unread}")


def _parts(name: str) -> tuple[str, str, str, str] | None:
    """(host, namespace, model, tag) of a name as Ollama writes it. None where it is none."""
    path, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        path, tag = name, _TAG
    parts = path.split("/")
    full = [*[_HOST, _NAMESPACE][: max(0, _DEPTH - 1 - len(parts))], *parts, tag]
    if len(full) != _DEPTH or not all(_PART.fullmatch(part) for part in full):
        return None
    return full[0], full[1], full[2], full[3]


def _manifests(folder: Path) -> list[Path]:
    """The files four folders deep, sorted. No link to a folder is followed."""
    manifests: list[Path] = []
    for base, folders, names in os.walk(folder):
        depth = len(Path(base).relative_to(folder).parts)
        folders[:] = sorted(each for each in folders if depth < _DEPTH - 1 and _PART.fullmatch(each))
        if depth == _DEPTH - 1:
            manifests += [Path(base, name) for name in sorted(names) if _PART.fullmatch(name)]
        if len(manifests) > _MAX_MANIFESTS:
            break
    return sorted(manifests[:_MAX_MANIFESTS])


def _found(folder: Path, manifest: Path) -> Found:
    """The model of a manifest; whatever is wrong with it is said in `why`."""
    name = _name(manifest.relative_to(folder / "manifests").parts)
    try:
        layers = _layers(manifest)
        kinds = {kind for kind, _, _ in layers}
        nbytes = sum(size for _, _, size in layers)
        left_out = ", ".join(text for kind, text in _LEFT_OUT.items() if kind in kinds)
        if "adapter" in kinds:
            return Found(name, None, nbytes, "it has an adapter over another model, which penstock does not read")
        models = [digest for kind, digest, _ in layers if kind == "model"]
        if len(models) != 1:
            why = f"it has {len(models)} files of weights"
            if not models:
                apart = "tensor" in kinds
                why = "its tensors lie apart, not in GGUF" if apart else "it runs elsewhere: it has no weights"
            return Found(name, None, nbytes, why)
        return Found(name, _blob(folder, models[0]), nbytes, left_out=left_out)
    except PenstockError as error:
        return Found(name, None, 0, error.message)


def _layers(manifest: Path) -> list[tuple[str, str, int]]:
    """(kind, digest, bytes) of each layer. Raises BrokenModel, StorageFailed."""
    layers = read_json(manifest, _MAX_MANIFEST_BYTES).get("layers")
    if not isinstance(layers, list) or len(layers) > _MAX_LAYERS:
        raise BrokenModel(f"{manifest} lists no layers, or more than {_MAX_LAYERS}")
    return [_layer(layer, manifest) for layer in layers]


def _layer(layer: Any, manifest: Path) -> tuple[str, str, int]:
    fields = layer if isinstance(layer, dict) else {}
    kind, digest, size = fields.get("mediaType"), fields.get("digest"), fields.get("size")
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if not isinstance(kind, str) or match is None:
        raise BrokenModel(f"{manifest} has a layer without a kind and a digest")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 50:
        raise BrokenModel(f"{manifest} has a layer of {size!r:.40} bytes")
    return kind.removeprefix(_MEDIA), match[1], size


def _blob(folder: Path, digest: str) -> Path:
    """A layer's file. Raises BrokenModel where it is not there, or leads out of the store."""
    blobs = folder / "blobs"
    path = blobs / f"sha256-{digest}"
    with storage_errors("read", path):
        there = path.is_file()
    if not there:
        raise BrokenModel(f"{path} is missing: `ollama pull` brings it")
    if path.resolve().parent != blobs.resolve():
        raise BrokenModel(f"{path} leads to {quoted(str(path.resolve()))}, outside of Ollama's folder")
    return path


def _name(parts: tuple[str, ...]) -> str:
    """`ollama:llama3.2:1b`: as users type it, with what is usual left away."""
    host, namespace, model, tag = parts
    path = [model]
    if namespace != _NAMESPACE or host != _HOST:
        path = [namespace, model]
    if host != _HOST:
        path = [host, namespace, model]
    return f"{SCHEME}{'/'.join(path)}:{tag}"
