"""Reads files that others wrote, and writes our own.

For anything wrong with a file the error is one clear line. Our own files take their names only when they are whole.
Only regular files are read: opening a pipe waits until somebody writes to it, a device may give bytes without end, and
some devices act when they are opened.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import BadRequest, BrokenModel, StorageFailed
from penstock.spec.codec import loads_json
from penstock.units import MIB

# The most bytes of a config, template, plan, machine, prompt, or text to be scored. The longest that we know of are
# plans cut at every granule (some 10 MB for 405 billion parameters). To tokenize a text takes about 180 times its bytes
# of memory.
MAX_TEXT_BYTES = 16 * MIB
# The most bytes of a small file of a model's folder that is copied as it is, such as tokenizer.json.
MAX_COPIED_BYTES = 200_000_000

_ASIDE = re.compile(r"\.penstock-[0-9a-f]{16}\.tmp")
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


@contextmanager
def storage_errors(verb: str, path: Path) -> Iterator[None]:
    """Raises StorageFailed, "cannot VERB PATH: why", in place of an OSError inside."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"cannot {verb} {path}: {error.strerror or error}") from None


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """As `storage_errors`, for reading a model's file: raises BrokenModel if it is missing, else StorageFailed."""
    with storage_errors("read", file):
        try:
            yield
        except FileNotFoundError:
            raise BrokenModel(f"{file} is missing") from None


def open_regular(file: Path) -> int:
    """A descriptor to read a regular file, or the regular file that a link leads to.

    Raises OSError, and BrokenModel where the name is that of anything else.
    """
    require_regular(file, file.stat())
    # Meanwhile the name may have come to lead to a pipe: hence O_NONBLOCK, and a second look.
    return _regular(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK), file)


def open_to_append(file: Path) -> int:
    """A descriptor to read a regular file, and to write at its end; it is made where it is not there. Raises OSError,
    and BrokenModel where the name is that of anything else."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    return _regular(os.open(file, flags, 0o666), file)


def _regular(fd: int, file: Path) -> int:
    """The descriptor, which waits from now on. Closes it and raises BrokenModel where it is of no regular file."""
    try:
        require_regular(file, os.fstat(fd))
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def load(file: Path, max_bytes: int) -> bytes:
    """A regular file's content, at most `max_bytes` of it in memory. Raises OSError, and BrokenModel for a longer file
    or another kind of file."""
    with os.fdopen(open_regular(file), "rb") as stream:
        size, content = os.fstat(stream.fileno()).st_size, b""
        if size <= max_bytes:
            content = stream.read(size + 1)
            if len(content) > size:  # the file grows, or lies under /proc, where files have size 0
                content += stream.read(max_bytes + 1 - len(content))
                size = len(content)
    if size > max_bytes:
        raise BrokenModel(f"{file} has {size} bytes; at most {max_bytes} make sense")
    return content


def load_text(file: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """`load` of UTF-8 text. Raises as that, and BrokenModel for other bytes."""
    return _decode(load(file, max_bytes), file)


def read_bytes(file: Path, max_bytes: int) -> bytes:
    """As `load`, but raises BrokenModel where the file is missing, and StorageFailed where it cannot be read."""
    with reading(file):
        return load(file, max_bytes)


def read_text(file: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """UTF-8 text. Raises BrokenModel (missing, too long, no UTF-8, no regular file), StorageFailed."""
    return _decode(read_bytes(file, max_bytes), file)


def _decode(content: bytes, file: Path) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise BrokenModel(f"{file} is not UTF-8 text") from None


def read_json(file: Path, max_bytes: int = MAX_TEXT_BYTES) -> dict[str, Any]:
    """A JSON object that somebody else wrote. Raises BrokenModel, StorageFailed."""
    return parse_json(read_bytes(file, max_bytes), file)


def parse_json(content: bytes, file: Path) -> dict[str, Any]:
    """The JSON object that is the `content` of `file`. A byte-order mark before it is skipped. Raises BrokenModel."""
    try:
        value = loads_json(_decode(content, file))
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{file} is not JSON: {no_json(error)}") from None
    if not isinstance(value, dict):
        raise BrokenModel(f"{file} should hold a JSON object")
    return value


def no_json(error: Exception) -> str:
    """Why a text is no JSON, by the ValueError or RecursionError that its parser raised."""
    if isinstance(error, RecursionError):
        return "it nests too deep"
    return str(error).splitlines()[0].partition("; use sys.")[0]  # what a program may do about long integers


def read_json_if_there(file: Path) -> dict[str, Any]:
    """As `read_json`, but {} where there is no such file."""
    return read_json(file) if os.path.lexists(file) else {}


def require_regular(file: Path, status: os.stat_result) -> None:
    """Raises BrokenModel for a folder, a pipe, a socket or a device."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise BrokenModel(f"{file} cannot be read: it is {kind}, not a regular file")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of output file. `name`: with its article, as "a trace". `prefix`: all files of the kind begin with it."""

    name: str
    prefix: bytes


class Output:
    """A file that is written aside, under a name that nobody can guess. `commit` gives it its own name.

    A context manager. Where nothing was committed, the file that was there before is as it was.

    With a `kind`, `file` is one that the user named. It must be new, empty, or a file of that kind. This is checked at
    once, and again right before the rename. Without a `kind`, `file` is one of our own by its place. Raises OSError,
    and BadRequest for a file of the user's that may not be replaced.
    """

    def __init__(self, file: Path, kind: Kind | None = None) -> None:
        self._file, self._kind = file, kind
        self._require_replaceable()
        self._aside = file.with_name(f".penstock-{os.urandom(8).hex()}.tmp")
        # O_EXCL: never writes to a file that is there already, nor through a link that somebody planted.
        fd = os.open(self._aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.stream = os.fdopen(fd, "wb")

    def commit(self) -> None:
        """Syncs and renames: a reader sees either the old file or the whole new one. Raises as `Output`."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self._require_replaceable()
        self._aside.rename(self._file)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of a full disk: the bytes are not wanted any more
            self.stream.close()
        with suppress(OSError):
            self._aside.unlink()

    def _require_replaceable(self) -> None:
        if self._kind is None:
            return
        try:
            with os.fdopen(open_regular(self._file), "rb") as stream:
                beginning = stream.read(len(self._kind.prefix))
        except FileNotFoundError:
            return
        except BrokenModel as error:
            raise BadRequest(error.message) from None
        if beginning and beginning != self._kind.prefix:
            raise BadRequest(f"{self._file} holds something else than {self._kind.name}, and stays: name another file")


def write_bytes(file: Path, content: bytes, kind: Kind | None = None) -> None:
    """Writes a whole file by `Output`. Raises OSError, and BadRequest where `kind` forbids to replace the file."""
    with Output(file, kind) as output:
        output.stream.write(content)
        output.commit()


def is_aside(name: str) -> bool:
    """Whether an `Output` has such a name before it is committed. A file of such a name was left by a process that was
    killed, if nobody is writing it."""
    return _ASIDE.fullmatch(name) is not None


def sync_folder(folder: Path) -> None:
    """Syncs a folder, so that the names in it survive a power cut. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
