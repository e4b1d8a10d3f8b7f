"""The places where models are looked for that the user did not name by a path."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Gets a line about the work under way, how much of it is done, and how much it is in all; with 0 in all it is news.
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Where:
    """`endpoint`: the Hub's address, None for the one that huggingface_hub goes to. `hub_cache`: the folder of
    downloads, None for that library's own. `ollama`, `lm_studio`: folders in which these keep models, the first that
    has a name counts; None for their usual ones. `sleep`: waits so many seconds before a request is tried again."""

    endpoint: str | None = None
    hub_cache: Path | None = None
    ollama: tuple[Path, ...] | None = None
    lm_studio: tuple[Path, ...] | None = None
    sleep: Callable[[float], None] = time.sleep


def ollama_folders(where: Where) -> tuple[Path, ...]:
    """Ollama's folders of models: the user's, and that of the system's service on Linux."""
    if where.ollama is not None:
        return where.ollama
    return (*(home / ".ollama/models" for home in _home()), Path("/usr/share/ollama/.ollama/models"))


def lm_studio_folders(where: Where) -> tuple[Path, ...]:
    """LM Studio's folders of models: the one that its user chose, and its usual ones."""
    if where.lm_studio is not None:
        return where.lm_studio
    from penstock.hubs.lm_studio_homes import model_folders  # reads files, which most commands need not

    return tuple(folder for home in _home() for folder in model_folders(home))


def _home() -> tuple[Path, ...]:
    try:
        return (Path.home(),)
    except RuntimeError:  # this user has none
        return ()
