"""Measures this machine in some two seconds: what differs most between machines is measured, and the rest is scaled
from the figures of a machine with the same instruction set that was measured whole (`machines/profiles`).

Measured are: an FFN of one row and of a few in the format in use, loads from the disk, single small reads, and many
small reads in flight together. All other kernels follow the FFN's: what waits for bytes follows that of one row, what
waits for arithmetic that of a few. Other reads and writes follow the disk's. The speed of reading RAM
(`runtime/ceilings`) is not measured: beside busy processors it came out at a third of that on free ones, where an FFN
of one row kept 0.7 to 1.0 of its own.

`python -m penstock.runtime.probe_quick FOLDER FORMAT` prints the machine as JSON.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

from threadpoolctl import threadpool_limits

import penstock
from penstock.errors import PenstockError
from penstock.kernels import cpu
from penstock.runtime import host
from penstock.runtime.bind_native import native
from penstock.runtime.probe import of_this_machine
from penstock.runtime.probe_disk import UNIT_BYTES, probe_file
from penstock.runtime.probe_ops import PRODUCTS, ROW_OPS, Layers
from penstock.spec import machine as machines
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import PICKS_IN_FLIGHT, MachineSpec, Rate
from penstock.spec.places import CPU, DISK, is_disk
from penstock.store.files import read_text
from penstock.units import KIB, MIB

_MEMORY_BYTES = 192 * MIB  # of weights: two layers in int4, which no cache holds
_SOME_ROWS = 16
# Each measurement ends after so many seconds, whatever else this machine does.
_PRODUCT_S, _DISK_S, _SMALL_READS_S, _PICKS_S = 0.3, 0.4, 0.1, 0.1
_FILE_BYTES = 48 * MIB  # of a file that is written where no model lies on the disk yet
_SMALL_READ, _LOADS = 64 * KIB, 4
_PICKS = (8 * KIB, 64 * KIB)  # sizes of runs of neurons' records
_PROFILES = Path(penstock.__file__).parent / "machines" / "profiles"
_NEAREST = "avx2"  # stands for instruction sets of which no machine was measured yet: those of ARM, and portable code


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
    file = _PROFILES / f"{isa}.json"
    if not file.exists():
        file = _PROFILES / f"{_NEAREST}.json"
    return machines.loads(read_text(file), str(file))


def quick_probe(folder: Path, kind: str) -> MachineSpec:
    """Measures now, in this process. The disk is the one that holds `folder`; `kind`: the number format that is in use.
    Raises StorageFailed."""
    threadpool_limits(1, user_api="blas")
    threads = host.usable_cpus()
    isa, _ = cpu.best_isa()
    like, kernels = profile(isa), native(isa, threads, exact=False)
    layers = Layers(parse_format(kind), Format("float16"), kernels, min(_MEMORY_BYTES, host.available_bytes() // 4))
    try:
        few, some = (_ffn_ratio(layers, rows, like, kind) for rows in (1, _SOME_ROWS))
    finally:
        layers.close()
    with probe_file(folder, _FILE_BYTES) as file:
        load_s = _repeated_s(lambda: file.loads_s(file.reader, UNIT_BYTES, _LOADS), _DISK_S)
        small_s = _repeated_s(lambda: file.read_anywhere_s(_SMALL_READ), _SMALL_READS_S)
        picks_s = [_repeated_s(partial(file.picks_s, nbytes), _PICKS_S) for nbytes in _PICKS]
    ratios = Ratios(
        few,
        some,
        load_s / _seconds(like.rate(DISK.reads, "load", "*"), UNIT_BYTES),
        small_s / _seconds(like.rate(DISK.reads, "fetch", "*"), _SMALL_READ),
    )
    return of_this_machine(
        (*scaled(like.rates, ratios), _pick_rate(*picks_s)),
        folder,
        threads,
        source=f"quick probe {date.today().isoformat()}, the rest scaled from {like.name}",
        sharing=like.sharing,
        rough=True,
    )


def _pick_rate(short_s: float, long_s: float) -> Rate:
    """The line through the times of rounds of reads of _PICKS, as the whole probe fits it (`probe_disk`). No profile
    has it: how many reads of this size a disk does differs by a factor of ten."""
    short, long = (PICKS_IN_FLIGHT * nbytes for nbytes in _PICKS)
    slope = max(0.0, (long_s - short_s) / (long - short))
    return Rate(DISK.reads, "pick", "*", max(0.0, short_s - slope * short), slope)


def _ffn_ratio(layers: Layers, rows: int, like: MachineSpec, kind: str) -> float:
    """How many times as long as on the machine `like` FFNs of so many rows take here: the median over calls."""
    rate, until_s, ratios = like.rate(CPU, "ffn", kind, rows), time.perf_counter() + _PRODUCT_S, list[float]()
    while not ratios or time.perf_counter() < until_s:
        for timed in layers.time(rows, 0, ("ffn",), repeats=1):
            ratios.append(timed.seconds / _seconds(rate, timed.bytes, timed.flops))
    return statistics.median(ratios)


def _repeated_s(measure: Callable[[], float], seconds: float) -> float:
    """The mean of a measurement that is repeated for so long: a pass waits for slow reads too."""
    until_s, found = time.perf_counter() + seconds, list[float]()
    while not found or time.perf_counter() < until_s:
        found.append(measure())
    return statistics.fmean(found)


def _seconds(rate: Rate, nbytes: int, flops: int = 0) -> float:
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


if __name__ == "__main__":
    try:
        print(machines.dumps(quick_probe(Path(sys.argv[1]), sys.argv[2])))
    except PenstockError as failure:
        sys.exit(failure.message)
