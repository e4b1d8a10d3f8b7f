"""The models that LM Studio keeps on this machine: `lmstudio:publisher/model[/file.gguf]`, run in place.

Its folder holds a folder for each publisher, and in that one for each model. They hold GGUF files, or the files of a
Hugging Face folder (what is made for MLX has its own quantisation). Source: LM Studio's documentation, "Import models".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import BadRequest, PenstockError
from penstock.library.found import Found
from penstock.library.listing import Choice, Listing, Several, choose, local_files, models_in_gguf
from penstock.library.names import MAIN, HubName, hub_name, is_plain
from penstock.library.where import Where, lm_studio_folders
from penstock.store.files import read_bytes

SCHEME = "lmstudio:"
_MAX_MODELS = 1000


def listed(where: Where) -> Iterator[Found]:
    """All models of all folders, by name. A folder with several GGUF files has a model for each."""
    seen = set()
    for folder in lm_studio_folders(where):
        for model in _folders(folder):
            for found in _models(model, model.relative_to(folder).as_posix()):
                if found.name not in seen:
                    seen.add(found.name)
                    yield found


def find(text: str, where: Where) -> Found:
    """The model that `text`, a name with `lmstudio:` before it, means. Raises BadRequest where there is none, where
    several could be meant, or where it cannot be run."""
    name = hub_name(text.removeprefix(SCHEME))
    if name is None or name.revision != MAIN or name.sure:
        raise BadRequest(
            f"{text:.200} is no name of LM Studio's: write lmstudio:publisher/model[/file.gguf], as `penstock import`"
            " lists them"
        )
    for folder in lm_studio_folders(where):
        model = folder / name.repo
        if model.is_dir():
            choice = _choice(model, _listing(model, name.repo), name)
            return Found(text, model / choice.main, choice.nbytes)
    names = [found.name for found in listed(where)]
    there = f"there are {', '.join(names[:10])}" if names else "LM Studio keeps none in its usual folders"
    raise BadRequest(f"{text:.200} is not on this machine: {there}")


def _models(folder: Path, repo: str) -> list[Found]:
    """The models of a folder; whatever is wrong with it is said in `why`."""
    name = f"{SCHEME}{repo}"
    try:
        listing = _listing(folder, repo)
        ggufs = models_in_gguf(listing)
        if len(ggufs) > 1:
            return [Found(f"{name}/{each.main}", folder / each.main, each.nbytes) for each in ggufs.values()]
        choice = _choice(folder, listing, HubName(repo))
        return [Found(name, folder / choice.main, choice.nbytes)]
    except PenstockError as error:
        return [Found(name, None, 0, error.message)]


def _folders(folder: Path) -> list[Path]:
    """The folders of models: two deep, sorted."""
    found: list[Path] = []
    for publisher in _within(folder):
        found += [model for model in _within(publisher) if is_plain(model.name)]
        if len(found) > _MAX_MODELS:
            break
    return found[:_MAX_MODELS]


def _within(folder: Path) -> list[Path]:
    try:
        return sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    except OSError:
        return []


def _listing(folder: Path, repo: str) -> Listing:
    return Listing(repo, "", local_files(folder))


def _choice(folder: Path, listing: Listing, name: HubName) -> Choice:
    try:
        return choose(listing, name, lambda index: read_bytes(folder / index.name, index.nbytes))
    except Several as several:
        raise BadRequest(several.message) from None  # of which nothing is to be read from the Hub
