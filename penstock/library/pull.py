"""Brings a model of the Hub to this machine: the files that it needs, and no others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError, StorageFailed
from penstock.library.listing import COMMIT, Choice, Listing, choose, local_files
from penstock.library.names import HubName
from penstock.library.transfer import Repository, fetch
from penstock.library.web import Hub
from penstock.library.where import Tell, Where
from penstock.store.files import load, read_bytes
from penstock.units import format_bytes

# Without one of these no text can be read. A tool that wanted the weights alone leaves them away.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Pulled:
    """A model of the Hub that is here. `path`: its folder, or its GGUF file. `brought_bytes`: came over the network
    just now."""

    path: Path
    commit: str
    choice: Choice
    brought_bytes: int = 0


def find(name: HubName, where: Where) -> Pulled | None:
    """The model, if it is here whole. The Hub is not asked, so its branch may have moved on since. None where it is
    not here."""
    from huggingface_hub import constants

    repository = Repository(_cache(where), name.repo)
    commit = _commit(repository, name.revision)
    if commit is None:
        return None
    folder = repository.snapshot(commit)
    listing = Listing(name.repo, commit, local_files(folder))
    try:
        choice = choose(listing, name, lambda index: read_bytes(folder / index.name, index.nbytes))
    except PenstockError:
        return None
    names = {file.name for file in choice.files}
    if not choice.main and names.isdisjoint(_TOKENIZERS) and not constants.is_offline_mode():
        return None
    return Pulled(folder / choice.main, commit, choice)


def pull(name: HubName, where: Where, tell: Tell | None = None, available_bytes: int | None = None) -> Pulled:
    """Asks the Hub for the model as it is now, and downloads what is not here. An interrupted download goes on.

    `tell`: gets progress and news. `available_bytes`: as for `choose`. Raises BadRequest, BrokenModel, StorageFailed.
    """
    hub = Hub(where, tell)
    listing = hub.listing(name.repo, name.revision)
    choice = choose(listing, name, lambda index: hub.read(listing, index), available_bytes)
    cache = _cache(where)
    repository = Repository(cache, name.repo)
    brought_bytes = _bring(hub, listing, choice, repository, cache, tell)
    repository.note_revision(listing, name.revision)
    return Pulled(repository.snapshot(listing.commit) / choice.main, listing.commit, choice, brought_bytes)


def _bring(hub: Hub, listing: Listing, choice: Choice, repository: Repository, cache: Path, tell: Tell | None) -> int:
    """Downloads what is missing of the files, and links them. Returns the bytes that came."""
    missing = {file: repository.missing_bytes(file) for file in choice.files}
    need_bytes, done_bytes = sum(missing.values()), 0
    have_bytes = _require_room(listing.repo, cache, need_bytes)
    if tell is not None and choice.said:
        tell(choice.said, 0, 0)
    if tell is not None and need_bytes:
        more = "" if 2 * need_bytes < have_bytes else "; a packed copy will take about as much again"
        tell(f"downloads {format_bytes(need_bytes)} to {cache}, {format_bytes(have_bytes)} free{more}", 0, 0)
    for file in choice.files:
        if not repository.has(file):

            def advance(count: int, name: str = file.name) -> None:
                nonlocal done_bytes
                done_bytes += count
                if tell is not None and need_bytes:
                    tell(f"downloading {name}", done_bytes, need_bytes)

            def waiting(name: str = file.name) -> None:
                if tell is not None:
                    tell(f"another process is downloading {name}: waiting for it", 0, 0)

            fetch(hub, listing, file, repository, advance, waiting)
        repository.link(listing, file)
    return max(0, done_bytes)


def _require_room(repo: str, cache: Path, need_bytes: int) -> int:
    """The bytes that are free where downloads go. Raises StorageFailed where they are fewer than those to come."""
    from penstock.store.writer import free_bytes  # with numpy, which planning goes without

    there = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
    have_bytes = free_bytes(there)
    if need_bytes > have_bytes:
        raise StorageFailed(
            f"the disk is too full: {repo} needs {format_bytes(need_bytes)} in {cache}, {format_bytes(have_bytes)} are"
            " free there (HF_HOME names another place)"
        )
    return have_bytes


def _cache(where: Where) -> Path:
    from huggingface_hub import constants

    return where.hub_cache or Path(constants.HF_HUB_CACHE)


def _commit(repository: Repository, revision: str) -> str | None:
    """The commit that a revision led to when it was last asked for."""
    if COMMIT.fullmatch(revision):
        return revision
    try:
        text = load(repository.ref(revision), 100).decode("ascii", "replace").strip()
    except (OSError, PenstockError):
        return None
    return text if COMMIT.fullmatch(text) else None
