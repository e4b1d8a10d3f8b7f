"""The files of a repository at a commit, with what the Hub promises of each, and which of them a model needs."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.errors import BadRequest, BrokenModel, UnsupportedModel
from penstock.hubs.names import HubName, is_plain, quantisation_of
from penstock.store import pooling
from penstock.store.files import MAX_COPIED_BYTES, parse_json
from penstock.store.gguf.files import files_of, name_of
from penstock.store.header import quoted
from penstock.store.index import INDEX, MAX_INDEX_BYTES, SINGLE, weight_map
from penstock.store.manifest import CONFIG, COPIED
from penstock.units import format_bytes

# Of one file. The largest known have some 50 GB.
MAX_FILE_BYTES = 1 << 45
MAX_FILES = 50_000
MAX_LIST_BYTES = 16 << 20
_MAX_VALUES = 10 * MAX_FILES  # in a list: of a file it says seven

COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)
# Beside a model: what sees pictures for it, and what its quantiser looked at.
_NO_MODEL = re.compile(r"(.*[-_.])?(mmproj|imatrix)([-_.].*)?", re.IGNORECASE | re.DOTALL)
_MAX_LOCAL_FILES = 10_000
_NAMED = 24  # files that an error lists
# Formats of GGUF files that penstock does not read, by how they are spelt in names.
_UNREAD = re.compile(r"(UD-)?(IQ[123]_|TQ)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What the Hub promises of a file. `digest`: in hexadecimal, SHA-256 of a large file, and of a small one git's
    SHA-1; "" where it is not known. The Hub's own tools call the file so in their cache."""

    name: str
    nbytes: int
    digest: str = ""


@dataclass(frozen=True)
class Listing:
    """The files of a repository at a commit, by name. Names that lead elsewhere are left out."""

    repo: str
    commit: str
    files: Mapping[str, RemoteFile]


@dataclass(frozen=True)
class Choice:
    """The files that a model needs, small ones first. `main`: its GGUF file; "" for a folder of safetensors. `said`:
    what was chosen among several, for the user; "" where there was no choice."""

    files: tuple[RemoteFile, ...]
    main: str = ""
    said: str = ""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


class Several(BadRequest):
    """Several GGUF files could be meant. `choices`: these, the smallest first."""

    def __init__(self, message: str, listing: Listing, choices: tuple[Choice, ...]) -> None:
        super().__init__(message)
        self.listing, self.choices = listing, choices

    def to_json(self) -> dict[str, Any]:
        return {"type": BadRequest.__name__, "message": self.message}


def parse_listing(content: bytes, repo: str) -> Listing:
    """The answer of `api/models/REPO/revision/…?blobs=true`. Raises BrokenModel where it is none."""
    if content.count(b",") > _MAX_VALUES:  # an empty object takes 64 bytes in memory
        raise BrokenModel(f"the Hub's list of {repo} has more than {_MAX_VALUES} values")
    data = parse_json(content, Path(f"the Hub's list of {repo}"))
    commit, siblings = data.get("sha"), data.get("siblings")
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise BrokenModel(f"the Hub's list of {repo} names no commit")
    if not isinstance(siblings, list) or len(siblings) > MAX_FILES:
        raise BrokenModel(f"the Hub's list of {repo} has no files, or more than {MAX_FILES}")
    files = {}
    for sibling in siblings:
        file = _file(sibling, repo)
        if file is not None:
            files[file.name] = file
    return Listing(repo, commit, files)


def format_listing(listing: Listing) -> bytes:
    """What `parse_listing` reads."""
    siblings = [{"rfilename": file.name, "size": file.nbytes, "blobId": file.digest} for file in listing.files.values()]
    return json.dumps({"sha": listing.commit, "siblings": siblings}, ensure_ascii=False).encode()


def _file(sibling: Any, repo: str) -> RemoteFile | None:
    if not isinstance(sibling, dict) or not isinstance(sibling.get("rfilename"), str):
        raise BrokenModel(f"the Hub's list of {repo} has a file without a name")
    name = sibling["rfilename"]
    if not is_plain(name):
        return None
    lfs = sibling.get("lfs")
    lfs = lfs if isinstance(lfs, dict) else {}
    nbytes, digest = lfs.get("size", sibling.get("size")), lfs.get("sha256", sibling.get("blobId"))
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or not 0 <= nbytes <= MAX_FILE_BYTES:
        raise BrokenModel(
            f"the Hub says that {quoted(name)} of {repo} has {nbytes!r:.40} bytes; up to {MAX_FILE_BYTES} make sense"
        )
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise BrokenModel(f"the Hub's list of {repo} has no checksum of {quoted(name)}")
    return RemoteFile(name, nbytes, digest)


