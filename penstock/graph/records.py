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

from collections.abc import Sequence
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
        runs: list[Run] = []
        open_granule, begin, end = -1, 0, 0
        for neuron in neurons:
            granule, i = divmod(neuron, granule_rows)
            base = granule * self.granule_bytes
            lo = (base + self.lo + i * self.stride) // PAGE_BYTES * PAGE_BYTES
            hi = round_up(base + self.lo + (i + 1) * self.stride, PAGE_BYTES)
            if granule == open_granule and lo - end <= hole_bytes:
                end = hi
                continue
            if end:
                runs.append((begin, end))
            open_granule, begin, end = granule, lo, hi
        if end:
            runs.append((begin, end))
        return tuple(runs)

    def place(self, run: Run, lo: int) -> int:
        """Where a run lies among the pages with records of granules from `lo` on, one after the other."""
        granule, inside = divmod(run[0], self.granule_bytes)
        return (granule - lo) * self.page_bytes + inside - self.first


def may_be_asked(part: Part, sparsity: str) -> bool:
    """Whether units of this part may be asked for (`sparsity`: a plan's). By activations: a record is what a neuron's
    activation is multiplied with, and no bias belongs to it. By predictors: a record has all of a neuron's weights."""
    if sparsity == "predict":
        return part.by_records
    alone = part.by_neurons and not part.by_records
    return sparsity == "exact" and alone and not (part.has("gate") and part.has("up_bias"))
