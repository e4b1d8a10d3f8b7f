"""A checkpoint that has no packed copy yet, as something to load from: its granules are made in the very memory that
they stay in, and the copy is written out of that memory later. So each byte is read once and written once.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from penstock.spec.format import FLOAT32, Format
from penstock.store.direct import STAGE_BYTES
from penstock.store.header import KINDS
from penstock.store.identity import Stamp
from penstock.store.pack import opened, threads
from penstock.store.packed import Packed, read_config
from penstock.store.packing import Packing
from penstock.store.writer import Fill

PIECE_BYTES = STAGE_BYTES  # of granules that are made at once, unless one is larger
PIECES_AHEAD = 3  # beyond the one that is waited for, as the writer has them


@dataclass(frozen=True)
class Unpacked:
    """An open checkpoint, and the model that packing would make of it. `fill` makes granules (`store.writer.Fill`).

    `model`: has no files, and its folder holds the small files that the copy will have. `stamps`: of the checkpoint's
    files when it was opened. `no_copy`: why no copy of it can be written; "" where one can.
    """

    job: Packing
    model: Packed
    fill: Fill
    stamps: dict[str, Stamp]
    _reading: ExitStack = field(repr=False)
    _opened: ExitStack = field(repr=False)
    no_copy: str = ""

    @classmethod
    def open(cls, src: Path, weights: Format | None, stamps: dict[str, Stamp]) -> Unpacked:
        """Reads and checks what packing reads and checks before it reads weights. Raises as `pack`. Must be closed."""
        with ExitStack() as stack:
            reading = stack.enter_context(ExitStack())
            job = reading.enter_context(opened(src, weights))
            folder = stack.enter_context(job.text_folder(apart=True))
            checkpoint = job.checkpoint
            if checkpoint.gguf is not None:  # tokens and merges of a large vocabulary would stay for long
                checkpoint.gguf = replace(checkpoint.gguf, metadata={})
            pool = ThreadPoolExecutor(threads(), "penstock-pack")
            reading.callback(pool.shutdown, cancel_futures=True)
            by_key = {part.key: part for part in job.parts}
            total = sum(part.nbytes for part in job.parts)
            spec = read_config(folder)[1]  # as whoever opens the copy reads it
            model = Packed(folder, spec, job.weights, (), {}, by_key, total, {}, orders=dict(job.orders))
            return cls(job, model, job.filler(pool), stamps, reading, stack.pop_all())
        raise AssertionError("no context above keeps an exception to itself")

    @property
    def reading_bytes(self) -> int:
        """The most memory that is taken beside the granules, in bytes. Granules are made first: that takes the small
        files, what each thread has read, the numbers that it makes of that if it quantises, and each matrix of which a
        granule has a few columns. Later granules are written out: that takes the pieces that wait for the disk."""
        read, kept = 0, list[int]()
        written = (PIECES_AHEAD + 1) * max(PIECE_BYTES, *(part.granule_bytes for part in self.job.parts))
        for part in self.job.parts:
            for block in part.blocks:
                source = self.job.sources[part.key, block.name]
                tensor = self.job.checkpoint.find(source.of_expert(0))
                of_one = tensor.nbytes // (tensor.shape[0] if source.stacked else 1)
                in_pieces = tensor.name in self.job.checkpoint.pieces
                if source.axis == 1 or in_pieces:
                    kept.append(of_one if not in_pieces else _PIECES_TIMES * prod(tensor.shape))
                widened = block.format == FLOAT32 and tensor.dtype not in KINDS
                cols = block.cols + (2 * _WHOLE if source.axis == 1 and widened else 0)
                read = max(read, min(of_one, PIECE_BYTES), _FLOATS * block.rows * cols if block.tiled else 0)
        kept.sort(reverse=True)
        made = threads() * read + sum(kept[:_KEPT])
        return max(made, written) + sum(map(len, self.job.extras.values()))

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copy, but for some headers."""
        return self.model.total_bytes + sum(map(len, self.job.extras.values()))

    def forget(self) -> None:
        """Gives back the memory that making granules took. Called when all are made."""
        self.job.checkpoint.close()

    def end_reading(self) -> None:
        """Ends the threads and closes the checkpoint, and lets go of what was read of it. The folder of small files
        stays."""
        self._reading.close()
        for known in (self.job.extras, self.job.sources, self.job.checkpoint.tensors):
            known.clear()  # some 10 MB, beside a packed model that has to stay within its own plan

    def close(self) -> None:
        """Ends the threads, closes the checkpoint and removes the folder of small files."""
        self._opened.close()


_FLOATS = 3 * 4  # bytes for each number of a granule while it is quantised: float32, scaled, rounded
_WHOLE = 256  # columns of the widest block of a file, which is widened whole (`store.blocks.widened`)
_KEPT = 4  # matrices: two are kept while a third is read, and a fourth may be in use still
_PIECES_TIMES = 6  # bytes for each number of a matrix whose codes are taken apart and joined anew
