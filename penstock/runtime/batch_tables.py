"""Tables that native kernels read of a batch beside its activations: positions, rotations, rows that want logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.graph.batch import Batch
from penstock.kernels import rope

Float32 = NDArray[np.float32]
# A layer's inverse frequencies, float32 [dims / 2], and the factor of its cosines and sines. None: no rotation.
Frequencies = tuple[Float32, float] | None


class BatchTables:
    """Tables of a batch, at fixed addresses, so that a recorded program can point at them. `move` fills them with the
    rows, positions and pages of a pass.

    `rows`, `logits`, `sequences`: the most of each. `most_pages`: that a sequence may have."""

    def __init__(
        self, rows: int, logits: int, sequences: int, most_pages: int, frequencies: Sequence[Frequencies]
    ) -> None:
        self._counts = np.zeros(3, np.int32)  # rows, rows with logits, sequences
        # int32 [sequences, most_pages], and int32 [sequences, 3]: the first entry there, start, rows.
        self._pages = np.zeros((sequences, most_pages), np.int32)
        self._sequences = np.array([(i * most_pages, 0, 0) for i in range(sequences)], np.int32)
        self._chosen = np.empty(logits, np.int32)  # the rows whose logits are wanted
        # The addresses of these tables. `pages_address`: of each sequence's pages, in the order of its positions.
        self.counts_address, self.sequences_address = _address(self._counts), _address(self._sequences)
        self.pages_address, self.chosen_address = _address(self._pages), _address(self._chosen)
        self._filled: tuple[int, ...] = ()  # sequences whose consecutive pages the table holds
        # Layers whose frequencies are the same array share cos and sin, float32 [rows, dims / 2].
        self._frequencies: dict[int, tuple[Float32, float]] = {}
        self._turns: dict[int, tuple[Float32, Float32]] = {}
        self._turn_of: list[int | None] = []
        for rotation in frequencies:
            self._turn_of.append(None if rotation is None else id(rotation[0]))
            if rotation is not None and id(rotation[0]) not in self._turns:
                shape = (rows, len(rotation[0]))
                self._frequencies[id(rotation[0])] = rotation
                self._turns[id(rotation[0])] = np.empty(shape, np.float32), np.empty(shape, np.float32)

    def move(self, batch: Batch, pages: Sequence[Sequence[int]]) -> None:
        """Fills the tables with all that is data of a batch. `pages[i]`: those of its sequence i, as many as it has
        now."""
        rows, logits, n = batch.total_rows, len(batch.logits), len(batch.seqs)
        self._counts[:] = rows, logits, n
        self._sequences[:n, 1], self._sequences[:n, 2], self._chosen[:logits] = batch.start, batch.rows, batch.logits
        if batch.pages or batch.seqs != self._filled:
            for row, ids in zip(self._pages, pages, strict=False):
                row[: len(ids)] = ids
            self._filled = () if batch.pages else batch.seqs
        row_positions = positions(batch)
        for key, frequencies in self._frequencies.items():
            cos, sin = self._turns[key]
            cos[:rows], sin[:rows] = rope.tables(*frequencies, row_positions)

    def turn_addresses(self, layer: int) -> tuple[int, int]:
        """The addresses of a layer's cosines and sines, float32 [T, dims / 2] each; 0 where the layer does not
        rotate."""
        key = self._turn_of[layer]
        if key is None:
            return 0, 0
        cos, sin = self._turns[key]
        return _address(cos), _address(sin)


def positions(batch: Batch) -> NDArray[np.int64]:
    """Position of every row, int64 [T]."""
    if len(batch.rows) == 1:
        return np.arange(batch.start[0], batch.start[0] + batch.rows[0])
    return np.concatenate([np.arange(s, s + n) for s, n in zip(batch.start, batch.rows, strict=True)])


def _address(table: NDArray[Any]) -> int:
    return int(table.ctypes.data)
