"""How a model that was made for embeddings pools its hidden states, as its files say it.

Folders in the form of sentence-transformers say it in `1_Pooling/config.json`, GGUF files in `ARCH.pooling_type`. A
packed model has it in its config.json, under a name of our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.store.files import read_json_if_there
from penstock.store.manifest import CONFIG

KEY = "penstock_pooling"  # in a packed model's config.json
SOURCE = "1_Pooling/config.json"
_MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_GGUF_TYPES = {1: "mean", 3: "last"}  # llama.cpp's numbers


def of_folder(folder: Path) -> str | None:
    """What a checkpoint's folder says: last or mean. None where it says nothing, or a way that decoders do not have.
    Raises BrokenModel for a file that is no JSON."""
    said = read_json_if_there(folder / SOURCE)
    modes = [mode for key, mode in _MODES.items() if said.get(key) is True]
    others = [key for key, value in said.items() if key.startswith("pooling_mode_") and value is True]
    return modes[0] if len(modes) == len(others) == 1 else None


def of_gguf(metadata: Mapping[str, Any]) -> str | None:
    """What a GGUF file's metadata says."""
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    return _GGUF_TYPES.get(kind) if isinstance(kind, int) and not isinstance(kind, bool) else None


def said_by(mode: str | None) -> dict[str, str]:
    """What a packed model's config.json has of it beside the checkpoint's own content."""
    return {} if mode is None else {KEY: mode}


def of_packed(folder: Path) -> str | None:
    """What a packed model says. Raises BrokenModel."""
    said = read_json_if_there(folder / CONFIG).get(KEY)
    return said if said in ("last", "mean") else None
