"""A checkpoint that is being packed: what each granule's bytes are made of, whoever keeps them.

`pack` writes them into files. `unpacked` has them made in the memory that a first run keeps them in.
"""

from __future__ import annotations

import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import BrokenModel, PenstockError, UnsupportedModel
from penstock.models import TensorSource
from penstock.spec import codec
from penstock.spec.format import Format
from penstock.spec.order import NeuronOrder
from penstock.spec.parts import PAGE_BYTES, PINNED, Block, Part
from penstock.store.blocks import encode_blocks, format_of, widened
from penstock.store.checkpoint import Checkpoint
from penstock.store.files import storage_errors, write_bytes
from penstock.store.header import KINDS, TensorInfo, quoted
from penstock.store.naming import naming
from penstock.store.quantize import encode, encode_rows, widen
from penstock.store.temporary import temporary_folder
from penstock.store.writer import NOTHING, SHARD_BYTES, Fill, Progress, Waiting, Writing, write_packed


@dataclass(frozen=True)
class Packing:
    """Reads blocks of parts out of a checkpoint and encodes them. `extras`: the small files beside the weights, by
    name. `orders`: of the neurons of each layer, where they do not lie as in the checkpoint and others should know.
    `moved`: of layers whose `down` has an order of its columns, these."""

    checkpoint: Checkpoint
    parts: tuple[Part, ...]
    sources: dict[tuple[str, str], TensorSource]
    weights: Format
    extras: dict[str, bytes]
    orders: dict[int, array[int]]
    moved: dict[int, array[int]] = field(default_factory=dict)

    def check_shapes(self, says_experts: str) -> None:
        """Checks that every tensor is there and has the shape that follows from the spec. `says_experts`: a clause
        about the number of experts in config.json, for messages. Raises BrokenModel, UnsupportedModel."""
        needed: dict[str, tuple[TensorInfo, list[int]]] = {}
        by_expert: set[str] = set()  # names of tensors that have as many rows, or matrices, as there are experts
        for part in self.parts:
            for block in part.blocks:
                source = self.sources[part.key, block.name]
                if source.order:
                    continue  # of a matrix whose shape is checked where it is another block
                if source.stacked or (part.kind == "router" and block.name != "shared_gate"):
                    by_expert.add(source.tensor)
                for name in source.tensors(part.experts):
                    tensor = self.checkpoint.weights(name)
                    if tensor.dtype not in KINDS and (part.kind in PINNED or not (block.tiled or block.stride)):
                        raise UnsupportedModel(
                            f"{tensor.file}: tensor {quoted(name)} holds {tensor.dtype}; penstock reads norms, biases"
                            f" and routers in {', '.join(KINDS)}"
                        )
                    shape = _shape(part, block, source, len(tensor.shape) - source.stacked)
                    axis = (source.axis != source.turned) + source.stacked
                    before = needed.setdefault(name, (tensor, shape))[1]
                    # A fused tensor (q, k and v in one) ends where its last block does.
                    before[axis] = max(before[axis], shape[axis])
        for name, (tensor, shape) in needed.items():
            if list(tensor.shape) != shape:
                has_shape = list(tensor.shape)
                why = f": it {says_experts}" if name in by_expert and has_shape[1:] == shape[1:] else ""
                raise BrokenModel(
                    f"{tensor.file}: tensor {quoted(name)} has shape {has_shape}; config.json leads to {shape}{why}"
                )

    def files(self, part: Part) -> set[str]:
        """Names of the checkpoint's files that hold the tensors of a part."""
        names = (name for b in part.blocks for name in self.sources[part.key, b.name].tensors(part.experts))
        return {file.name for name in names for file in self.checkpoint.files_of(name)}

    @contextmanager
    def text_folder(self, apart: bool = False) -> Iterator[Path]:
        """A folder with the small files: the checkpoint's own, or where a GGUF file stands for them one that is removed
        again. `apart`: always such a one, with the very files of the packed model. What is raised meanwhile names the
        checkpoint instead of that folder. Raises StorageFailed."""
        if self.checkpoint.gguf is None and not apart:
            yield self.checkpoint.folder
            return
        with ExitStack() as stack:
            with storage_errors("write", Path(tempfile.gettempdir())):
                made = stack.enter_context(temporary_folder())
                for name, content in self.extras.items():
                    write_bytes(made / name, content)
            with naming(self.checkpoint.folder, made):
                yield made

    def write(
        self,
        dst: Path,
        fill: Fill,
        progress: Progress | None = None,
        shard_bytes: int = SHARD_BYTES,
        spread: Path | None = None,
        waiting: Waiting | None = None,
        writing: Writing | None = None,
        beside: Mapping[str, bytes] = NOTHING,
    ) -> Path:
        """Writes the packed model `dst`, whose granules `fill` gives, and returns `dst`. `beside`: as for
        `write_packed`; the others as for `pack`. Raises as `write_packed`."""
        orders = tuple(NeuronOrder.of(layer, order) for layer, order in self.orders.items())
        fingerprint = {"weights": self.weights.name, "source": _stamp(self.checkpoint, self.extras)}
        fingerprint |= {"orders": codec.to_json(orders)} if orders else {}
        how = (progress, shard_bytes, spread, waiting, writing, orders, beside)
        return write_packed(dst, self.parts, self.weights, fingerprint, fill, self.extras, *how)

    def filler(self, pool: ThreadPoolExecutor) -> Fill:
        """Makes granules out of the checkpoint, wherever they are wanted. Jobs of the pool are runs of a block's
        granules."""

        def fill(part: Part, lo: int, hi: int, out: npt.NDArray[Any]) -> Callable[[], None]:
            granules = out.reshape(hi - lo, part.granule_bytes)
            jobs = [cleared := pool.submit(_clear_gaps, part, granules)]
            for block in part.blocks:
                for a, b in self._runs(part, block, lo, hi):
                    jobs.append(pool.submit(self._encode_run, part, block, a, b, granules[a - lo : b - lo], cleared))

            def filled() -> None:
                try:
                    for job in jobs:
                        job.result()
                finally:
                    for job in jobs:
                        job.cancel()
                    wait(jobs)

            return filled

        return fill

    def _runs(self, part: Part, block: Block, lo: int, hi: int) -> list[tuple[int, int]]:
        """Cuts granules lo..hi of a block into runs that are read and encoded at once. A run's granules lie in a row in
        a tensor of a GGUF file, which has blocks, and all of them are full."""
        source, full = self.sources[part.key, block.name], lo
        in_blocks = self.checkpoint.find(source.of_expert(0)).dtype not in KINDS
        apart = source.interleaved or source.step > 1 or source.stride not in (0, _extent(block, source, False))
        if in_blocks and not apart and part.experts == 1 and self._order(part, source) is None:
            full = min(hi, part.rows // part.granule_rows)
        return [(lo, full)] * (lo < full) + [(g, g + 1) for g in range(max(lo, full), hi)]

    def _encode_run(
        self, part: Part, block: Block, lo: int, hi: int, granules: npt.NDArray[Any], cleared: Future[None]
    ) -> None:
        """Encodes a block of granules lo..hi of `_runs` into uint8 [hi - lo, granule_bytes]. `cleared`: done when their
        gaps are cleared. It was submitted before, so a thread is at it, and what is read meanwhile comes from a
        disk."""
        if hi - lo == 1:
            self._encode(part, block, lo, granules[0], cleared)
            return
        source = self.sources[part.key, block.name]
        extent, tensor = _extent(block, source, False), self.checkpoint.find(source.of_expert(0))
        start = source.offset + lo * extent
        raw = self.checkpoint.read(source.of_expert(0), source.axis, start, start + (hi - lo) * extent)
        into = granules[:, block.offset : block.offset + block.nbytes]
        cleared.result()
        with _named(tensor):
            if source.axis == 1 and format_of(tensor.dtype) == block.format:
                encode_blocks(raw, tensor.dtype, block.rows, block.cols, start, into)
                return
            for i in range(hi - lo):
                rows, column = (raw, start + i * extent) if source.axis == 1 else (raw[i * extent :][:extent], 0)
                _encode_blocks(rows, tensor.dtype, block, column, into[i])

    def _order(self, part: Part, source: TensorSource) -> array[int] | None:
        """The order in which an FFN's neurons are taken from a tensor. Columns that have an order of their own are in
        it when they are read."""
        if part.kind != "ffn":
            return None
        if part.layer in self.moved:
            return self.moved[part.layer] if source.axis == 0 else None
        return self.orders.get(part.layer)

    def _encode(self, part: Part, block: Block, g: int, granule: npt.NDArray[Any], cleared: Future[None]) -> None:
        source, (expert, nth) = self.sources[part.key, block.name], divmod(g, part.expert_granules)
        name = source.of_expert(expert)
        tensor = self.checkpoint.find(name)
        if source.order:
            columns = self.checkpoint.order_of(name).astype(np.float32).reshape(1, -1)
            cleared.result()
            into = granule[block.offset : block.offset + block.nbytes]
            encode(columns, block.format, block.rows, block.cols, into, block.tiled)
            return
        one_dim = len(tensor.shape) - source.stacked == 1 or source.folded > 0
        extent = _extent(block, source, one_dim)
        start = source.offset + source.step * nth * (source.stride or extent)
        stop = start + source.step * (extent * part.rows_of(g, g + 1) // part.granule_rows - 1) + 1
        order = self._order(part, source)
        if order is not None:
            numbers = np.array(order[g * part.granule_rows :][: stop - start], np.int64)
            raw = self.checkpoint.take(name, source.axis, source.offset + numbers)
        else:
            axis, item = int(source.axis != source.turned), expert if source.stacked else None
            start, stop = (0, source.folded) if source.folded else (start, stop)
            raw = self.checkpoint.read(name, axis, start, stop, item)
            raw = (raw.T if source.turned else raw)[(slice(None),) * source.axis + (slice(None, None, source.step),)]
        if source.interleaved:
            raw = _halves(raw, source.interleaved)
        cleared.result()
        with _named(tensor):
            into = granule[block.offset : block.offset + block.nbytes]
            if tensor.dtype not in KINDS:
                _encode_blocks(raw, tensor.dtype, block, start if source.axis == 1 else 0, into)
                return
            if source.added:
                raw = widen(raw) - np.float32(source.added)
            if block.stride:
                encode_rows(raw.T if source.axis == 1 else raw, block, granule)
                return
            encode(raw.reshape(1, -1) if one_dim else raw, block.format, block.rows, block.cols, into, block.tiled)


def _encode_blocks(raw: npt.NDArray[Any], dtype: str, block: Block, first_column: int, into: npt.NDArray[Any]) -> None:
    """Rows of a tensor in blocks, uint8 [r, bytes of a row], as a granule's block: as they are, or widened where it has
    another format (`spec.widened`)."""
    if format_of(dtype) == block.format:
        encode_blocks(raw, dtype, block.rows, block.cols, first_column, into)
    else:
        encode(widened(raw, dtype, block.cols, first_column), block.format, block.rows, block.cols, into, block.tiled)


@contextmanager
def _named(tensor: TensorInfo) -> Iterator[None]:
    """Errors about what a tensor holds name it."""
    try:
        yield
    except PenstockError as error:
        raise type(error)(f"{tensor.file}: tensor {quoted(tensor.name)} holds {error.message}") from None


def _clear_gaps(part: Part, granules: npt.NDArray[Any]) -> None:
    """Zeroes the bytes of granules uint8 [n, granule_bytes] that no block writes; all of them where neurons lie apart,
    for then the records of blocks are mixed. Touches each page: threads that meet at a page that is not there yet would
    each have the system clear one."""
    granules[:, ::PAGE_BYTES] = 0
    end = 0
    for block in sorted(part.blocks, key=lambda block: block.offset):
        if block.stride:
            granules[:] = 0
            return
        granules[:, end : block.offset] = 0
        end = block.offset + block.nbytes
    granules[:, end:] = 0


def _halves(rows: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Rows of whole heads whose two halves take turns → the first half of each head, then the second."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    halves: npt.NDArray[Any] = pairs.swapaxes(1, 2).reshape(rows.shape)
    return halves


def _extent(block: Block, source: TensorSource, one_dim: bool) -> int:
    """How much of the tensor's axis that is cut a granule has."""
    return block.cols if one_dim or (source.axis == 1 and not block.stride) else block.rows


def _shape(part: Part, block: Block, source: TensorSource, dims: int) -> list[int]:
    """The shape that a block's tensor should have, up to the end of this block."""
    if source.folded:
        return [source.folded, block.cols // source.folded]
    one_dim = block.rows == 1 and dims == 1
    extent, last = _extent(block, source, one_dim), part.expert_granules - 1
    # With a stride all granules are full.
    length = last * source.stride + extent if source.stride else extent * part.rows // part.granule_rows
    end = source.offset + source.step * (length - 1) + 1
    if one_dim:
        return [part.experts, end] if source.stacked else [end]
    # `down` is cut by columns. Its block has them as columns too, or as rows where neurons lie apart.
    matrix = [end, block.cols] if source.axis == 0 else [block.cols if block.stride else block.rows, end]
    matrix = matrix[::-1] if source.turned else matrix
    return [part.experts, *matrix] if source.stacked else matrix


def _stamp(checkpoint: Checkpoint, extras: dict[str, bytes]) -> list[list[Any]]:
    """Everything that must be unchanged for a call to be resumed: names, sizes and times of the files of weights, and
    names, sizes and CRCs of the small files."""
    stamps: list[list[Any]] = []
    for file in checkpoint.files:
        status = file.stat()
        stamps.append([file.name, status.st_size, status.st_mtime_ns])
    return stamps + [[name, len(content), zlib.crc32(content)] for name, content in sorted(extras.items())]
