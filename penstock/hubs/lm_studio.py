"""The models that LM Studio keeps on this machine: `lmstudio:publisher/model[/file.gguf]`, run in place.

Its folder holds a folder for each publisher, and in that one for each model. They hold GGUF files, or the files of a
Hugging Face folder (what is made for MLX has its own quantisation). Source: LM Studio's documentation, "Import models".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import BadRequest, PenstockError
from penstock.hubs.found import Found
from penstock.hubs.listing import Choice, Listing, Several, choose, local_files, models_in_gguf
from penstock.hubs.names import HubName, is_plain, quantisation_of
from penstock.hubs.where import Where, lm_studio_folders
from penstock.store.files import read_bytes

SCHEME = "lmstudio:"
_MAX_MODELS = 1000


def listed(where: Where) -> Iterator[Found]:
    """All models of all folders, by name. A folder with several GGUF files has a model for each."""
    seen = set()
    for folder in lm_studio_folders(where):
        for model in _folders(folder):
            for kept in _models(model, model.relative_to(folder).as_posix()):
                if kept.name not in seen:
                    seen.add(kept.name)
                    yield kept


def find(text: str, where: Where) -> Found:
    """The model that `text`, a name with `lmstudio:` before it, means. Raises BadRequest where there is none, where
    several could be meant, or where it cannot be run."""
    repo, file = _parts(text)
    if not is_plain(repo) or "/" not in repo or (file and not (is_plain(file) and file.endswith(".gguf"))):
        raise BadRequest(
            f"{text:.200} is no name of LM Studio's: write lmstudio:publisher/model[/file.gguf], as `penstock import`"
            " lists them"
        )
    for folder in lm_studio_folders(where):
        for each, quantisation in ((repo, ""), _quantisation(repo)):
            model = folder / each
            if os.path.isdir(model):
                name = HubName(f"{SCHEME}{each}", quantisation=quantisation, file=file)
                choice = _choice(model, name)
                return Found(text, model / choice.main, choice.nbytes)
    names = [found.name for found in listed(where)]
    there = f"there are {', '.join(names[:10])}" if names else "LM Studio keeps none in its folders"
    raise BadRequest(f"{text:.200} is not on this machine: {there}")


def _parts(text: str) -> tuple[str, str]:
    """(publisher/model, file) of a name. The folders of models are called as their users please."""
    publisher, _, rest = text.removeprefix(SCHEME).rstrip("/").partition("/")
    model, _, file = rest.partition("/")
    return (f"{publisher}/{model}" if model else publisher), file


def _quantisation(repo: str) -> tuple[str, str]:
    """(publisher/model, Q4_K_M) of publisher/model:Q4_K_M; the name and "" where it names none."""
    model, _, tag = repo.rpartition(":")
    return (model, tag.upper()) if "/" in model and quantisation_of(tag) == tag.upper() != "" else (repo, "")


def _models(folder: Path, repo: str) -> list[Found]:
    """The models of a folder; whatever is wrong with it is said in `why`."""
    name = f"{SCHEME}{repo}"
    try:
        ggufs = models_in_gguf(_listing(folder, name))
        if len(ggufs) > 1:
            return [Found(f"{name}/{each.main}", folder / each.main, each.nbytes) for each in ggufs.values()]
        choice = _choice(folder, HubName(name))
        return [Found(name, folder / choice.main, choice.nbytes)]
    except PenstockError as error:
        return [Found(name, None, 0, error.message)]


def _folders(folder: Path) -> list[Path]:
    """The folders of models: two deep, sorted."""
    models: list[Path] = []
    for publisher in _within(folder):
        models += [model for model in _within(publisher) if is_plain(model.name)]
        if len(models) > _MAX_MODELS:
            break
    return models[:_MAX_MODELS]


def _within(folder: Path) -> list[Path]:
    try:
        return sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    except OSError:
        return []


def _listing(folder: Path, repo: str) -> Listing:
    return Listing(repo, "", local_files(folder))


def _choice(folder: Path, name: HubName) -> Choice:
    """`name`: with `lmstudio:` before its repository, as errors call it."""
    try:
        return choose(_listing(folder, name.repo), name, lambda index: read_bytes(folder / index.name, index.nbytes))
    except Several as several:
        raise BadRequest(several.message) from None  # of which nothing is to be read from the Hub
