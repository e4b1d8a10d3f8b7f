"""Reads of a model of the Hub only what a plan needs: its config.json, or the header of its GGUF file.

What was read is written where the files of the whole model would begin. Behind it they have their sizes and no
content: holes, which take no room on a disk. So whoever plans reads them as any other model's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from penstock.errors import BadRequest, BrokenModel, UnsupportedModel
from penstock.hubs.listing import Choice, Listing, RemoteFile, Several, choose
from penstock.hubs.names import HubName
from penstock.hubs.web import Hub
from penstock.hubs.where import Tell, Where
from penstock.models.gguf import ROPE_TABLES
from penstock.store.files import Output, parse_json, storage_errors
from penstock.store.gguf.header import MAX_HEADER_BYTES, GgufHeader, read_gguf_header, walk_gguf_header
from penstock.store.gguf.model import MAX_TABLE_BYTES
from penstock.store.header import MAX_HEADER_BYTES as MAX_SAFETENSORS_HEADER_BYTES
from penstock.store.index import INDEX
from penstock.store.manifest import CONFIG, MAX_CONFIG_BYTES
from penstock.store.naming import naming
from penstock.store.temporary import temporary_folder
from penstock.units import format_bytes

_TOKENIZER = "tokenizer.json"
_FIRST_READ_BYTES = 1 << 16
# Of the list of tensors of another file: it may begin so much before or behind that of the first.
_SLACK_BYTES = 1 << 16
_TRIED = 3  # files whose header may be broken before no other one is tried
_MAX_FILES = 1000
_AT_ONCE = 8  # requests
# Of all files together; of the files of a split GGUF after the first, which have a list of tensors and little else.
_MAX_READ_BYTES, _MAX_PART_HEADER_BYTES = 256_000_000, 4 << 20
_MOST_FOR_SPLIT_BYTES = 64_000_000  # read before no other header of files that are split is: 4 to 15 MB each


@dataclass(frozen=True)
class Peeked:
    """What a plan may read in place of a model. `path`: a folder or a GGUF file. `nbytes`: of the whole model.
    `read_bytes`: came over the network."""

    path: Path
    nbytes: int
    read_bytes: int


@contextmanager
def peek(name: HubName, where: Where, tell: Tell | None = None, available_bytes: int | None = None) -> Iterator[Peeked]:
    """Yields a model of the Hub without its weights, which is gone at the end. Errors call it by the Hub's name, those
    of the block too. Raises as `pull`, and as reading a model's headers."""
    hub = Hub(where, tell)
    listing = hub.listing(name.repo, name.revision)
    with temporary_folder() as folder:
        stub = _Stub(hub, listing, folder)
        choice = choose(listing, name, stub.whole, available_bytes)
        if tell is not None and choice.said:
            tell(choice.said, 0, 0)
        with naming(listing.repo, stub.folder):
            stub.fill(choice)
            yield Peeked(stub.folder / choice.main, choice.nbytes, stub.read_bytes)


@contextmanager
def stand_in(hub: Hub, listing: Listing, choice: Choice) -> Iterator[Path]:
    """As `peek`, of files that are chosen already."""
    with temporary_folder() as folder:
        stub = _Stub(hub, listing, folder)
        with naming(listing.repo, stub.folder):
            stub.fill(choice)
            yield stub.folder / choice.main


@contextmanager
def peek_each(several: Several, where: Where, tell: Tell | None = None) -> Iterator[Callable[[Choice], Peeked]]:
    """Yields a function from a choice among a repository's GGUF files to what a plan may read in its place.

    The choices are quantisations of one model. So the vocabulary is read of the smallest file alone, and of each other
    file the list of its tensors. A choice that was split into several files has the number of files in its metadata:
    there all headers are read, unless they are large. Raises as `peek`. The function raises BadRequest for a file that
    cannot be read in this way.
    """
    wholes = [choice for choice in several.choices if len(choice.files) == 1] or list(several.choices)
    wholes = wholes[:_TRIED]
    with temporary_folder() as folder:
        stub = _Stub(Hub(where, tell), several.listing, folder)
        for nth, each in enumerate(wholes):
            try:
                with naming(several.listing.repo, stub.folder):
                    whole, first = each, stub.gguf(each)
                break
            except (BrokenModel, UnsupportedModel):
                if nth == len(wholes) - 1:
                    raise

        def peeked(choice: Choice) -> Peeked:
            with naming(several.listing.repo, stub.folder):
                if choice is not whole and len(choice.files) == 1:
                    stub.sibling(choice, whole, first)
                elif choice is not whole:
                    if stub.read_bytes > _MOST_FOR_SPLIT_BYTES:
                        raise BadRequest(f"{choice.main} is in several files: name it alone to plan it")
                    stub.gguf(choice)
            return Peeked(stub.folder / choice.main, choice.nbytes, stub.read_bytes)

        yield peeked


