"""Reads the header of a GGUF file without trusting it.

A GGUF file, of version 2 or 3, little-endian:

    4 bytes     "GGUF"
    uint32      version
    uint64      number of tensors
    uint64      number of metadata entries
    entries     key (string), type (uint32), value
    tensors     name (string), number of dimensions (uint32), dimensions (uint64 each, the innermost first), number
                format (uint32), offset of the data (uint64)
    padding     up to a multiple of general.alignment (32 where the key is absent)
    data        the tensors; offsets count from here, and are multiples of the alignment

    a string    uint64 bytes, then so much UTF-8
    an array    type of its elements (uint32), their number (uint64), elements

Source: the GGUF specification (docs/gguf.md of the ggml library). Nothing is allocated by a count out of the file: the
header is read as far as it is walked, and all counts are held against the bytes that are there.
"""

from __future__ import annotations

import os
import struct
from array import array
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.errors import BrokenModel, UnsupportedModel
from penstock.models.gguf.ollama import GPT_OSS
from penstock.store.files import open_regular, reading
from penstock.store.gguf.blocks import BLOCK_FORMATS, IN_TURNS
from penstock.store.header import MAX_DIM, TensorInfo, quoted, refuse_overlaps

MAGIC = b"GGUF"
# The largest headers known have some 20 MB: 200 k tokens and 450 k merges.
MAX_HEADER_BYTES = 64_000_000
MAX_ENTRIES = 4096
MAX_TENSORS = 1 << 18  # 512 layers of 128 experts in tensors of their own have 200 k
MAX_STRINGS = 1 << 23  # of one array: a second to walk
_MAX_KEY_BYTES, _MAX_NAME_BYTES, _MAX_DIMS = 65535, 1024, 4
_MAX_NESTING, _MAX_NESTED = 4, 65536  # arrays within arrays, and how many of them in a file: no known file has any
_FIRST_READ_BYTES = 1 << 20
_MAX_ALIGNMENT = 1 << 20

