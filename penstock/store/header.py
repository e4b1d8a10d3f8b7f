"""Reads the header of a safetensors file without trusting it.

A safetensors file has three parts:

    8 bytes    the header's length, little-endian
    header     a JSON object: name → {dtype, shape, data_offsets}
    data       the tensors; offsets count from the end of the header

Source: the README of the safetensors library, "Format". The cap of 100 MB on the header is that library's too.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import BrokenModel, UnsupportedModel
from penstock.store.files import no_json, open_regular, reading

MAX_HEADER_BYTES = 100_000_000
MAX_DIM = 2**48

# Bits per element. Types in which no weight that we read comes are known too, so that a file may hold them.
DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6,
    "F6_E3M2": 6, "F4": 4, "C64": 64, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip

# Floats by their name in files. All other types of a GGUF file lie in blocks.
KINDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file. `offset`: bytes from the start of the file to the tensor's first element. `scales`: of a
    tensor in MXFP4 whose scales are a tensor of their own (`store.mxfp4`); offset and bytes are those of the codes.
    `in_turns`: of one in MXFP4 whether a byte holds two neighbours, behind each block's scale."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    scales: TensorInfo | None = None
    in_turns: bool = False

    @property
    def files(self) -> list[Path]:
        """The files that hold it."""
        return [self.file] if self.scales is None else [self.file, self.scales.file]


class Header(NamedTuple):
    """A file's header. `data_offset`: bytes from the start of the file to the data."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_offset: int
    file_bytes: int


def quoted(name: str) -> str:
    """A name out of a file, escaped and cut to at most 100 characters, for a message of one line."""
    text = repr(name)
    return text if len(text) <= 100 else text[:97] + "..."


def read_header(file: Path) -> Header:
    """Reads and checks one file's header.

    Raises BrokenModel, which names the file and the tensor; UnsupportedModel for an unknown element type;
    StorageFailed where the file cannot be read.
    """
    with reading(file), os.fdopen(open_regular(file), "rb", buffering=0) as stream:
        file_bytes = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise BrokenModel(f"{file} has {len(prefix)} bytes: too short for a safetensors file")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise BrokenModel(
                f"{file} claims a header of {length} bytes (at most {MAX_HEADER_BYTES}): no safetensors file"
            )
        if length > file_bytes - 8:
            raise BrokenModel(f"{file} is truncated: its header should have {length} bytes, the file has {file_bytes}")
        text = stream.read(length)
    if len(text) < length:
        raise BrokenModel(f"{file} is truncated: its header should have {length} bytes, {len(text)} came")
    return parse_header(text, file, file_bytes)


def parse_header(text: bytes, file: Path, file_bytes: int) -> Header:
    """Checks the header `text` of a file of `file_bytes` bytes. Raises as `read_header`."""
    entries = _json_object(text, file)
    data_offset = 8 + len(text)
    metadata = _metadata(entries.pop("__metadata__", {}), file)
    tensors = {name: _tensor(name, entry, file, data_offset, file_bytes) for name, entry in entries.items()}
    refuse_overlaps(tensors, file)
    return Header(tensors, metadata, data_offset, file_bytes)


def _json_object(text: bytes, file: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise BrokenModel(f"{file}: the header names {quoted(twice)} twice")
        return entries

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError:
        raise BrokenModel(f"{file}: the header is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{file}: the header is not JSON ({no_json(error).removeprefix('it ')})") from None
    if not isinstance(entries, dict):
        raise BrokenModel(f"{file}: the header is JSON, but no object")
    return entries


def _metadata(value: Any, file: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise BrokenModel(f"{file}: __metadata__ should map names to strings")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _tensor(name: str, entry: Any, file: Path, data_offset: int, file_bytes: int) -> TensorInfo:
    where = f"{file}: tensor {quoted(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise BrokenModel(f"{where} should have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise BrokenModel(f"{where} has a dtype that is no string")
    if dtype not in DTYPE_BITS:
        raise UnsupportedModel(f"{where} has the unknown element type {quoted(dtype)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_is_count(n) and n <= MAX_DIM for n in shape):
        raise BrokenModel(f"{where} has an impossible shape")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(_is_count, offsets))
        or offsets[0] > offsets[1]
    ):
        raise BrokenModel(f"{where} has impossible data_offsets")
    begin, end = offsets
    bits = DTYPE_BITS[dtype]
    for n in shape:
        bits *= n
    if bits != 8 * (end - begin):
        raise BrokenModel(f"{where}: {dtype} {shape} takes {bits // 8} bytes, its offsets span {end - begin}")
    if data_offset + end > file_bytes:
        raise BrokenModel(f"{where} ends at byte {data_offset + end}, the file has {file_bytes}: it is truncated")
    return TensorInfo(name, dtype, tuple(shape), file, data_offset + begin, end - begin)


def refuse_overlaps(tensors: dict[str, TensorInfo], file: Path) -> None:
    """Raises BrokenModel where two tensors of a file share bytes."""
    last: TensorInfo | None = None
    for tensor in sorted((t for t in tensors.values() if t.nbytes), key=lambda t: t.offset):
        if last is not None and tensor.offset < last.offset + last.nbytes:
            raise BrokenModel(f"{file}: tensors {quoted(last.name)} and {quoted(tensor.name)} overlap")
        last = tensor
