"""The sizes of a block that FlexGen's policy search enumerates."""

from __future__ import annotations

from penstock.units import round_up

BATCH_STEP, MOST_BATCHES = 4, 19
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, MOST_BATCHES)


def blocks(batch: int, whole: bool) -> list[tuple[int, int]]:
    """(sequences of a batch, batches of a block) to try for `batch` sequences, the largest block first. `whole`: all
    sequences go in one block; otherwise also in several blocks of one size. No block has an empty batch."""
    sizes_tried, block = set(), batch
    while True:
        for batches in _BATCHES:
            size = round_up(-(-block // batches), BATCH_STEP)
            if (batches - 1) * size < batch:
                sizes_tried.add((size, batches))
        if whole or block <= BATCH_STEP:
            return sorted(sizes_tried, key=lambda sizes: (-sizes[0] * sizes[1], sizes))
        block = -(-block // 2)
