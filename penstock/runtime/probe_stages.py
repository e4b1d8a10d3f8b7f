"""Measures this machine, part by part: RAM, the CPU kernels, scheduling, the disk, and how much these slow each other
down. It uses the movers and kernels that runs use.

`python -m penstock.runtime.probe_stages FOLDER FORMATS KV_FORMATS SECONDS [ISA]` prints a line of JSON as a part begins
and as it ends (`probe_apart` reads them). Standard input has the parts that need not be measured, as JSON.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from threadpoolctl import threadpool_limits

from penstock.errors import PenstockError
from penstock.runtime import host
from penstock.runtime.bind_native import Native, native
from penstock.runtime.ceilings import RAM_BYTES, ram_readings
from penstock.runtime.fit import Tell
from penstock.runtime.movers import new_reader
from penstock.runtime.probe_disk import UNIT_BYTES, LoadVisits, ProbeFile, disk_rates, probe_file
from penstock.runtime.probe_ops import FORMATS, KV_FORMATS, Layers, kv_rates, product_rates
from penstock.runtime.probe_parts import (
    LOADS,
    RAM,
    READS,
    SHARED,
    SMALL,
    TASKS,
    ProbeFindings,
    attention,
    parts,
    products,
)
from penstock.runtime.probe_reads import best_reads
from penstock.runtime.probe_tasks import task_rates
from penstock.spec.codec import from_json, to_json
from penstock.spec.format import DEFAULT_GROUP, Format
from penstock.spec.machine import Rate, Reads, Sharing
from penstock.spec.places import CPU, DISK

_SHARING_S, _SHARING_READS, _SHARING_TURNS = 0.1, 9, 7  # computing alone; rounds of reads alone; turns of both
_LEAST_VISITS = 4  # to the disk
_MOST_FACTOR = 100.0

Heard = Callable[[dict[str, Any]], None]  # gets what is printed as a line of JSON


@dataclass(frozen=True)
class WantedFigures:
    """What to measure. `seconds`: in about so many. `known`: parts that are known already, and `reads`, where they have
    found how the disk is best read. `isa`: the instruction set of the kernels; None: the best one."""

    folder: Path
    formats: Sequence[str] = FORMATS
    kv_formats: Sequence[str] = KV_FORMATS
    seconds: float = 60.0
    known: Collection[str] = ()
    reads: tuple[Reads, ...] = ()
    isa: str | None = None


def measure(wanted: WantedFigures, hear: Heard) -> None:
    """Measures now, in this process, and tells of each part as it begins and ends. Each part has its share of the time
    that is left; then it stops repeating. Raises StorageFailed."""
    threadpool_limits(1, user_api="blas")  # as a session does
    end_s = time.perf_counter() + wanted.seconds
    left = [part for part in parts(wanted.formats, wanted.kv_formats) if part.name not in wanted.known]
    with probe_file(wanted.folder) as file:
        probe = _Probe(wanted, file, lambda text: hear({"told": text}))
        while left:
            part = left.pop(0)
            hear({"begins": part.name})
            now_s = time.perf_counter()
            share = part.weight_s / (part.weight_s + sum(each.weight_s for each in left))
            findings = probe.take(part.name, now_s + max(0.0, end_s - now_s) * share)
            hear({"ends": part.name, "found": to_json(findings)})


class _Probe:
    def __init__(self, wanted: WantedFigures, file: ProbeFile, tell: Tell) -> None:
        self._wanted, self._file, self._tell = wanted, file, tell
        self._threads = host.usable_cpus()
        self._memory_bytes = min(RAM_BYTES, host.available_bytes() // 4)
        self._kernels: Native = native(wanted.isa, self._threads, exact=False)
        self._loads = LoadVisits(file)
        self._ram_bytes_per_s: list[float] = []  # while products of few rows were measured
        self._read_by(wanted.reads)
        formats, kv_formats = wanted.formats, wanted.kv_formats
        self._take: dict[str, Callable[[float], ProbeFindings]] = {
            READS: self._reads,
            **{products(kind): self._products(kind, every_op=kind == formats[0]) for kind in formats},
            **{attention(kv): self._attention(kv) for kv in kv_formats},
            TASKS: lambda _: ProbeFindings(tuple(task_rates(self._kernels))),
            SMALL: lambda until_s: ProbeFindings(tuple(disk_rates(file, wanted.folder, tell, until_s))),
            SHARED: lambda until_s: ProbeFindings(
                sharing=_sharing(file, self._kernels, self._memory_bytes, self._loads.between, until_s)
            ),
            LOADS: self._load_rates,
            RAM: self._ram,
        }

    def take(self, name: str, until_s: float) -> ProbeFindings:
        return self._take[name](until_s)

    def _read_by(self, reads: tuple[Reads, ...]) -> None:
        for each in reads:
            if not each.most_bytes:
                self._file.reader = new_reader(each.engine, each.depth, each.block_bytes)

    def _reads(self, until_s: float) -> ProbeFindings:
        best = best_reads(self._file.loads_s, until_s)
        self._read_by(best)
        return ProbeFindings(reads=best)

    def _products(self, kind: str, every_op: bool) -> Callable[[float], ProbeFindings]:
        def take(until_s: float) -> ProbeFindings:
            how = self._kernels, self._memory_bytes, self._tell, self._loads.between, until_s, every_op
            rates, ram_bytes_per_s = product_rates(kind, *how)
            self._ram_bytes_per_s += ram_bytes_per_s
            return ProbeFindings(tuple(rates))

        return take

    def _attention(self, kv: str) -> Callable[[float], ProbeFindings]:
        def take(until_s: float) -> ProbeFindings:
            rates = kv_rates(kv, self._kernels, self._memory_bytes, self._tell, until_s)
            self._loads.between()
            return ProbeFindings(tuple(rates))

        return take

    def _load_rates(self, until_s: float) -> ProbeFindings:
        self._loads.visit()
        while self._loads.visits < _LEAST_VISITS and time.perf_counter() < until_s:
            self._loads.visit()
        return ProbeFindings(tuple(self._loads.rates(self._tell, until_s)))

    def _ram(self, _: float) -> ProbeFindings:
        # Spells in which a shared RAM is half as fast again last half a second, and now and then a second. So the
        # speeds that it had beside the products count as well: in nine readings alone it once gave 56 GB/s, where
        # products had just read at 36 and runs then read at 33 (docs/LOG.md).
        usual = statistics.median([*self._ram_bytes_per_s, *ram_readings(self._threads, rounds=9, pause_s=0.1)])
        return ProbeFindings((Rate(CPU, "*", "*", 0.0, 1 / usual),))


def _sharing(
    file: ProbeFile, kernels: Native, memory_bytes: int, between: Callable[[], None], until_s: float
) -> tuple[Sharing, ...]:
    """How much kernels and reads slow each other down: FFNs of one row alone, reads alone, then both at once.

    The median of several turns, for RAM and disk swing: in single turns of a second the factors were anything from 1
    to 1.4."""
    layers = Layers(Format("int4", DEFAULT_GROUP), Format("float16"), kernels, memory_bytes)

    def compute_s(seconds: float) -> float:
        rounds_s: list[float] = []
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s or len(rounds_s) < 3:
            # By the clock: what the reads take away is what is to be measured.
            timed = layers.time(1, 64, ("ffn",), repeats=1, by_clock=True)
            rounds_s.append(sum(each.seconds for each in timed))
        return statistics.fmean(rounds_s)

    def read_s() -> float:
        return file.loads_s(file.reader, UNIT_BYTES, 8)

    try:
        turns = []
        for turn in range(_SHARING_TURNS):
            if turn and time.perf_counter() > until_s:
                break
            turns.append(_turn(compute_s, read_s))
            between()
    finally:
        layers.close()
    host_factor, disk_factor = (statistics.median(factors) for factors in zip(*turns, strict=True))
    return (
        Sharing(CPU, DISK.reads, min(_MOST_FACTOR, max(1.0, host_factor))),
        Sharing(DISK.reads, CPU, min(_MOST_FACTOR, max(1.0, disk_factor))),
    )


def _turn(compute_s: Callable[[float], float], read_s: Callable[[], float]) -> tuple[float, float]:
    """(computing beside reads ÷ computing alone, reads beside computing ÷ reads alone), both in seconds."""
    stop, reads = threading.Event(), list[float]()

    def read_on() -> None:
        while not stop.is_set():
            reads.append(read_s())

    alone_s = compute_s(_SHARING_S)
    reads_alone_s = statistics.fmean(read_s() for _ in range(_SHARING_READS))
    thread = threading.Thread(target=read_on)
    thread.start()
    try:
        both_s = compute_s(2 * _SHARING_S)
    finally:
        stop.set()
        thread.join()
    return both_s / alone_s, statistics.fmean(reads) / reads_alone_s


def _main(args: Sequence[str]) -> None:
    def hear(said: dict[str, Any]) -> None:
        print(json.dumps(said), flush=True)

    def stop(*_: object) -> NoReturn:
        sys.exit(143)  # through every `finally`: files of the probe go

    signal.signal(signal.SIGTERM, stop)
    folder, formats, kv_formats, seconds, *isa = args
    before = json.loads(sys.stdin.read() or "{}")
    known = {name: from_json(ProbeFindings, findings) for name, findings in before.items()}
    reads = known[READS].reads if READS in known else ()
    how = float(seconds), known.keys(), reads, isa[0] if isa else None
    try:
        measure(WantedFigures(Path(folder), formats.split(","), kv_formats.split(","), *how), hear)
    except PenstockError as failure:
        hear({"failed": failure.message})


if __name__ == "__main__":
    _main(sys.argv[1:])
