"""Reads of a model of the Hub only what a plan needs: its config.json, or the header of its GGUF file.

What was read is written where the files of the whole model would begin. Behind it they have their sizes and no
content: holes, which take no room on a disk. So whoever plans reads them as any other model's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import BrokenModel, PenstockError
from penstock.library.listing import Choice, Listing, RemoteFile, choose
from penstock.library.names import HubName
from penstock.library.web import Hub
from penstock.library.where import Tell, Where
from penstock.models.gguf import ROPE_TABLES
from penstock.store.files import Output, parse_json, storage_errors
from penstock.store.gguf.header import MAX_HEADER_BYTES, walk_gguf_header
from penstock.store.header import MAX_HEADER_BYTES as MAX_SAFETENSORS_HEADER_BYTES
from penstock.store.manifest import CONFIG
from penstock.store.packed import MAX_CONFIG_BYTES
from penstock.units import format_bytes

_TOKENIZER = "tokenizer.json"
_MAX_TABLE_BYTES = 1 << 16
_FIRST_READ_BYTES = 1 << 16
_MAX_FILES = 1000
_AT_ONCE = 8  # requests


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
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        stub = _Stub(hub, listing, Path(folder))
        choice = choose(listing, name, stub.whole, available_bytes)
        if tell is not None and choice.said:
            tell(choice.said, 0, 0)
        try:
            (stub.gguf if choice.main else stub.safetensors)(choice)
            path = stub.folder / choice.main
            yield Peeked(path, choice.nbytes, stub.read_bytes)
        except PenstockError as error:
            error.message = error.message.replace(str(stub.folder), listing.repo)
            error.args = (error.message,)
            raise


class _Stub:
    """The files of a model, without what is not read."""

    def __init__(self, hub: Hub, listing: Listing, folder: Path) -> None:
        self.folder, self.read_bytes = folder, 0
        self._hub, self._listing = hub, listing

    def whole(self, file: RemoteFile) -> bytes:
        """A small file's content."""
        return self._read(file, 0, file.nbytes)

    def gguf(self, choice: Choice) -> None:
        """The headers, and the tables that a config is made of."""
        for file in choice.files:
            path, ahead = self.folder / file.name, _Ahead(self, file)
            header = walk_gguf_header(path, ahead, file.nbytes)
            tables = [header.tensors[table] for table in ROPE_TABLES if table in header.tensors]
            pieces = {t.offset: self._read(file, t.offset, t.offset + min(t.nbytes, _MAX_TABLE_BYTES)) for t in tables}
            self._write(file, {0: bytes(ahead.content), **pieces})

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
            elif file.name.endswith(".json") and file.name != _TOKENIZER and file.nbytes <= MAX_CONFIG_BYTES:
                pieces = {0: self.whole(file)} if with_headers else {}
            elif file.name.endswith(".safetensors") and with_headers:
                pieces = {0: self._safetensors_header(file)}
            self._write(file, pieces)

        with ThreadPoolExecutor(_AT_ONCE, "penstock-headers") as pool:
            list(pool.map(write, choice.files))

    def _safetensors_header(self, file: RemoteFile) -> bytes:
        """The header's length and the header, as far as the file can have one: whoever reads it says what is wrong."""
        begin = self._read(file, 0, min(_FIRST_READ_BYTES, file.nbytes))
        length = 8 + int.from_bytes(begin[:8], "little")
        if not len(begin) < length <= min(file.nbytes, MAX_SAFETENSORS_HEADER_BYTES):
            return begin[:length]
        return begin + self._read(file, len(begin), length)

    def _read(self, file: RemoteFile, first: int, end: int) -> bytes:
        content = self._hub.read(self._listing, file, first, end)
        self.read_bytes += len(content)
        return content

    def _write(self, file: RemoteFile, pieces: dict[int, bytes]) -> None:
        """The file with these bytes at these offsets, and holes elsewhere."""
        path = self.folder / file.name
        with storage_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with Output(path) as output:
                for offset, piece in pieces.items():
                    output.stream.seek(offset)
                    output.stream.write(piece)
                output.stream.truncate(file.nbytes)
                output.commit()


class _Ahead:
    """Reads a remote file from its beginning, and keeps what came."""

    def __init__(self, stub: _Stub, file: RemoteFile) -> None:
        self._stub, self._file = stub, file
        self.content = bytearray()

    def read(self, count: int) -> bytes:
        first = len(self.content)
        end = min(first + count, self._file.nbytes, MAX_HEADER_BYTES)
        piece = self._stub._read(self._file, first, end) if end > first else b""
        self.content += piece
        return piece


def told(peeked: Peeked, name: HubName) -> str:
    """What a plan by headers alone has to do with the network, for the user."""
    return (
        f"{name} is not here: {format_bytes(peeked.nbytes)} would be downloaded"
        f" (read of it to plan: {format_bytes(peeked.read_bytes)})"
    )