_STRING, _ARRAY = 8, 9
_NUMBERS: dict[int, str] = {  # by type: a struct's code, which the module array has too, but for flags
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip

# A number, a string, `Strings`, an array of numbers (flags as 0 and 1), or for nested arrays a list of these.
Value = Any


class Readable(Protocol):
    """What a header is read from."""

    def read(self, count: int, /) -> bytes:
        """The next bytes: at most `count`, and none at the end."""


class Strings:
    """An array of strings, decoded when it is asked for: a vocabulary and its merges have half a million."""

    def __init__(self, data: bytes, count: int, where: str) -> None:
        self._data, self._count, self._where = data, count, where

    def __len__(self) -> int:
        return self._count

    def texts(self) -> list[str]:
        """All strings. Raises BrokenModel for one that is no UTF-8."""
        data, offset, strings = self._data, 0, []
        try:
            for _ in range(self._count):
                begin = offset + 8
                offset = begin + int.from_bytes(data[offset:begin], "little")
                strings.append(data[begin:offset].decode())
        except UnicodeDecodeError:
            raise BrokenModel(f"{self._where} {len(strings)} is not UTF-8") from None
        return strings


class GgufHeader(NamedTuple):
    """A file's header. `tensors`: by name, with shapes as numpy has them (rows, columns), and dtypes as
    `BlockFormat.name`. `data_offset`: bytes from the start of the file to the data."""

    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    data_offset: int
    file_bytes: int


def is_gguf(path: Path) -> bool:
    """Whether a file's name ends in .gguf, or it begins as a GGUF file does: Ollama calls them by their hash."""
    if not path.is_file() or path.suffix == ".gguf":
        return path.is_file()
    with reading(path), os.fdopen(open_regular(path), "rb", buffering=0) as stream:
        return stream.read(len(MAGIC)) == MAGIC


def read_gguf_header(file: Path) -> GgufHeader:
    """Reads and checks one file's header.

    Raises BrokenModel, which names the file and what is wrong in it; UnsupportedModel for a version or a number format
    that is not known; StorageFailed where the file cannot be read.
    """
    with reading(file), os.fdopen(open_regular(file), "rb", buffering=0) as stream:
        return walk_gguf_header(file, stream, os.fstat(stream.fileno()).st_size)


def walk_gguf_header(file: Path, stream: Readable, file_bytes: int) -> GgufHeader:
    """As `read_gguf_header`, of a file of `file_bytes` bytes that `stream` gives from its beginning. `file`: what
    errors call it. No more is read than the header takes, rounded up."""
    return _Walk(file, stream, file_bytes).header()


class _Walk:
    """Walks through a header from its first byte to its last, which it reads in growing pieces."""

    def __init__(self, file: Path, stream: Readable, file_bytes: int) -> None:
        self._file, self._stream, self._file_bytes = file, stream, file_bytes
        self._data, self._at, self._nested, self._of_ollama = b"", 0, 0, False

    def header(self) -> GgufHeader:
        self._version()
        tensors, entries = self._number("Q"), self._number("Q")
        if entries > MAX_ENTRIES:
            raise self._broken(f"claims {entries} metadata entries; at most {MAX_ENTRIES} make sense")
        if tensors > MAX_TENSORS:
            raise self._broken(f"claims {tensors} tensors; at most {MAX_TENSORS} make sense")
        metadata: dict[str, Value] = {}
        for i in range(entries):
            key = self._text(_MAX_KEY_BYTES, f"the key of metadata entry {i}")
            if key in metadata:
                raise self._broken(f"has the metadata {quoted(key)} twice")
            metadata[key] = self._value(self._number("I"), quoted(key))
        alignment = self._alignment(metadata)
        self._of_ollama = metadata.get("general.architecture") == GPT_OSS
        of_name: dict[str, tuple[str, tuple[int, ...], int, int, bool]] = {}
        for i in range(tensors):
            name = self._text(_MAX_NAME_BYTES, f"the name of tensor {i}")
            if name in of_name:
                raise self._broken(f"has the tensor {quoted(name)} twice")
            of_name[name] = self._tensor(quoted(name), alignment)
        data_offset = -(-self._at // alignment) * alignment
        infos = {name: self._info(name, data_offset, *of_name[name]) for name in of_name}
        refuse_overlaps(infos, self._file)
        return GgufHeader(metadata, infos, data_offset, self._file_bytes)

    def _version(self) -> None:
        if self._file_bytes < 24 or self._bytes(4) != MAGIC:
            raise self._broken("is no GGUF file: it does not begin with GGUF and a header")
        version = self._number("I")
        if version in (2, 3):
            return
        if version and version & 0xFFFF == 0:
            raise UnsupportedModel(f"{self._file} is a big-endian GGUF file: penstock reads little-endian ones")
        raise UnsupportedModel(f"{self._file} has version {version} of GGUF: penstock reads versions 2 and 3")

    def _alignment(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or isinstance(alignment, bool):
            raise self._broken("has a general.alignment that is no number")
        if not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._broken(f"has general.alignment {alignment}; it should be a power of 2 up to {_MAX_ALIGNMENT}")
        return alignment

    def _value(self, kind: int, where: str, nesting: int = 0) -> Value:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._text(MAX_HEADER_BYTES, where)
        if kind != _ARRAY:
            raise self._broken(f"has the metadata {where} of the unknown type {kind}")
        of, count = self._number("I"), self._number("Q")
        if of in _NUMBERS:
            return self._numbers(_NUMBERS[of], count, where)
        if of == _STRING:
            return self._strings(count, where)
        if of != _ARRAY:
            raise self._broken(f"has the metadata {where}, an array of the unknown type {of}")
        if nesting == _MAX_NESTING:
            raise self._broken(f"has the metadata {where}, arrays nested more than {_MAX_NESTING} deep")
        self._require(12 * count, where)  # the least that so many arrays take
        self._nested += count
        if self._nested > _MAX_NESTED:
            raise self._broken(f"has the metadata {where}, one of more than {_MAX_NESTED} arrays within arrays")
        return [self._value(_ARRAY, where, nesting + 1) for _ in range(count)]

    def _numbers(self, code: str, count: int, where: str) -> array[Any]:
        numbers: array[Any] = array("B" if code == "?" else code)
        self._require(count * numbers.itemsize, where)
        numbers.frombytes(self._bytes(count * numbers.itemsize))
        return numbers

    def _strings(self, count: int, where: str) -> Strings:
        self._require(8 * count, where)
        if count > MAX_STRINGS:
            raise self._broken(f"has the metadata {where} with {count} strings; at most {MAX_STRINGS} make sense")
        begin = offset = self._at
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if offset + 8 > len(self._data):
                self._read_to(offset + 8, where)
            offset += 8 + unpack(self._data, offset)[0]
            if offset > self._file_bytes:
                raise self._broken(f"is truncated, or a string of the metadata {where} claims to be too long")
        self._read_to(offset, where)
        self._at = offset
        return Strings(self._data[begin:offset], count, f"{self._file}: {where}, string")

    def _tensor(self, name: str, alignment: int) -> tuple[str, tuple[int, ...], int, int, bool]:
        """(number format, shape, offset, bytes, `TensorInfo.in_turns`) of a tensor. `name`: quoted."""
        dims = self._number("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self._broken(f"has the tensor {name} with {dims} dimensions; it should have 1 to {_MAX_DIMS}")
        sizes = [self._number("Q") for _ in range(dims)]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in BLOCK_FORMATS or (kind == IN_TURNS and not self._of_ollama):
            raise UnsupportedModel(f"{self._file}: tensor {name} has the unknown number format {kind}")
        fmt = BLOCK_FORMATS[kind]
        if not all(1 <= size <= MAX_DIM for size in sizes):
            raise self._broken(f"has the tensor {name} with an impossible shape")
        if sizes[0] % fmt.numbers:
            raise self._broken(f"has the tensor {name} with rows of {sizes[0]}; {fmt.name} has blocks of {fmt.numbers}")
        if offset % alignment:
            raise self._broken(f"has the tensor {name} at offset {offset}, which is no multiple of {alignment}")
        nbytes = fmt.nbytes
        for size in (sizes[0] // fmt.numbers, *sizes[1:]):
            nbytes *= size
        return fmt.name, tuple(reversed(sizes)), offset, nbytes, kind == IN_TURNS

    def _info(
        self, name: str, data_offset: int, dtype: str, shape: tuple[int, ...], offset: int, nbytes: int, in_turns: bool
    ) -> TensorInfo:
        end = data_offset + offset + nbytes
        if end > self._file_bytes:
            raise self._broken(
                f"is truncated: its tensor {quoted(name)} {list(shape)} ends at byte {end}, the file has"
                f" {self._file_bytes}"
            )
        return TensorInfo(name, dtype, shape, self._file, data_offset + offset, nbytes, in_turns=in_turns)

    def _number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self._bytes(size))[0]

    def _text(self, max_bytes: int, where: str) -> str:
        length = self._number("Q")
        if length > max_bytes:
            raise self._broken(f"claims {length} bytes for {where}; at most {max_bytes} make sense")
        self._require(length, where)
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError:
            raise self._broken(f"has {where}, which is not UTF-8") from None

    def _bytes(self, count: int) -> bytes:
        self._read_to(self._at + count, "its header")
        self._at += count
        return self._data[self._at - count : self._at]

    def _require(self, count: int, where: str) -> None:
        """Raises BrokenModel where the file has fewer bytes left."""
        if count > self._file_bytes - self._at:
            left = self._file_bytes - self._at
            raise self._broken(f"is truncated: {where} claims {count} bytes at least, {left} are left")

    def _read_to(self, end: int, where: str) -> None:
        """Reads on, until the first `end` bytes of the file are there."""
        if end <= len(self._data):
            return
        if end > self._file_bytes:
            raise self._broken(f"is truncated: {where} goes on behind the file's {self._file_bytes} bytes")
        if end > MAX_HEADER_BYTES:
            raise self._broken(f"has a header of more than {MAX_HEADER_BYTES} bytes: no GGUF file has")
        wanted = min(max(end, 2 * len(self._data), _FIRST_READ_BYTES), self._file_bytes, MAX_HEADER_BYTES)
        pieces = [self._data]
        missing = wanted - len(self._data)
        while missing:
            piece = self._stream.read(missing)
            if not piece:
                raise self._broken("became shorter while it was read")
            pieces.append(piece)
            missing -= len(piece)
        self._data = b"".join(pieces)

    def _broken(self, complaint: str) -> BrokenModel:
        return BrokenModel(f"{self._file} {complaint}")
