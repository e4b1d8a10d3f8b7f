"""Figures that were not measured here, from those of a machine with the same instruction set that was measured whole
(`machines/profiles`): scaled by what was measured here.

All kernels follow the FFN's. Kernels that are bound by bytes follow an FFN of one row, those bound by arithmetic one of
some rows. Reads and writes follow the disk's loads, and small reads each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import penstock
from penstock.graph.ops import PRODUCTS
from penstock.runtime.probe_ops import ROW_OPS
from penstock.spec import machine as machines
from penstock.spec.machine import MachineSpec, Rate
from penstock.spec.places import is_disk
from penstock.store.files import read_text

_PROFILES = Path(penstock.__file__).parent / "machines" / "profiles"
_NEAREST = "avx2"  # stands for instruction sets of which no machine was measured yet: those of ARM, and portable code
_LIKE = {"amx": "avx512"}  # its kernels, in all but many rows of int4


@dataclass(frozen=True)
class Ratios:
    """How many times as long this machine takes as the one of the profile. `few`, `some`: for an FFN of one row, and of
    some. `disk`: for loads. `small`: for a small read."""

    few: float
    some: float
    disk: float
    small: float


def profile(isa: str) -> MachineSpec:
    """The machine that was measured whole with these instructions, or the nearest one."""
    file = _PROFILES / f"{_LIKE.get(isa, isa)}.json"
    if not file.exists():
        file = _PROFILES / f"{_NEAREST}.json"
    return machines.loads(read_text(file), str(file))


def seconds(rate: Rate, nbytes: int, flops: int = 0) -> float:
    """Of a task of so many bytes and flops at this rate."""
    return rate.alpha_s + max(nbytes * rate.s_per_byte, flops * rate.s_per_flop)


def scaled(rates: Sequence[Rate], ratios: Ratios) -> tuple[Rate, ...]:
    """The rates of the profile's machine as they are expected here."""
    return tuple(_scaled(rate, ratios) for rate in rates)


def _scaled(rate: Rate, ratios: Ratios) -> Rate:
    """What Python does between kernels stays."""
    if is_disk(rate.lane):
        begin = {"fetch": ratios.small, "kv_load": ratios.small, "task": 1.0}.get(rate.op, ratios.disk)
        return _times(rate, begin, ratios.disk, 1.0)
    begin = ratios.few if rate.op in PRODUCTS else 1.0
    by_bytes = ratios.some if rate.op in ROW_OPS else ratios.few  # rows lie in a cache
    return _times(rate, begin, by_bytes, ratios.some)


def _times(rate: Rate, alpha: float, by_bytes: float, by_flops: float) -> Rate:
    return replace(
        rate,
        alpha_s=rate.alpha_s * alpha,
        s_per_byte=rate.s_per_byte * by_bytes,
        s_per_flop=rate.s_per_flop * by_flops,
    )
