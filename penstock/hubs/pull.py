"""Brings a model of the Hub to this machine: the files that it needs, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError, StorageFailed
from penstock.hubs.headers import stand_in
from penstock.hubs.listing import COMMIT, Choice, Listing, RemoteFile, Several, choose, local_files
from penstock.hubs.names import HubName, quantisation_of
from penstock.hubs.transfer import Repository, fetch
from penstock.hubs.web import Hub
from penstock.hubs.where import Tell, Where
from penstock.store.files import load, read_bytes
from penstock.store.index import INDEX, SINGLE
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

    repository = Repository.of(_cache(where), name.repo)
    commit = _commit(repository, name.revision)
    if commit is None:
        return None
    try:
        choice = _whole(repository, name, commit, constants.is_offline_mode())
    except PenstockError:
        return None
    if choice is None:
        return None
    if commit == name.revision:
        repository.pin(commit)
    return Pulled(repository.snapshot(commit) / choice.main, commit, choice)


def _whole(repository: Repository, name: HubName, commit: str, offline: bool) -> Choice | None:
    """The files that a name means, where all of them are here. Raises as `choose`."""
    folder = repository.snapshot(commit)
    here = local_files(folder)

    def read_index(index: RemoteFile) -> bytes:
        return read_bytes(folder / index.name, index.nbytes)

    listing = repository.listing(name.repo, commit)
    if listing is None:
        choice = choose(Listing(name.repo, commit, here), name, read_index)
        return choice if _is_sure(choice, name, offline) else None
    try:
        choices: tuple[Choice, ...] = (choose(listing, name, read_index),)
    except Several as several:
        choices = several.choices  # the only one that is here will do
    sizes = {file.name: file.nbytes for file in here.values()}
    whole = [each for each in choices if all(sizes.get(file.name) == file.nbytes for file in each.files)]
    return whole[0] if len(whole) == 1 else None


def _is_sure(choice: Choice, name: HubName, offline: bool) -> bool:
    """Whether a choice among the files that another program downloaded would be the same among all of the
    repository's, and lacks none."""
    if choice.main:
        return bool(name.file) or name.quantisation == quantisation_of(choice.main) != ""
    names = {file.name for file in choice.files}
    return not names.isdisjoint((SINGLE, INDEX)) and (offline or not names.isdisjoint(_TOKENIZERS))


def pull(
    name: HubName,
    where: Where,
    tell: Tell | None = None,
    available_bytes: int | None = None,
    check: Callable[[Path], object] | None = None,
) -> Pulled:
    """Asks the Hub for the model as it is now, and downloads what is not here. An interrupted download goes on.

    `tell`: gets progress and news. `available_bytes`: as for `choose`. `check`: gets, before weights are downloaded,
    what a plan may read in their place, and raises where they would be of no use. Raises BadRequest, UnsupportedModel,
    BrokenModel, StorageFailed; and as `check`.
    """
    hub = Hub(where, tell)
    listing = hub.listing(name.repo, name.revision)
    choice = choose(listing, name, lambda index: hub.read(listing, index), available_bytes)
    cache = _cache(where)
    repository = Repository.of(cache, name.repo)
    if check is not None and not all(map(repository.has, choice.files)):
        with stand_in(hub, listing, choice) as path:
            check(path)
    brought_bytes = _bring(hub, listing, choice, repository, cache, tell)
    repository.keep_listing(listing)
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
                    tell(f"downloading {name}", min(done_bytes, need_bytes), need_bytes)

            def waiting(name: str = file.name) -> None:
                if tell is not None:
                    tell(f"another process is downloading {name}: waiting for it", 0, 0)

            fetch(hub, listing, file, repository, advance, waiting)
        repository.link(listing, file)
    return done_bytes


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
