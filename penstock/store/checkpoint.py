"""Reading checkpoints: a folder of safetensors files, slice by slice, without filling the page cache."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import BadRequest, BrokenModel, UnsupportedModel
from penstock.store.files import open_regular, read_json, storage_errors
from penstock.store.header import TensorInfo, quoted, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000

# numpy has no bfloat16: its bits cross as uint16.
RAW_DTYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
KINDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# One read, at most: a signal (Ctrl-C) is seen between two of them.
_READ_BYTES = 16 << 20
_FOLIO_BYTES = 4 << 20


@dataclass
class Checkpoint:
    """The tensors of a checkpoint, by name. A context manager; its files stay open between reads."""

    folder: Path
    tensors: dict[str, TensorInfo]
    _fds: dict[Path, int] = field(default_factory=dict, repr=False)
    _cached: tuple[tuple[str, int | None], npt.NDArray[Any]] | None = field(default=None, repr=False)
    _fds_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _cache_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """`model.safetensors`, or the shards that `model.safetensors.index.json` lists, or the only
        *.safetensors there is. Reads headers only.

        Raises BadRequest (no such folder, no safetensors in it), BrokenModel, UnsupportedModel.
        """
        if not folder.is_dir():
            raise BadRequest(f"{folder} is no folder")
        only = _only_file(folder)
        return cls(folder, _read_shards(folder) if only is None else read_header(only).tensors)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._cached = None
        while self._fds:
            fd = self._fds.popitem()[1]
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    @property
    def files(self) -> list[Path]:
        return sorted({tensor.file for tensor in self.tensors.values()})

    def find(self, name: str) -> TensorInfo:
        """The tensor, also where the file leaves out or adds a leading "model.". Raises BrokenModel."""
        for candidate in (name, name.removeprefix("model."), "model." + name):
            if candidate in self.tensors:
                return self.tensors[candidate]
        raise BrokenModel(f"{self.folder} lacks the tensor {quoted(name)}")

    def has(self, name: str) -> bool:
        """Whether `find` finds it."""
        return any(each in self.tensors for each in (name, name.removeprefix("model."), "model." + name))

    def weights(self, name: str) -> TensorInfo:
        """As `find`. Raises UnsupportedModel where the elements are not float32, float16 or bfloat16."""
        tensor = self.find(name)
        if tensor.dtype not in RAW_DTYPES:
            raise UnsupportedModel(
                f"{tensor.file}: tensor {quoted(name)} holds {tensor.dtype}; penstock reads F32, F16 and BF16 weights"
            )
        return tensor

    def read(self, name: str, axis: int, start: int, stop: int, item: int | None = None) -> npt.NDArray[Any]:
        """Elements start..stop along `axis`: float32, float16, or uint16 holding bfloat16's bits. `item`: of the matrix
        with that number, of a tensor with three axes.

        Along axis 0 just these bytes are read. Axis 1 needs the whole matrix, which is kept until another
        one is asked for; the result is then a view of it, not to be written. Raises BrokenModel where the tensor has
        no such elements.
        """
        tensor = self.weights(name)
        if item is not None:
            tensor = _matrix(tensor, item)
        if axis >= len(tensor.shape) or not 0 <= start <= stop <= tensor.shape[axis]:
            raise BrokenModel(
                f"{tensor.file}: tensor {quoted(name)} {list(tensor.shape)} has no {start}..{stop} on axis {axis}"
            )
        if axis == 0:
            return self._rows(tensor, start, stop)
        with self._cache_lock:
            if self._cached is None or self._cached[0] != (tensor.name, item):
                self._cached = None  # before the read: never two whole tensors at once
                self._cached = ((tensor.name, item), self._rows(tensor, 0, tensor.shape[0]))
            whole = self._cached[1]
        return whole[:, start:stop]

    def forget(self) -> None:
        """Lets go of the whole tensor that an axis-1 read keeps."""
        with self._cache_lock:
            self._cached = None

    def _rows(self, tensor: TensorInfo, start: int, stop: int) -> npt.NDArray[Any]:
        found = np.empty((stop - start, *tensor.shape[1:]), RAW_DTYPES[tensor.dtype])
        if found.nbytes:
            offset = tensor.offset + start * (tensor.nbytes // tensor.shape[0])
            self._pread(tensor, offset, found.reshape(-1).data.cast("B"))
        return found

    def _pread(self, tensor: TensorInfo, offset: int, into: memoryview) -> None:
        with storage_errors("read", tensor.file):
            with self._fds_lock:
                if tensor.file not in self._fds:
                    self._fds[tensor.file] = open_regular(tensor.file)
                fd = self._fds[tensor.file]
            done = 0
            while done < len(into):
                count = os.preadv(fd, [into[done : done + _READ_BYTES]], offset + done)
                if count == 0:
                    raise BrokenModel(f"{tensor.file} is truncated: tensor {quoted(tensor.name)} ends early")
                done += count
            # The page cache drops whole folios only, and reading ahead makes them large: the last ones of the
            # reads before this one straddled its start. Without this a third to all of a file stayed cached.
            first = max(0, offset - _FOLIO_BYTES)
            os.posix_fadvise(fd, first, offset + done - first, os.POSIX_FADV_DONTNEED)


def _matrix(tensor: TensorInfo, item: int) -> TensorInfo:
    """One matrix of a tensor with three axes. Raises BrokenModel."""
    if len(tensor.shape) != 3 or not 0 <= item < tensor.shape[0]:
        raise BrokenModel(f"{tensor.file}: tensor {quoted(tensor.name)} {list(tensor.shape)} has no matrix {item}")
    nbytes = tensor.nbytes // tensor.shape[0]
    return replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + item * nbytes, nbytes=nbytes)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's weights, and the index that lists them; nothing is read of the weights.

    Raises BadRequest (no safetensors there), BrokenModel.
    """
    only = _only_file(folder)
    if only is not None:
        return [only]
    return [folder / INDEX, *(folder / name for name in sorted(set(_read_index(folder).values())))]


def _only_file(folder: Path) -> Path | None:
    """The file of a checkpoint in one piece; None where an index lists several."""
    if (folder / SINGLE).exists():
        return folder / SINGLE
    if (folder / INDEX).exists():
        return None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = "; pickled weights are not read, save them as safetensors" if pickled else ""
        raise BadRequest(f"{folder} holds no *.safetensors{hint}")
    if len(files) > 1:
        raise BrokenModel(f"{folder} holds {len(files)} *.safetensors but no {INDEX}")
    return files[0]


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name → file name, each of a file that is there."""
    index = folder / INDEX
    weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise BrokenModel(f"{index}: weight_map should map tensor names to file names")
    for name in sorted(set(weight_map.values())):
        if name != Path(name).name:  # "../../elsewhere" is no shard of this checkpoint
            raise BrokenModel(f"{index} names {quoted(name)}, which is no plain file name")
        if not (folder / name).exists():
            raise BrokenModel(f"{index} names {quoted(name)}, which is missing")
    return weight_map


def _read_shards(folder: Path) -> dict[str, TensorInfo]:
    weight_map = _read_index(folder)
    headers = {name: read_header(folder / name) for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in headers[name].tensors:
            raise BrokenModel(f"{folder / name} lacks the tensor {quoted(tensor)} that {INDEX} promises")
    # A shard may hold what the index does not list; whoever loads the shard whole, as transformers does, finds it.
    found = {name: tensor for header in headers.values() for name, tensor in header.tensors.items()}
    return found | {tensor: headers[name].tensors[tensor] for tensor, name in weight_map.items()}
