"""GGUF files for tests: written by the package `gguf`, and byte by byte for those that no writer would write."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

SEEN = Path(__file__).parents[3] / "shared/data/gguf-vocabs"  # seven real vocabularies, where the machine has them


def string(text: str | bytes) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content)) + content


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, elements: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + elements


def tensor(name: str | bytes, shape: list[int], kind: int, offset: int) -> bytes:
    """`shape`: as the file has it, the innermost dimension first."""
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    entries: list[bytes], tensors: list[bytes], /, *, magic: bytes = b"GGUF", version: int = 3, **counts: int
) -> bytes:
    """`counts`: entries, tensors, where the header is to claim others than it has."""
    claimed = counts.get("tensors", len(tensors)), counts.get("entries", len(entries))
    return magic + struct.pack("<IQQ", version, *claimed) + b"".join(entries + tensors)


def padded(content: bytes, data: bytes, alignment: int = 32) -> bytes:
    return content + bytes(-len(content) % alignment) + data


def small() -> bytes:
    """A whole little file: an entry of each type, an array of each kind, three tensors."""
    codes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    entries = [entry(f"number.{kind}", kind, struct.pack("<" + code, 1)) for kind, code in codes.items()]
    entries += [entry(f"array.{k}", 9, array(k, 3, struct.pack(f"<3{code}", 1, 0, 1))) for k, code in codes.items()]
    entries += [
        entry("general.architecture", 8, string("llama")),
        entry("words", 9, array(8, 3, string("a") + string("") + string("häh"))),
        entry("nested", 9, array(9, 2, array(8, 1, string("x")) + array(4, 1, struct.pack("<I", 7)))),
    ]
    tensors = [tensor("a", [4, 3], 0, 0), tensor("b", [32, 2], 8, 64), tensor("c", [5], 1, 160)]
    return padded(header(entries, tensors), bytes(range(256)))


def save(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


def write(file: Path, architecture: str, metadata: dict[str, Any], tensors: dict[str, Any], **more: Any) -> Path:
    """A file by the writer of the package `gguf`. `metadata`: values by key, whose types follow from Python's.
    `tensors`: arrays, or (raw blocks, quantisation type)."""
    import gguf

    writer = gguf.GGUFWriter(file, architecture, **more)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
