"""Reads checkpoints slice by slice and without filling the page cache: folders of safetensors files, and GGUF files."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.errors import BadRequest, BrokenModel, UnsupportedModel
from penstock.models.hf.names import spellings
from penstock.models.hf.quantization import CODES, KEY, quantization_of
from penstock.spec.blocks import BLOCKS
from penstock.spec.parts import PAGE_BYTES
from penstock.store.blocks import format_of, row_bytes
from penstock.store.direct import Recycled
from penstock.store.files import open_regular, read_json, storage_errors
from penstock.store.gguf.files import Gguf, open_gguf
from penstock.store.gguf.header import is_gguf
from penstock.store.header import TensorInfo, quoted, read_header
from penstock.store.index import INDEX, MAX_INDEX_BYTES, SINGLE, weight_map
from penstock.store.manifest import CONFIG, MAX_CONFIG_BYTES
from penstock.store.mxfp4 import joined, paired, turned
from penstock.store.quantised import DTYPES, Pieces, combine, order_of, require_order, rows_of
from penstock.units import MIB, round_up

# numpy has no bfloat16: its bits are held as uint16.
RAW_DTYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}

_READ_BYTES = 8 * MIB  # of one read at most
_FOLIO_BYTES = 4 << 20  # of the largest folio of the page cache
_HUGE_BYTES = 1 * MIB  # a read of as many is worth huge pages
_HOLE_BYTES, _SPAN_BYTES = 64 << 10, 8 * MIB  # of rows that are taken: 64 KiB cost less than another request
_KEPT = 8  # matrices that lie by columns in a file: of a part that is packed, or of two experts


@dataclass
class _Turned:
    """The rows of a matrix that lies by columns in its file, as soon as a thread has read it."""

    rows: npt.NDArray[Any] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Checkpoint:
    """The tensors of a checkpoint, by name. A context manager; its files stay open between reads. `folder`: or the GGUF
    file that was named. `gguf`: what a GGUF file has beside its tensors; None for a folder. `pieces`: the tensors that
    hold each quantised matrix of a folder (`store.quantised`), which is a tensor here, in a format of `spec.blocks`."""

    folder: Path
    tensors: dict[str, TensorInfo]
    gguf: Gguf | None = None
    pieces: dict[str, Pieces] = field(default_factory=dict)
    _memory: Recycled = field(default_factory=Recycled, repr=False)
    _fds: dict[Path, int] = field(default_factory=dict, repr=False)
    _cached: dict[tuple[str, int | None], npt.NDArray[Any]] = field(default_factory=dict, repr=False)
    _turned: dict[str, _Turned] = field(default_factory=dict, repr=False)
    _turned_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _fds_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _cache_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Opens a folder with `model.safetensors`, or with the shards that `model.safetensors.index.json` lists, or
        with one *.safetensors of any name; or a GGUF file, with all that its model was split into. Reads headers only.

        Raises BadRequest (no such folder, no safetensors in it), BrokenModel, UnsupportedModel.
        """
        if is_gguf(folder):
            gguf = open_gguf(folder)
            return cls(folder, gguf.tensors, gguf)
        if not folder.is_dir():
            raise BadRequest(f"{folder} is no folder")
        only = _only_file(folder)
        tensors = _read_shards(folder) if only is None else read_header(only).tensors
        config = folder / CONFIG
        how = quantization_of(read_json(config, MAX_CONFIG_BYTES), str(config)) if config.exists() else None
        tensors, pieces = (paired(tensors), {}) if how is None else combine(tensors, how)
        return cls(folder, tensors, None, pieces)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files and gives back the memory of what was read. Later reads open the files again."""
        self._cached.clear()
        self._turned.clear()
        self._memory.forget()
        while self._fds:
            fd = self._fds.popitem()[1]
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    @property
    def files(self) -> list[Path]:
        """The files of all tensors, sorted."""
        return sorted({file for name in self.tensors for file in self.files_of(name)})

    def files_of(self, name: str) -> set[Path]:
        """The files that hold a tensor. Raises as `find`."""
        tensor = self.find(name)
        if tensor.name in self.pieces:
            return {piece.file for piece in self.pieces[tensor.name].tensors}
        return set(tensor.files)

    def require_order(self, may_lack_it: bool = False) -> None:
        """Raises UnsupportedModel where the columns of a group of a quantised matrix lie apart (act-order), BrokenModel
        where they are in no group. `may_lack_it`: of some folders only headers are there, with zeros for all else."""
        for pieces in self.pieces.values():
            require_order(pieces, self._plain, may_lack_it)

    def order_of(self, name: str) -> npt.NDArray[np.int64]:
        """The order in which the columns of a matrix lie when it is read, int64 [in] (`quantised.order_of`). Raises as
        `find`."""
        tensor = self.find(name)
        pieces = self.pieces.get(tensor.name)
        order = None if pieces is None else order_of(pieces, self._plain)
        return np.arange(tensor.shape[-1]) if order is None else order

    def find(self, name: str) -> TensorInfo:
        """The tensor of this name, or of one of its other `spellings`. Raises BrokenModel where there is none;
        UnsupportedModel where codes stand for it that config.json says nothing of."""
        for candidate in spellings(name):
            if candidate in self.tensors:
                return self.tensors[candidate]
        for codes in (f"{each.removesuffix('weight')}{last}" for each in spellings(name) for last in CODES):
            if name.endswith(".weight") and codes in self.tensors and not self.pieces:
                raise UnsupportedModel(
                    f"{self.folder} has {quoted(codes)}, which is quantised, but no {KEY} in {CONFIG} that says how"
                )
        raise BrokenModel(f"{self.folder} lacks the tensor {quoted(name)}")

    def has(self, name: str) -> bool:
        """Whether `find` finds it."""
        return any(spelling in self.tensors for spelling in spellings(name))

    def weights(self, name: str) -> TensorInfo:
        """As `find`. Raises UnsupportedModel where the elements are of a format that is not read: in folders all but
        float32, float16, bfloat16 and pairs in MXFP4."""
        tensor = self.find(name)
        if tensor.dtype not in RAW_DTYPES and format_of(tensor.dtype) is None:
            known = ", ".join(RAW_DTYPES)
            if self.gguf is not None:
                known += ", Q4_1, " + ", ".join(kind.upper() for kind, blocks in BLOCKS.items() if not blocks.word)
            raise UnsupportedModel(
                f"{tensor.file}: tensor {quoted(name)} holds {tensor.dtype}; penstock reads {known} weights"
            )
        return tensor

    def read(self, name: str, axis: int, start: int, stop: int, item: int | None = None) -> npt.NDArray[Any]:
        """Elements start..stop of a tensor along `axis`, all elements along its other axes: float32, float16, or uint16
        holding bfloat16's bits. `item`: the number of a matrix in a tensor with three axes, or of a vector in one with
        two; `axis` is then its own.

        Along axis 0 only these bytes are read. Along axis 1 the whole matrix is read, and kept until two others
        were asked for; the result is then a view of it, and must not be written to. Raises BrokenModel where the tensor
        has no such elements, UnsupportedModel as `weights`, StorageFailed.

        Of a tensor in blocks the result is uint8 [rows, bytes of a row], and along axis 1 its rows are whole.
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
        whole = self._whole(tensor, item)
        return whole[:, start:stop] if tensor.dtype in RAW_DTYPES else whole

    def take(self, name: str, axis: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """As `read`, but gives the elements `numbers`, int64 [n], along `axis`, in this order. Neighbours are read
        together, with what lies between them. Raises BrokenModel if the tensor has no such elements."""
        tensor = self.weights(name)
        if axis >= len(tensor.shape) or numbers.min() < 0 or numbers.max() >= tensor.shape[axis]:
            raise BrokenModel(f"{tensor.file}: tensor {quoted(name)} {list(tensor.shape)} has too few on axis {axis}")
        if axis == 1:
            return self._whole(tensor, None)[:, numbers]
        order = np.argsort(numbers, kind="stable")
        rising = numbers[order]
        out: npt.NDArray[Any] | None = None
        for lo, hi in _spans(rising, max(1, tensor.nbytes // tensor.shape[0])):
            rows = self._rows(tensor, int(rising[lo]), int(rising[hi - 1]) + 1)
            if out is None:
                out = np.empty((len(numbers), *rows.shape[1:]), rows.dtype)
            out[order[lo:hi]] = rows[rising[lo:hi] - rising[lo]]
        assert out is not None
        return out

    def _whole(self, tensor: TensorInfo, item: int | None) -> npt.NDArray[Any]:
        """The whole matrix. It is kept until two others were asked for: while the last columns of one are taken, the
        first ones of the next one are."""
        key = tensor.name, item
        with self._cache_lock:
            if key not in self._cached:
                while len(self._cached) > 1:
                    del self._cached[next(iter(self._cached))]
                self._cached[key] = self._rows(tensor, 0, tensor.shape[0])
            return self._cached[key]

    def _rows(self, tensor: TensorInfo, start: int, stop: int) -> npt.NDArray[Any]:
        if tensor.scales is not None:
            return joined(self._bytes(tensor, start, stop), self._bytes(tensor.scales, start, stop))
        if tensor.name in self.pieces:
            pieces = self.pieces[tensor.name]
            if pieces.by_column or pieces.is_ordered:  # each row takes as long as all of them, or is asked for alone
                return self._by_column(pieces, tensor.name)[start:stop]
            return rows_of(pieces, self._plain, start, stop)
        if tensor.dtype in RAW_DTYPES:
            shape, dtype = (stop - start, *tensor.shape[1:]), RAW_DTYPES[tensor.dtype]
        else:
            shape, dtype = (stop - start, row_bytes(tensor.dtype, tensor.shape[-1])), np.uint8
        rows = self._elements(tensor, start, shape, dtype)
        return turned(rows) if tensor.in_turns else rows

    def _plain(self, tensor: TensorInfo, start: int, stop: int) -> npt.NDArray[Any]:
        """Elements start..stop along the first axis, as they are. A tensor without axes has one element."""
        return self._elements(tensor, start, (stop - start, *tensor.shape[1:]), DTYPES[tensor.dtype])

    def _elements(
        self, tensor: TensorInfo, start: int, shape: tuple[int, ...], dtype: npt.DTypeLike
    ) -> npt.NDArray[Any]:
        """An array of this shape and type, out of the bytes of a tensor from element `start` of its first axis on."""
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes:
            return np.empty(shape, dtype)
        raw = self._pread(tensor, tensor.offset + start * (tensor.nbytes // (tensor.shape or (1,))[0]), nbytes)
        if raw.ctypes.data % dtype.itemsize:
            raw = raw.copy()  # a header of an odd length is before it
        return raw.view(dtype).reshape(shape)

    def _pread(self, tensor: TensorInfo, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """uint8 [nbytes]. Direct reads take whole pages, so some bytes around are read too."""
        first, end = offset // PAGE_BYTES * PAGE_BYTES, round_up(offset + nbytes, PAGE_BYTES)
        memory = self._page_memory(end - first)
        with storage_errors("read", tensor.file):
            fd = self._fd(tensor.file)
            was_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)  # another thread may clear it meanwhile
            try:
                read_bytes = _native.read_into(fd, first, memory.ctypes.data, end - first, _READ_BYTES)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                _bypass_cache(fd, False)
                read_bytes = _native.read_into(fd, first, memory.ctypes.data, end - first, _READ_BYTES)
            if read_bytes < offset + nbytes - first:
                raise BrokenModel(f"{tensor.file} is truncated: tensor {quoted(tensor.name)} ends early")
            # Where reads are not direct: the page cache drops whole folios only, and reading ahead makes them large.
            # The last folio of the read before this one may reach into this one, so the range to drop begins one folio
            # earlier. Without that a third to all of a file stayed cached.
            begin = max(0, first - _FOLIO_BYTES)
            os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
        return memory[offset - first :][:nbytes]

    def _page_memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory, uint8 [nbytes], that begins with a page. A small read does not take 2 MiB, which the kernel
        clears."""
        if nbytes >= _HUGE_BYTES:
            return self._memory.take(nbytes)
        memory = np.empty(nbytes + PAGE_BYTES, np.uint8)
        return memory[-memory.ctypes.data % PAGE_BYTES :][:nbytes]

    def _bytes(self, tensor: TensorInfo, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Rows start..stop of a tensor as they lie, uint8 [rows, bytes]."""
        row = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
        nbytes = (stop - start) * row
        raw = self._pread(tensor, tensor.offset + start * row, nbytes) if nbytes else np.empty(0, np.uint8)
        return raw.reshape(stop - start, row)

    def _by_column(self, pieces: Pieces, name: str) -> npt.NDArray[Any]:
        """All rows of a matrix that lies by columns. The last few are kept, for granules of a part take turns."""
        with self._turned_lock:
            slot = self._turned.pop(name, None) or _Turned()
            self._turned[name] = slot  # the latest is last
            while len(self._turned) > _KEPT:
                del self._turned[next(iter(self._turned))]
        with slot.lock:
            if slot.rows is None:
                slot.rows = rows_of(pieces, self._plain, 0, pieces.shape[0])
            return slot.rows

    def _fd(self, file: Path) -> int:
        with self._fds_lock:
            if file not in self._fds:
                self._fds[file] = open_regular(file)
                _bypass_cache(self._fds[file], True)
            return self._fds[file]


def _spans(numbers: npt.NDArray[np.int64], row_bytes: int) -> list[tuple[int, int]]:
    """lo, hi of the neighbours among ascending numbers of rows that one read takes: holes of `_HOLE_BYTES` at most are
    read too, and no more than `_SPAN_BYTES` together, or one run of rows without a hole."""
    spans, lo, hi = list[tuple[int, int]](), 0, 0
    for begin, end in _runs(numbers):
        hole = (int(numbers[begin]) - int(numbers[hi - 1]) - 1) * row_bytes if hi else 0
        if hole > _HOLE_BYTES or (int(numbers[end - 1]) + 1 - int(numbers[lo])) * row_bytes > _SPAN_BYTES:
            if hi > lo:
                spans.append((lo, hi))
            lo = begin
        hi = end
    return [*spans, (lo, hi)]


def _runs(numbers: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Begin and end of each run of successive numbers."""
    breaks = (np.flatnonzero(np.diff(numbers) > 1) + 1).tolist()
    return list(zip([0, *breaks], [*breaks, len(numbers)], strict=True))


def _bypass_cache(fd: int, direct: bool) -> None:
    """Reads of a file bypass the page cache from now on, or no longer do. Some file systems refuse that at once, others
    refuse the reads."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)


def _matrix(tensor: TensorInfo, item: int) -> TensorInfo:
    """Matrix `item` of a tensor with three axes, or vector `item` of one with two. Raises BrokenModel where there is
    none."""
    if len(tensor.shape) not in (2, 3) or not 0 <= item < tensor.shape[0]:
        raise BrokenModel(f"{tensor.file}: tensor {quoted(tensor.name)} {list(tensor.shape)} has no matrix {item}")
    nbytes, scales = tensor.nbytes // tensor.shape[0], tensor.scales and _matrix(tensor.scales, item)
    return replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + item * nbytes, nbytes=nbytes, scales=scales)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's weights, and the index that lists them. The weights are not read.

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
    """Tensor name → file name. Raises BrokenModel where a file is missing."""
    index = folder / INDEX
    files = weight_map(read_json(index, MAX_INDEX_BYTES), index)
    for name in sorted(set(files.values())):
        if name != Path(name).name:  # "../../elsewhere" is no shard of this checkpoint
            raise BrokenModel(f"{index} names {quoted(name)}, which is no plain file name")
        if not (folder / name).exists():
            raise BrokenModel(f"{index} names {quoted(name)}, which is missing")
    return files


def _read_shards(folder: Path) -> dict[str, TensorInfo]:
    weight_map = _read_index(folder)
    headers = {name: read_header(folder / name) for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in headers[name].tensors:
            raise BrokenModel(f"{folder / name} lacks the tensor {quoted(tensor)} that {INDEX} promises")
    # A shard may hold tensors that the index does not list. transformers loads shards whole, so it finds these too.
    tensors = {name: tensor for header in headers.values() for name, tensor in header.tensors.items()}
    return tensors | {tensor: headers[name].tensors[tensor] for tensor, name in weight_map.items()}
