"""Finds what is bundled: a small model with its weights, and shapes of published models: configs to plan with, without
weights (shapes/SOURCES.md)."""

from __future__ import annotations

from pathlib import Path

import penstock
from penstock.errors import BadRequest

MODEL = Path(penstock.__file__).parent / "assets" / "tale-llama"
_FOLDER = Path(penstock.__file__).parent / "shapes"


def names() -> list[str]:
    """The names of all bundled shapes, sorted."""
    return sorted(path.name.removesuffix(".json") for path in _FOLDER.glob("*.json"))


def find(name: str) -> Path | None:
    """The config of the bundled shape of that name; None where there is none."""
    return _FOLDER / f"{name}.json" if name in names() else None


def find_model(name: str) -> Path | None:
    """The folder of the bundled model of that name, with its weights; None where there is none."""
    return MODEL if name == MODEL.name and MODEL.is_dir() else None


def locate(model: Path) -> Path:
    """`model` itself where there is such a path, or where it has several parts and so must be a path. Else the folder
    of the bundled model of that name, or the config of the bundled shape.

    Raises BadRequest where there is neither; it names shapes that are spelt alike.
    """
    if len(model.parts) != 1 or model.exists():
        return model
    shape = find_model(model.name) or find(model.name)
    if shape is None:
        raise BadRequest(f"{model} is not there, nor is it a bundled shape: {_hint(model.name)}")
    return shape


def _hint(name: str) -> str:
    from difflib import get_close_matches  # only a typing error needs it

    bundled = [*names(), MODEL.name]
    near = get_close_matches(name.lower(), bundled, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(bundled)}"