def local_files(folder: Path) -> dict[str, RemoteFile]:
    """The files of a folder with their sizes, by their paths in it. Links that lead nowhere are left out.

    Raises BadRequest if there are more than _MAX_LOCAL_FILES files."""
    files: dict[str, RemoteFile] = {}
    for base, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if not each.startswith(".")]
        for name in names:
            path = Path(base, name)
            relative = path.relative_to(folder).as_posix()
            with contextlib.suppress(OSError):
                if path.is_file() and is_plain(relative):
                    files[relative] = RemoteFile(relative, path.stat().st_size)
            if len(files) > _MAX_LOCAL_FILES:
                raise BadRequest(f"{folder} holds more than {_MAX_LOCAL_FILES} files")
    return files


def choose(
    listing: Listing, name: HubName, read_index: Callable[[RemoteFile], bytes], available_bytes: int | None = None
) -> Choice:
    """The files that the model `name` needs. If the repository has GGUF files, this is the named one or the only one,
    with all files that it was split into. Otherwise these are the config, the tokenizer and the safetensors. Pickles
    and code are never among them.

    `read_index`: reads the index of a model in several files. `available_bytes`: free RAM, beside which an error lists
    the files. Raises Several if several files could be meant; BadRequest if there is none; UnsupportedModel for a
    quantisation that is not read; BrokenModel.
    """
    if name.file:
        return _named_gguf(listing, name.file)
    ggufs = models_in_gguf(listing)
    if name.quantisation:
        return _quantised(listing, name, ggufs, available_bytes)
    weights = [file for file in listing.files if "/" not in file and file.endswith(".safetensors")]
    if weights and CONFIG in listing.files:
        said = f"{name}: takes its safetensors, not its {len(ggufs)} GGUF files" if ggufs else ""
        return Choice(_folder(listing, weights, read_index), said=said)
    if len(ggufs) == 1:
        return next(iter(ggufs.values()))
    if ggufs:
        raise Several(
            f"{name.repo} has {len(ggufs)} GGUF files: write {name.repo}:{_example(ggufs)} or {name.repo}/FILE;"
            f" {_list(ggufs, available_bytes)}",
            listing,
            tuple(sorted(ggufs.values(), key=lambda choice: choice.nbytes)),
        )
    raise BadRequest(_nothing(listing))


def _folder(listing: Listing, weights: list[str], read_index: Callable[[RemoteFile], bytes]) -> tuple[RemoteFile, ...]:
    small = [listing.files[file] for file in (CONFIG, *COPIED, pooling.SOURCE) if file in listing.files]
    for file in small:
        if file.nbytes > MAX_COPIED_BYTES:
            raise BrokenModel(
                f"{listing.repo}/{file.name} has {file.nbytes} bytes; at most {MAX_COPIED_BYTES} make sense"
            )
    if SINGLE in listing.files:
        return (*small, listing.files[SINGLE])
    if INDEX not in listing.files:
        if len(weights) > 1:
            raise BrokenModel(f"{listing.repo} has {len(weights)} *.safetensors but no {INDEX}")
        return (*small, listing.files[weights[0]])
    index = listing.files[INDEX]
    if index.nbytes > MAX_INDEX_BYTES:
        raise BrokenModel(f"{listing.repo}: {INDEX} has {index.nbytes} bytes; at most {MAX_INDEX_BYTES} make sense")
    where = Path(listing.repo) / INDEX
    names = sorted(set(weight_map(parse_json(read_index(index), where), where).values()))
    for shard in names:
        if "/" in shard or shard not in listing.files:
            raise BrokenModel(f"{where} names {quoted(shard)}, which the repository does not have")
    return (*small, index, *(listing.files[shard] for shard in names))


def _named_gguf(listing: Listing, file: str) -> Choice:
    if file not in listing.files:
        from difflib import get_close_matches  # only a typing error needs it

        there = [name for name in listing.files if name.endswith(".gguf")]
        near = get_close_matches(file, there, n=3, cutoff=0.5) or there[:3]
        hint = f"; it has {', '.join(map(quoted, near))}" if near else ", nor any GGUF file"
        raise BadRequest(f"{listing.repo} has no file {quoted(file)}{hint}")
    return _gguf(listing, file)


