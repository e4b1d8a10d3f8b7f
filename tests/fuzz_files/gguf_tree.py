"""GGUF files as trees: read, changed, and written again with numbers that do not fit, for mutants and seeds."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Array:
    """An array of the metadata. `of`: the type of its elements."""

    of: int
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Entry:
    """`value`: a number, bytes of a string, or an Array; of a type that is not known, bytes as they are."""

    key: bytes
    kind: int
    value: Any


@dataclass(frozen=True)
class Tensor:
    """`dims`: as the file has them, the innermost first."""

    name: bytes
    dims: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Tree:
    entries: tuple[Entry, ...]
    tensors: tuple[Tensor, ...]
    data: bytes
    version: int = 3
    alignment: int = 32
    magic: bytes = field(default=b"GGUF")

    def with_value(self, key: str, kind: int, value: Any) -> Tree:
        """With this entry, in place of the one of its key or as the last one."""
        entry = Entry(key.encode(), kind, value)
        keys = [each.key for each in self.entries]
        if entry.key not in keys:
            return replace(self, entries=(*self.entries, entry))
        return replace(self, entries=tuple(entry if each.key == entry.key else each for each in self.entries))

    def without(self, key: str) -> Tree:
        return replace(self, entries=tuple(each for each in self.entries if each.key != key.encode()))

    def with_tensor(self, name: str, **changes: Any) -> Tree:
        return replace(
            self, tensors=tuple(replace(t, **changes) if t.name == name.encode() else t for t in self.tensors)
        )


def parse(content: bytes) -> Tree:
    """Reads a file that is in order. Raises ValueError, struct.error and the like for any other one."""
    stream = io.BytesIO(content)

    def number(code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack("<" + code, stream.read(size))[0]

    def string() -> bytes:
        return stream.read(number("Q"))

    def value(kind: int) -> Any:
        if kind in NUMBERS:
            return number(NUMBERS[kind])
        if kind == STRING:
            return string()
        if kind != ARRAY:
            raise ValueError(kind)
        of, count = number("I"), number("Q")
        return Array(of, tuple(value(of) for _ in range(count)))

    magic, version = stream.read(4), number("I")
    tensor_count, entry_count = number("Q"), number("Q")
    entries = []
    for _ in range(entry_count):
        key, kind = string(), number("I")
        entries.append(Entry(key, kind, value(kind)))
    tensors = []
    for _ in range(tensor_count):
        name = string()
        dims = tuple(number("Q") for _ in range(number("I")))
        tensors.append(Tensor(name, dims, number("I"), number("Q")))
    data = content[-(-stream.tell() // 32) * 32 :]
    return Tree(tuple(entries), tuple(tensors), data, version, 32, magic)


def dump(tree: Tree, wrong: Mapping[int, int] | None = None, seen: Callable[[str], None] | None = None) -> bytes:
    """The file. `wrong`: in place of the n-th count, length, type, dimension or offset that is written, this number.
    `seen`: is told the struct's code of each."""
    out, written = bytearray(tree.magic), 0

    def number(code: str, value: int) -> None:
        nonlocal written
        if seen is not None:
            seen(code)
        value = (wrong or {}).get(written, value)
        written += 1
        out.extend(struct.pack("<" + code, value % (1 << 8 * struct.calcsize("<" + code))))

    def string(text: bytes) -> None:
        number("Q", len(text))
        out.extend(text)

    def value(kind: int, content: Any) -> None:
        if isinstance(content, Array):
            number("I", content.of)
            number("Q", len(content.values))
            for each in content.values:
                value(content.of, each)
        elif isinstance(content, bytes):
            if kind == STRING:
                string(content)
            else:
                out.extend(content)
        elif kind in NUMBERS and NUMBERS[kind] not in "fd":
            size = struct.calcsize(NUMBERS[kind])
            out.extend((int(content) % (1 << 8 * size)).to_bytes(size, "little"))
        else:
            out.extend(struct.pack("<" + NUMBERS.get(kind, "Q"), content))

    number("I", tree.version)
    number("Q", len(tree.tensors))
    number("Q", len(tree.entries))
    for entry in tree.entries:
        string(entry.key)
        number("I", entry.kind)
        value(entry.kind, entry.value)
    for tensor in tree.tensors:
        string(tensor.name)
        number("I", len(tensor.dims))
        for dim in tensor.dims:
            number("Q", dim)
        number("I", tensor.kind)
        number("Q", tensor.offset)
    out.extend(bytes(-len(out) % tree.alignment))
    return bytes(out) + tree.data
