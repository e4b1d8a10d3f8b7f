"""Opens a model's GGUF file, or all files that it was split into.

llama.cpp splits a model into files called NAME-00001-of-00003.gguf and so on. The first has all metadata. Each has its
own tensors, and says in `split.no` which it is (from 0) and in `split.count` how many there are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TypeVar

from penstock.errors import BadRequest, BrokenModel
from penstock.store.gguf.header import GgufHeader, Value, read_gguf_header
from penstock.store.header import TensorInfo, quoted

P = TypeVar("P", bound=PurePath)

MAX_FILES = 999
_SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Gguf:
    """A model in GGUF. `files`: in their order. `metadata`: of the first. `tensors`: of all, by name."""

    files: tuple[Path, ...]
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]

    @property
    def file(self) -> Path:
        """The file with the metadata."""
        return self.files[0]


def files_of(path: P, exists: Callable[[P], bool] = os.path.exists) -> tuple[P, ...]:
    """The files of the model that the file `path` belongs to, in their order: one, or all that it was split into. Goes
    by the name. `exists`: tells whether there is such a file; by default on the disk. Raises BadRequest where one is
    not there."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return (path,)
    name, count = match[1], int(match[3])
    if not 1 <= int(match[2]) <= count <= MAX_FILES:
        raise BadRequest(f"{path}: its name says file {int(match[2])} of {count}; at most {MAX_FILES} make sense")
    files = tuple(path.with_name(f"{name}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
    missing = [file.name for file in files if not exists(file)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadRequest(f"{path} is one of {count} files of a model, and {missing[0]}{more} is missing beside it")
    return files


def name_of(path: PurePath) -> str:
    """The model's name: that of its file, without the ending."""
    match = _SPLIT.fullmatch(path.name)
    return match[1] if match else path.name.removesuffix(".gguf")


def open_gguf(path: Path) -> Gguf:
    """Reads the headers of a model's file, or of all that it was split into. `path`: any of them.

    Raises BadRequest where one is missing; BrokenModel, UnsupportedModel and StorageFailed as `read_gguf_header`.
    """
    files = files_of(path)
    headers = [read_gguf_header(file) for file in files]
    tensors: dict[str, TensorInfo] = {}
    for nth, (file, header) in enumerate(zip(files, headers, strict=True)):
        _check_split(file, header, nth, len(files))
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise BrokenModel(f"{file} and {tensors[name].file} both have the tensor {quoted(name)}")
            tensors[name] = tensor
    promised = headers[0].metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise BrokenModel(
            f"{files[0]} says split.tensors.count {promised!r:.40}; its files have {len(tensors)} tensors"
        )
    return Gguf(files, headers[0].metadata, tensors)


def _check_split(file: Path, header: GgufHeader, nth: int, count: int) -> None:
    """Raises BrokenModel where a file says that it is another one than its name says."""
    says = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1)
    if says == (nth, count) or (count == 1 and says[1] in (0, 1)):
        return
    if count == 1:
        raise BrokenModel(
            f"{file} says that it is one of {says[1]!r:.40} files; its name should be like"
            f" {file.name.removesuffix('.gguf')[:40]}-00001-of-0000N.gguf, with the others beside it"
        )
    raise BrokenModel(f"{file} says split.no {says[0]!r:.40} of {says[1]!r:.40}; by its name it is {nth} of {count}")
