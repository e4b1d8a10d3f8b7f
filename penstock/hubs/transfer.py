"""Downloads files of the Hub into the cache that huggingface_hub and its users share.

    models--org--name/blobs/DIGEST             a file's content; DIGEST.incomplete while it comes
    models--org--name/snapshots/COMMIT/NAME    a link to it
    models--org--name/refs/REVISION            the commit that a branch or tag led to
    models--org--name/.penstock/COMMIT.json    our own: what the repository held then
    models--org--name/.penstock/COMMIT.pinned  our own: the commit was asked for by its own name, or by its path

Source: "Understand caching" in huggingface_hub's documentation. An incomplete file is always the first bytes of the
whole, so that a later call goes on behind them. No file gets its name before its checksum was compared.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import BrokenModel, PenstockError, StorageFailed
from penstock.hubs.listing import COMMIT, MAX_LIST_BYTES, Listing, RemoteFile, format_listing, parse_listing
from penstock.hubs.web import TRIES, Cut, Hub
from penstock.store.files import load, storage_errors, write_bytes
from penstock.units import format_bytes

if TYPE_CHECKING:
    from hashlib import _Hash

_READ_BYTES = 1 << 20
# A connection that brings less before it is cut does not count as one that works.
_LEAST_BYTES = 1 << 20


class Repository:
    """A repository's folder in the cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, cache: Path, repo: str) -> Repository:
        return cls(cache / f"models--{repo.replace('/', '--')}")

    def blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / file.digest

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def ref(self, revision: str) -> Path:
        return self.folder / "refs" / revision

    def has(self, file: RemoteFile) -> bool:
        """Whether the file is here. A content of another size is not the file's."""
        with suppress(OSError):
            return self.blob(file).stat().st_size == file.nbytes
        return False

    def missing_bytes(self, file: RemoteFile) -> int:
        """How many bytes of a file are still to come."""
        if self.has(file):
            return 0
        have = 0
        with suppress(OSError):
            have = _incomplete(self.blob(file)).stat().st_size
        return file.nbytes - (have if have <= file.nbytes else 0)

    def link(self, listing: Listing, file: RemoteFile) -> None:
        """Gives a file that is here its name in the snapshot. Raises StorageFailed."""
        name = self.snapshot(listing.commit) / file.name
        target = os.path.relpath(self.blob(file), name.parent)
        with storage_errors("write", name):
            name.parent.mkdir(parents=True, exist_ok=True)
            if name.is_symlink() and os.readlink(name) == target:
                return
            aside = name.with_name(f".penstock-{os.urandom(8).hex()}.tmp")
            aside.symlink_to(target)
            aside.replace(name)

    def listing(self, repo: str, commit: str) -> Listing | None:
        """What the Hub said of the repository at this commit. None where we have not asked."""
        try:
            return parse_listing(load(self._list(commit), MAX_LIST_BYTES), repo)
        except (OSError, PenstockError):
            return None

    def keep_listing(self, listing: Listing) -> None:
        """Keeps what the repository holds, so that a name means the same later without the Hub. Raises
        StorageFailed."""
        file = self._list(listing.commit)
        with storage_errors("write", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(file, format_listing(listing))

    def _list(self, commit: str) -> Path:
        return self.folder / ".penstock" / f"{commit}.json"

    def note_revision(self, listing: Listing, revision: str) -> None:
        """Keeps which commit a branch or a tag led to, or that a commit was asked for by its own name. Raises
        StorageFailed."""
        _write_commit(self._pin(revision) if revision == listing.commit else self.ref(revision), listing.commit)

    def commits(self) -> dict[str, str]:
        """The commits that branches, tags and pull requests (refs/pr/NUMBER) led to, by revision. Empty where none was
        asked for, and where one cannot be read."""
        commits, refs = dict[str, str](), self.folder / "refs"
        for folder, _, names in os.walk(refs):
            for name in names:
                file = Path(folder) / name
                try:
                    commits[str(file.relative_to(refs))] = load(file, 100).decode("ascii", "replace").strip()
                except (OSError, PenstockError):
                    return {}
        return commits

    def pin(self, commit: str) -> None:
        """Notes that somebody asked for this commit by its own name. In a cache that cannot be written nothing is
        noted."""
        if not self.is_pinned(commit):
            with suppress(StorageFailed):
                _write_commit(self._pin(commit), commit)

    def is_pinned(self, commit: str) -> bool:
        """Whether somebody asked for this commit by its own name."""
        return os.path.lexists(self._pin(commit))

    def _pin(self, commit: str) -> Path:
        return self.folder / ".penstock" / f"{commit}.pinned"


def is_superseded(path: str) -> bool:
    """Whether the path is a snapshot of a Hub model, or in one, that no branch or tag led to when last asked for,
    while others are known: pull requests alone take nobody's place. False for a commit that was asked for by its own
    name or path, and where we may not look."""
    repository, commit = _snapshot(Path(path))
    if repository is None or repository.is_pinned(commit):
        return False
    commits = repository.commits()
    return commit not in commits.values() and not all(name.startswith("refs/") for name in commits)


def pin_path(path: Path) -> None:
    """Notes that somebody named this path, where it is a snapshot of a Hub model, or in one."""
    repository, commit = _snapshot(path.absolute())
    if repository is not None:
        repository.pin(commit)


def _snapshot(path: Path) -> tuple[Repository | None, str]:
    """The repository and the commit of the snapshot that the path is, or is in; None, "" where it is in none."""
    for snapshot in (path, *path.parents):
        if snapshot.parent.name == "snapshots" and COMMIT.fullmatch(snapshot.name):
            return Repository(snapshot.parent.parent), snapshot.name
    return None, ""


def _write_commit(file: Path, commit: str) -> None:
    with storage_errors("write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, commit.encode())


def fetch(
    hub: Hub,
    listing: Listing,
    file: RemoteFile,
    repository: Repository,
    advance: Callable[[int], None],
    waiting: Callable[[], None],
) -> None:
    """Downloads a file, or what is missing of it. `advance`: is told how many bytes came. `waiting`: is called before
    this process waits for another one that downloads it.

    Raises BrokenModel where what came is not what the Hub promised; StorageFailed; and as `Hub`.
    """
    blob = repository.blob(file)
    with storage_errors("write", blob), _opened(blob, file, repository, waiting) as fd:
        if fd is None:
            return  # another process has brought it meanwhile
        resumed = _bring(hub, listing, file, fd, advance)
        if resumed is not None and resumed > 0:
            # What an earlier call left may be at fault, as after a power cut: once more from the beginning.
            os.ftruncate(fd, 0)
            advance(resumed - file.nbytes)
            resumed = _bring(hub, listing, file, fd, advance)
        if resumed is not None:
            os.ftruncate(fd, 0)
            _incomplete(blob).unlink(missing_ok=True)
            raise BrokenModel(
                f"{listing.repo}/{file.name} is not what the Hub promised: its checksum should be {file.digest[:16]}…"
            )
        os.fsync(fd)
        _incomplete(blob).replace(blob)


def _bring(hub: Hub, listing: Listing, file: RemoteFile, fd: int, advance: Callable[[int], None]) -> int | None:
    """Appends what is missing. Returns None where the whole then has its checksum, else how many bytes were there
    before. Raises StorageFailed, and as `Hub`."""
    digest = _digest(file)
    before = at = _hash_all(fd, file, digest)
    cuts = 0
    what = f"{listing.repo}/{file.name}"
    while at < file.nbytes:
        began = at
        try:
            for chunk in hub.stream(listing, file, at, file.nbytes):
                _write(fd, chunk)
                digest.update(chunk)
                at += len(chunk)
                advance(len(chunk))
        except Cut as cut:
            cuts = 0 if at - began >= _LEAST_BYTES else cuts + 1
            if cuts == TRIES:
                raise StorageFailed(
                    f"{what}: the connection was cut {cuts} times in a row ({cut}); {format_bytes(at)} of"
                    f" {format_bytes(file.nbytes)} are here, and the same command goes on from there"
                ) from None
            hub.wait(max(0, cuts - 1), f"{what}: {cut} at {format_bytes(at)} of {format_bytes(file.nbytes)}")
    return None if digest.hexdigest() == file.digest else before


@contextmanager
def _opened(blob: Path, file: RemoteFile, repository: Repository, waiting: Callable[[], None]) -> Iterator[int | None]:
    """The incomplete file, locked, at its end; None where the whole is there."""
    blob.parent.mkdir(parents=True, exist_ok=True)
    name = _incomplete(blob)
    while not repository.has(file):
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(fd, name):
                if repository.has(file):  # brought after the first look, before this name was made anew
                    name.unlink()
                    break
                yield fd
                return
        finally:
            os.close(fd)
    yield None


def _is_at(fd: int, name: Path) -> bool:
    """Whether the open file still has this name: who held the lock before may have renamed it."""
    try:
        return os.path.samestat(os.fstat(fd), name.stat())
    except FileNotFoundError:
        return False


def _incomplete(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _digest(file: RemoteFile) -> _Hash:
    """SHA-256 of a large file, and of a small one what git calls it by."""
    if len(file.digest) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.nbytes, usedforsecurity=False)


def _hash_all(fd: int, file: RemoteFile, digest: _Hash) -> int:
    """Reads what is here already into the digest. Returns its bytes. Of a file that is too long nothing is kept."""
    if os.fstat(fd).st_size > file.nbytes:
        os.ftruncate(fd, 0)
    at = os.lseek(fd, 0, os.SEEK_SET)
    while chunk := os.read(fd, _READ_BYTES):
        digest.update(chunk)
        at += len(chunk)
    return at


def _write(fd: int, chunk: bytes) -> None:
    left = memoryview(chunk)
    while left:
        left = left[os.write(fd, left) :]
