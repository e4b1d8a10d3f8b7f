"""Tables that native kernels read of a batch beside its activations: positions, rotations, rows that want logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.graph.batch import Batch
from penstock.kernels import rope

Float32 = NDArray[np.float32]
# A layer's inverse frequencies, float32 [dims / 2], and the factor of its cosines and sines. None: no rotation.
Frequencies = tuple[Float32, float] | None


class BatchTables:
    """Tables of a batch, at fixed addresses, so that a recorded program can point at them. `move` fills them with the
    positions, pages and rows of another batch of the same shape.

    `pages[i]`: the pages of the batch's sequence i, as many as it has now. `most_pages`: that a sequence may have."""

    def __init__(
        self, batch: Batch, frequencies: Sequence[Frequencies], pages: Sequence[Sequence[int]], most_pages: int
    ) -> None:
        t = batch.total_rows
        # int32 [sequences, most_pages], and int32 [sequences, 3]: the first entry there, start, rows.
        self._pages = np.zeros((len(batch.seqs), most_pages), np.int32)
        self._sequences = np.array([(i * most_pages, 0, rows) for i, rows in enumerate(batch.rows)], np.int32)
        for row, found in zip(self._pages, pages, strict=True):
            row[: len(found)] = found
        self._chosen = np.array(batch.logits, np.int32)
        # Layers whose frequencies are the same array share cos and sin, float32 [T, dims / 2].
        self._frequencies: dict[int, tuple[Float32, float]] = {}
        self._turns: dict[int, tuple[Float32, Float32]] = {}
        self._turn_of: list[int | None] = []
        for rotation in frequencies:
            self._turn_of.append(None if rotation is None else id(rotation[0]))
            if rotation is not None and id(rotation[0]) not in self._turns:
                shape = (t, len(rotation[0]))
                self._frequencies[id(rotation[0])] = rotation
                self._turns[id(rotation[0])] = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self.move(batch)

    def move(self, batch: Batch) -> None:
        """Fills the tables with what is data of this batch, which has the shape of the first one."""
        self._sequences[:, 1], self._sequences[:, 2], self._chosen[:] = batch.start, batch.rows, batch.logits
        for row, found in zip(self._pages, batch.pages, strict=False):  # where there are none, they are as before
            row[: len(found)] = found
        row_positions = positions(batch)
        for key, frequencies in self._frequencies.items():
            cos, sin = self._turns[key]
            cos[...], sin[...] = rope.tables(*frequencies, row_positions)

    @property
    def sequences_address(self) -> int:
        """The address of int32 [sequences, 3]: first entry in the pages, start, rows of each sequence."""
        return int(self._sequences.ctypes.data)

    @property
    def pages_address(self) -> int:
        """The address of int32 [sequences, most_pages]: the pages of each sequence, in the order of its positions."""
        return int(self._pages.ctypes.data)

    @property
    def chosen_address(self) -> int:
        """The address of int32 [n]: the rows whose logits are wanted."""
        return int(self._chosen.ctypes.data)

    def turn_addresses(self, layer: int) -> tuple[int, int]:
        """The addresses of a layer's cosines and sines, float32 [T, dims / 2] each; 0 where the layer does not
        rotate."""
        key = self._turn_of[layer]
        if key is None:
            return 0, 0
        cos, sin = self._turns[key]
        return int(cos.ctypes.data), int(sin.ctypes.data)


def positions(batch: Batch) -> NDArray[np.int64]:
    """Position of every row, int64 [T]."""
    if len(batch.rows) == 1:
        return np.arange(batch.start[0], batch.start[0] + batch.rows[0])
    return np.concatenate([np.arange(s, s + n) for s, n in zip(batch.start, batch.rows, strict=True)])
