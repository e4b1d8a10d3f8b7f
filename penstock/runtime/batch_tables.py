"""What native kernels read of a batch beside its activations: positions, rotations, and which rows want logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.graph.batch import Batch
from penstock.kernels import rope

Float32 = NDArray[np.float32]
Frequencies = tuple[Float32, float] | None  # of a layer: inverse frequencies and a factor; None: no rotation


class BatchTables:
    """Arrays at fixed addresses; `move` gives them the positions of another batch of the same shape."""

    def __init__(self, batch: Batch, frequencies: Sequence[Frequencies], pages_per_seq: int) -> None:
        first, t = batch.first_seq, batch.total_rows
        # int32 [sequences, 3]: first page, counted from the first sequence's, start, rows.
        self._sequences = np.array(
            [((s - first) * pages_per_seq, 0, rows) for s, rows in zip(batch.seqs, batch.rows, strict=True)], np.int32
        )
        self._chosen = np.array(batch.logits, np.int32)
        # Layers whose frequencies are the same array share cos and sin, float32 [T, dims / 2].
        self._frequencies: dict[int, tuple[Float32, float]] = {}
        self._turns: dict[int, tuple[Float32, Float32]] = {}
        self._turn_of: list[int | None] = []
        for found in frequencies:
            self._turn_of.append(None if found is None else id(found[0]))
            if found is not None and id(found[0]) not in self._turns:
                shape = (t, len(found[0]))
                self._frequencies[id(found[0])] = found
                self._turns[id(found[0])] = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self.move(batch)

    def move(self, batch: Batch) -> None:
        self._sequences[:, 1] = batch.start
        where = positions(batch)
        for key, frequencies in self._frequencies.items():
            cos, sin = self._turns[key]
            cos[...], sin[...] = rope.tables(*frequencies, where)

    @property
    def sequences_address(self) -> int:
        return int(self._sequences.ctypes.data)

    @property
    def chosen_address(self) -> int:
        """int32 [n]: the rows whose logits are wanted."""
        return int(self._chosen.ctypes.data)

    def turn_addresses(self, layer: int) -> tuple[int, int]:
        """The addresses of a layer's cosines and sines; 0 where the layer does not rotate."""
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
