"""The index of a checkpoint in several safetensors files: which file has which tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import BrokenModel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # the file of a checkpoint in one, or the index
MAX_INDEX_BYTES = 100_000_000


def weight_map(content: dict[str, Any], where: Path) -> dict[str, str]:
    """Tensor name → file name, of an index's content. `where`: the index, for errors. Raises BrokenModel."""
    files = content.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise BrokenModel(f"{where}: weight_map should map tensor names to file names")
    return files