class _Read(NamedTuple):
    """What was read of a GGUF file: its first bytes, the header that they begin with, and tables by their names."""

    content: bytes
    header: GgufHeader
    tables: dict[str, bytes]


class _Stub:
    """The files of a model, without what is not read."""

    def __init__(self, hub: Hub, listing: Listing, folder: Path) -> None:
        self.folder, self.read_bytes = folder, 0
        self._hub, self._listing = hub, listing
        self._lock, self._over = threading.Lock(), threading.Event()

    def fill(self, choice: Choice) -> None:
        """Writes what a plan needs of the chosen files."""
        if choice.main:
            self.gguf(choice)
        else:
            self.safetensors(choice)

    def whole(self, file: RemoteFile) -> bytes:
        """A small file's content."""
        return self._read(file, 0, file.nbytes)

    def gguf(self, choice: Choice) -> _Read:
        """The headers, and the tables that a config is made of. Returns what was read of the first file."""
        first_reads: list[_Read] = []
        for file in choice.files:
            ahead = _Ahead(self, file, _MAX_PART_HEADER_BYTES if first_reads else MAX_HEADER_BYTES)
            header = walk_gguf_header(self.folder / file.name, ahead, file.nbytes)
            tables = {}
            for name in ROPE_TABLES & header.tensors.keys():
                tensor = header.tensors[name]
                tables[name] = self._read(file, tensor.offset, tensor.offset + min(tensor.nbytes, MAX_TABLE_BYTES))
            first_reads.append(_Read(bytes(ahead.content), header, tables))
            self._write_gguf(file, first_reads[-1])
        return first_reads[0]

    def sibling(self, choice: Choice, whole: Choice, first: _Read) -> None:
        """A file that differs from `whole`, of which `first` was read, in its tensors' formats. Their list is looked
        for where it is about to begin, by the first tensor's name. All else is taken from `first`. Raises BadRequest
        where it is not there."""
        if not first.header.tensors:
            raise BadRequest(f"{choice.main} is not made as {whole.main} is")
        name = next(iter(first.header.tensors)).encode()
        begins = len(name).to_bytes(8, "little") + name
        data_offset = first.header.data_offset
        at = first.content.rfind(begins, 0, data_offset)
        file = choice.files[0]
        window = self._read(file, max(0, at - _SLACK_BYTES), min(data_offset + _SLACK_BYTES, file.nbytes))
        there = window.find(begins)
        if at < 0 or there < 0:
            raise BadRequest(f"{choice.main} is not made as {whole.main} is")
        content = first.content[:at] + window[there:]
        # Its metadata may be shorter than those of `first`: so much longer the file seems.
        longer = replace(file, nbytes=file.nbytes + 2 * _SLACK_BYTES)
        self._write(longer, {0: content})
        if first.tables:
            self._write_gguf(longer, _Read(content, read_gguf_header(self.folder / file.name), first.tables))

    def _write_gguf(self, file: RemoteFile, read: _Read) -> None:
        there = read.header.tensors
        tables = {there[name].offset: table for name, table in read.tables.items() if name in there}
        self._write(file, {0: read.content, **tables})

    def safetensors(self, choice: Choice) -> None:
        """The config, and the sizes of all else. Of a quantised model, or one whose config does not name its number
        format, the headers too: they say in which formats its matrices are."""
        config = next(file for file in choice.files if file.name == CONFIG)
        if config.nbytes > MAX_CONFIG_BYTES:
            raise BrokenModel(f"{config.name} has {config.nbytes} bytes; at most {MAX_CONFIG_BYTES} make sense")
        content = self.whole(config)
        said = parse_json(content, self.folder / CONFIG)
        with_headers = "quantization_config" in said or not {"dtype", "torch_dtype"} & said.keys()
        if len(choice.files) > _MAX_FILES:
            raise BrokenModel(f"{self.folder} has {len(choice.files)} files; at most {_MAX_FILES} make sense")

        def write(file: RemoteFile) -> None:
            pieces: dict[int, bytes] = {}
            if file.name == CONFIG:
                pieces = {0: content}
            elif file.name == INDEX or (
                file.name.endswith(".json") and file.name != _TOKENIZER and file.nbytes <= MAX_CONFIG_BYTES
            ):
                pieces = {0: self.whole(file)} if with_headers else {}
            elif file.name.endswith(".safetensors") and with_headers:
                pieces = {0: self._safetensors_header(file)}
            self._write(file, pieces)

        try:
            _at_once(write, choice.files, self._over)
        finally:
            with self._lock:  # nobody is writing
                self._over.set()

    def _safetensors_header(self, file: RemoteFile) -> bytes:
        """The header's length and the header, as far as the file can have one: whoever reads it says what is wrong."""
        begin = self._read(file, 0, min(_FIRST_READ_BYTES, file.nbytes))
        length = 8 + int.from_bytes(begin[:8], "little")
        if not len(begin) < length <= min(file.nbytes, MAX_SAFETENSORS_HEADER_BYTES):
            return begin[:length]
        return begin + self._read(file, len(begin), length)

    def _read(self, file: RemoteFile, first: int, end: int) -> bytes:
        with self._lock:
            self.read_bytes += end - first
            if self.read_bytes > _MAX_READ_BYTES:
                limit = format_bytes(_MAX_READ_BYTES)
                raise BrokenModel(f"{self._listing.repo} has headers of more than {limit}: no model has")
        return self._hub.read(self._listing, file, first, end)

    def _write(self, file: RemoteFile, pieces: dict[int, bytes]) -> None:
        """The file with these bytes at these offsets, and holes elsewhere."""
        path = self.folder / file.name
        with self._lock, storage_errors("write", path):
            if self._over.is_set():
                return  # the folder is about to be removed
            path.parent.mkdir(parents=True, exist_ok=True)
            with Output(path) as output:
                for offset, piece in pieces.items():
                    output.stream.seek(offset)
                    output.stream.write(piece)
                output.stream.truncate(file.nbytes)
                output.commit()


