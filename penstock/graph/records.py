"""Says which bytes of a granule are records of neurons, for FFNs that lie neuron by neuron. If a unit's records are
read only when they are asked for (`Unit.asked`), all other bytes of it stay in RAM.

    a granule on disk    | gate (or up) in tiles | 64 records | biases |
    stays in RAM         | pages that hold other bytes than records, one after the other |
    read when asked for  |                       | pages that hold records        |

Both are whole pages of a granule. So a page with the end of one and the beginning of the other counts to both. Some
records also have the weights that are activated (`by_records`). Then a granule begins with its records, and only biases
stay.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from penstock.spec.parts import PAGE_BYTES, Part
from penstock.units import round_up

Run = tuple[int, int]  # bytes lo..hi of a part


class Records(NamedTuple):
    """Where the records of a part lie in each of its granules: bytes lo..hi, `stride` for each neuron. `ends`: nothing
    lies behind them."""

    lo: int
    hi: int
    stride: int
    granule_bytes: int
    ends: bool

    @classmethod
    def of(cls, part: Part) -> Records:
        rows = [block for block in part.blocks if block.stride]
        lo, stride = rows[0].offset, rows[0].stride
        return cls(lo, lo + rows[0].rows * stride, stride, part.granule_bytes, part.blocks[-1].stride > 0)

    @property
    def head(self) -> int:
        """The granule's first bytes, which stay in RAM."""
        return round_up(self.lo, PAGE_BYTES)

    @property
    def tail(self) -> int:
        """Where its last bytes begin, which stay in RAM behind the first ones."""
        return self.granule_bytes if self.ends else max(self.head, self.hi // PAGE_BYTES * PAGE_BYTES)

    @property
    def kept_bytes(self) -> int:
        """Bytes of a granule that stay in RAM."""
        return self.head + self.granule_bytes - self.tail

    @property
    def first(self) -> int:
        """Where the pages with records begin."""
        return self.lo // PAGE_BYTES * PAGE_BYTES

    @property
    def page_bytes(self) -> int:
        """Bytes of a granule's pages with records."""
        return round_up(self.hi, PAGE_BYTES) - self.first

    def runs(self, neurons: Sequence[int], granule_rows: int, hole_bytes: int) -> tuple[Run, ...]:
        """The pages with the records of some neurons, in rising order, as runs that lie in one granule each. Holes of
        at most `hole_bytes` are filled."""
        if not neurons:
            return ()
        # A power of two of granules, so that the last neuron seldom decides which tables are taken.
        firsts, ends = _pages_of(self, granule_rows, 1 << (neurons[-1] // granule_rows).bit_length())
        runs: list[Run] = []
        begin, end, granule_end = 0, 0, 0
        # The disk waits for this loop in each layer, and has no other work meanwhile.
        pages = zip(neurons, map(firsts.__getitem__, neurons), map(ends.__getitem__, neurons), strict=True)
        for neuron, lo, hi in pages:
            if lo - end > hole_bytes or lo >= granule_end:
                if granule_end:
                    runs.append((begin, end))
                begin, granule_end = lo, (neuron // granule_rows + 1) * self.granule_bytes
            end = hi
        runs.append((begin, end))
        return tuple(runs)

    def places(self, runs: Sequence[Run], lo: int, address: int) -> list[tuple[int, int, int]]:
        """Each run, and its address where the pages with records of granules from `lo` on lie one after the other from
        `address` on."""
        every, others = self.granule_bytes, self.granule_bytes - self.page_bytes
        base = address - self.first - lo * self.page_bytes
        return [(begin, end, base + begin - begin // every * others) for begin, end in runs]


@lru_cache(maxsize=32)  # of one part there are nine for 16,384 neurons
def _pages_of(records: Records, granule_rows: int, granules: int) -> tuple[array[int], array[int]]:
    """Of each neuron of so many granules: where its record's first page begins, and where its last one ends. 16 bytes a
    neuron, which the units of all layers share."""
    starts = [
        granule * records.granule_bytes + records.lo + i * records.stride
        for granule in range(granules)
        for i in range(granule_rows)
    ]
    firsts = array("q", (start // PAGE_BYTES * PAGE_BYTES for start in starts))
    return firsts, array("q", (round_up(start + records.stride, PAGE_BYTES) for start in starts))


def may_be_asked(part: Part, sparsity: str) -> bool:
    """Whether units of this part may be asked for (`sparsity`: a plan's). By activations: a record is what a neuron's
    activation is multiplied with, and no bias belongs to it. By predictors: a record has all of a neuron's weights."""
    if sparsity == "predict":
        return part.by_records
    alone = part.by_neurons and not part.by_records
    return sparsity == "exact" and alone and not (part.has("gate") and part.has("up_bias"))