def _gguf(listing: Listing, file: str) -> Choice:
    """A GGUF file with all that it was split into."""
    parts = [str(part) for part in files_of(PurePosixPath(file), lambda part: str(part) in listing.files)]
    return Choice(tuple(listing.files[part] for part in parts), parts[0])


def models_in_gguf(listing: Listing) -> dict[str, Choice]:
    """The models in GGUF of a repository, by name and folder. A split one that lacks files is left out."""
    paths = [path for file in sorted(listing.files) if (path := PurePosixPath(file)).suffix == ".gguf"]
    parts = Counter(_split_set(path) for path in paths)
    choices: dict[str, Choice] = {}
    for path in paths:
        key, count = _split_set(path)
        # Sets that lack files are told by their number, before their names are gone through.
        if key in choices or parts[key, count] < count or _NO_MODEL.fullmatch(path.stem):
            continue
        with contextlib.suppress(BadRequest):
            choices[key] = _gguf(listing, str(path))
    return choices


def _split_set(path: PurePosixPath) -> tuple[str, int]:
    """The model that a GGUF file belongs to, and into how many files it was split by the file's name."""
    name = name_of(path)
    return str(path.with_name(name)), 1 if name == path.stem else int(path.stem[-5:])


def _quantised(listing: Listing, name: HubName, ggufs: dict[str, Choice], available_bytes: int | None) -> Choice:
    wanted = name.quantisation
    labels = {key: quantisation_of(choice.main) for key, choice in ggufs.items()}
    fitting = [key for key, label in labels.items() if label == wanted]
    fitting = fitting or [key for key, label in labels.items() if label.removeprefix("UD-") == wanted]
    if len(fitting) == 1 and _UNREAD.match(labels[fitting[0]]):
        raise UnsupportedModel(
            f"{name}: penstock does not read this format; {listing.repo} has {_list(ggufs, available_bytes)}"
        )
    if len(fitting) == 1:
        return ggufs[fitting[0]]
    if not ggufs:
        raise BadRequest(f"{listing.repo} has no GGUF file, so no {wanted} (a branch of that name cannot be meant)")
    if not fitting:
        raise BadRequest(f"{listing.repo} has no {wanted}; it has {_list(ggufs, available_bytes)}")
    several = {key: ggufs[key] for key in fitting}
    raise BadRequest(f"{listing.repo} has {len(fitting)} GGUF files in {wanted}: {_list(several, available_bytes)}")


def _list(ggufs: dict[str, Choice], available_bytes: int | None) -> str:
    """`Q4_K_M 4.58 GiB, Q8_0 7.95 GiB (streams)`, the smallest first. Who has the same quantisation as another one is
    called by its file."""
    labels = [quantisation_of(choice.main) for choice in ggufs.values()]
    shown = []
    for choice in sorted(ggufs.values(), key=lambda choice: choice.nbytes)[:_NAMED]:
        label = quantisation_of(choice.main)
        text = label if label and labels.count(label) == 1 else quoted(choice.main)
        remark = ""
        if _UNREAD.match(label):
            remark = " (not read)"
        elif available_bytes is not None and choice.nbytes > available_bytes:
            remark = " (streams)"
        shown.append(f"{text} {format_bytes(choice.nbytes)}{remark}")
    more = f" and {len(ggufs) - _NAMED} more" if len(ggufs) > _NAMED else ""
    streams = any(text.endswith("(streams)") for text in shown) and available_bytes is not None
    legend = (
        f"; {format_bytes(available_bytes or 0)} of RAM are free here, and what is larger streams" if streams else ""
    )
    return f"{', '.join(shown)}{more}{legend}"


def _example(ggufs: dict[str, Choice]) -> str:
    labels = [label for choice in ggufs.values() if (label := quantisation_of(choice.main))]
    return "Q4_K_M" if "Q4_K_M" in labels else labels[0] if labels else "Q4_K_M"


def _nothing(listing: Listing) -> str:
    names = listing.files
    pickled = any(name.endswith((".bin", ".pth", ".pt", ".ckpt")) for name in names)
    if CONFIG not in names and any(name.endswith(".safetensors") for name in names):
        adapter = "adapter_config.json" in names
        why = "it is an adapter: give the model that it was made for" if adapter else f"it has no {CONFIG}"
        return f"{listing.repo} cannot be run: {why}"
    hint = ": it has pickled weights, which are never read" if pickled else ""
    return f"{listing.repo} has neither safetensors nor a GGUF file{hint}"