class _Ahead:
    """Reads a remote file from its beginning, and keeps what came."""

    def __init__(self, stub: _Stub, file: RemoteFile, max_bytes: int) -> None:
        self._stub, self._file, self._max_bytes = stub, file, max_bytes
        self.content = bytearray()

    def read(self, count: int) -> bytes:
        first = len(self.content)
        end = min(first + count, self._file.nbytes)
        if end > self._max_bytes:
            raise BrokenModel(
                f"{self._stub.folder / self._file.name} has a header that does not end within"
                f" {format_bytes(self._max_bytes)}: no such file has"
            )
        piece = self._stub._read(self._file, first, end) if end > first else b""
        self.content += piece
        return piece


def _at_once(work: Callable[[RemoteFile], None], files: Iterable[RemoteFile], over: threading.Event) -> None:
    """Does the work for each file, a few at a time. Raises the first error. Nobody waits for the threads then, nor at
    Ctrl-C: a read may take 20 s without a byte."""
    todo, done = deque(files), SimpleQueue[Exception | None]()

    def run() -> None:
        while todo and not over.is_set():
            try:
                file = todo.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                work(file)
                done.put(None)
            except Exception as error:
                done.put(error)

    count = len(todo)
    for _ in range(min(_AT_ONCE, count)):
        threading.Thread(target=run, name="penstock-headers", daemon=True).start()
    for _ in range(count):
        error = done.get()
        if error is not None:
            raise error


def told(peeked: Peeked, name: HubName) -> str:
    """What a plan by headers alone has to do with the network, for the user."""
    return (
        f"{name} is not here: {format_bytes(peeked.nbytes)} would be downloaded"
        f" (read of it to plan: {format_bytes(peeked.read_bytes)})"
    )
