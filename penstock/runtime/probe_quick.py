"""Measures this machine in some two seconds: what differs most between machines is measured, and the rest is scaled
from the figures of a machine like it (`runtime/probe_scaled`).

Measured are: an FFN of one row and of a few in the format in use, loads from the disk, single small reads, and many
small reads in flight together. Products are measured as free cores take them (`runtime/own_time`), the disk by the
clock. The speed of reading RAM (`runtime/ceilings`) is not measured: beside busy processors it came out at a third of
that on free ones, where an FFN of one row kept 0.7 to 1.0 of its own.

`python -m penstock.runtime.probe_quick FOLDER FORMAT` prints the machine as JSON.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

from threadpoolctl import threadpool_limits

from penstock.errors import PenstockError
from penstock.kernels import cpu
from penstock.runtime import host
from penstock.runtime.bind_native import native
from penstock.runtime.probe_disk import UNIT_BYTES, probe_file
from penstock.runtime.probe_ops import Layers
from penstock.runtime.probe_scaled import Ratios, profile, scaled, seconds
from penstock.runtime.this_machine import of_this_machine
from penstock.spec import machine as machines
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import PICKS_IN_FLIGHT, MachineSpec, Rate
from penstock.spec.places import CPU, DISK
from penstock.units import KIB, MIB

_MEMORY_BYTES = 192 * MIB  # of weights: two layers in int4, which no cache holds
_SOME_ROWS = 16
# Each measurement ends after so many seconds, whatever else this machine does.
_PRODUCT_S, _DISK_S, _SMALL_READS_S, _PICKS_S = 0.3, 0.4, 0.1, 0.1
_FILE_BYTES = 48 * MIB  # of a file that is written where no model lies on the disk yet
_SMALL_READ, _LOADS = 64 * KIB, 4
_PICKS = (8 * KIB, 64 * KIB)  # sizes of runs of neurons' records


def quick_probe(folder: Path, kind: str, isa: str | None = None) -> MachineSpec:
    """Measures now, in this process. The disk is the one that holds `folder`; `kind`: the number format that is in use;
    `isa`: the family of kernels, None for the best one. Raises StorageFailed."""
    threadpool_limits(1, user_api="blas")
    threads = host.usable_cpus()
    isa = isa or cpu.best_isa()[0]
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
        load_s / seconds(like.rate(DISK.reads, "load", "*"), UNIT_BYTES),
        small_s / seconds(like.rate(DISK.reads, "fetch", "*"), _SMALL_READ),
    )
    return of_this_machine(
        (*scaled(like.rates, ratios), _pick_rate(*picks_s)),
        folder,
        threads,
        source=f"quick probe {date.today().isoformat()}, the rest scaled from {like.name}",
        sharing=like.sharing,
        rough=True,
        crowded=layers.disturbed / layers.timed,
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
            ratios.append(timed.seconds / seconds(rate, timed.bytes, timed.flops))
    return statistics.median(ratios)


def _repeated_s(measure: Callable[[], float], for_s: float) -> float:
    """The mean of a measurement that is repeated for so long: a pass waits for slow reads too."""
    until_s, times_s = time.perf_counter() + for_s, list[float]()
    while not times_s or time.perf_counter() < until_s:
        times_s.append(measure())
    return statistics.fmean(times_s)


if __name__ == "__main__":
    try:
        print(machines.dumps(quick_probe(Path(sys.argv[1]), *sys.argv[2:])))
    except PenstockError as failure:
        sys.exit(failure.message)
