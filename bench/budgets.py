"""Memory budgets of benches for another shape than their own: they shrink or grow with its weights."""

from __future__ import annotations

from pathlib import Path

from bench.cgroup import whole_pages
from penstock.spec.format import parse_format
from penstock.spec.parts import parts
from penstock.store.packed import read_config

PROCESS_BYTES = 100_000_000  # of a budget, what a process has beside its model: it is the same for all


def weights_bytes(config: Path, weights: str) -> int:
    """Of the shape of a config.json in a format."""
    return sum(part.granules * part.granule_bytes for part in parts(read_config(config)[1], parse_format(weights)))


def budget_bytes(gb: float, config: Path, own: Path, weights: str) -> int:
    """What `gb` (10^9 bytes) are for `own`, the bench's own shape, for the shape of `config`."""
    scale = 1.0 if config == own else weights_bytes(config, weights) / weights_bytes(own, weights)
    return whole_pages(round(PROCESS_BYTES + (gb * 1e9 - PROCESS_BYTES) * scale))
