"""Measures this machine, once: RAM, the CPU kernels, scheduling, the disk, and how much these slow each other down.

It uses the movers and kernels that runs use, in a process of its own. The figures are kept under the cache folder.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from penstock import _native
from penstock.errors import BadRequest, BrokenModel, PenstockError, StorageFailed
from penstock.kernels import cpu
from penstock.runtime import child, host
from penstock.runtime.bind_native import Native, native
from penstock.runtime.ceilings import RAM_BYTES, ram_read_bytes_per_s
from penstock.runtime.fit import Tell
from penstock.runtime.host import Progress
from penstock.runtime.movers import new_reader
from penstock.runtime.probe_disk import UNIT_BYTES, LoadVisits, ProbeFile, disk_rates, probe_file
from penstock.runtime.probe_ops import FORMATS, KV_FORMATS, ROW_OPS, Layers, op_rates
from penstock.runtime.probe_reads import best_reads
from penstock.runtime.probe_tasks import task_rates
from penstock.spec import machine as machines
from penstock.spec.format import DEFAULT_GROUP, Format
from penstock.spec.machine import Capacity, MachineSpec, Rate, Sharing
from penstock.spec.places import CPU, DISK, HOST
from penstock.store.files import read_text, write_bytes

_WORK_BYTES = RAM_BYTES
_SHARING_S, _SHARING_READS, _SHARING_TURNS = 0.1, 9, 7  # computing alone; rounds of reads alone; turns of both
_MOST_FACTOR = 100.0


def machine_file(cache: Path) -> Path:
    """The file that keeps this machine's figures."""
    return cache / "machines" / f"{_fingerprint()}.json"


def probed_file(file: Path) -> Path:
    """The file beside a machine's `file` that keeps the probe's own figures, where a calibration changed them."""
    return file.with_suffix(".probed.json")


def load_or_probe(
    cache: Path,
    on_progress: Progress | None = None,
    *,
    disk_folder: Path | None = None,
    detailed: bool = False,
    whole: bool = False,
    kind: str = "int4",
) -> MachineSpec:
    """The machine as measured before, or measured now and kept. Its memory is always read afresh. `disk_folder`: lies
    on the disk to measure; None is `cache`. `detailed`: tells `on_progress` which figures were measured again. `whole`:
    by the whole probe, which takes about a minute, also where the quick one has measured before. `kind`: the number
    format that the quick one measures. Raises StorageFailed where measuring fails."""
    path = machine_file(cache)
    known = kept(path)
    if known is not None and not (whole and known.rough):
        return _with_memory(known)
    machine = None if whole else quick_apart(disk_folder or cache, kind)
    if machine is None:
        if on_progress:
            on_progress("measuring this machine, once (about a minute)", 0, 0)
        machine = probe_apart(disk_folder or cache, on_progress if detailed else None)
    elif on_progress:
        on_progress("measured this machine, once, in haste: `penstock probe` takes a minute and foretells better", 0, 0)
    keep(path, machine)
    probed_file(path).unlink(missing_ok=True)  # it is of the probe before this one
    return machine


def kept(path: Path) -> MachineSpec | None:
    """The machine that `keep` wrote. None where there is none. A file that is damaged, or that another version wrote,
    is removed, and the machine has to be measured again."""
    if not path.exists():
        return None
    try:
        return machines.loads(read_text(path), str(path))
    except (BadRequest, BrokenModel):
        path.unlink(missing_ok=True)
        return None


def keep(path: Path, machine: MachineSpec) -> None:
    """Writes the machine for `kept`. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, machines.dumps(machine).encode())


def probe_apart(
    disk_folder: Path,
    on_progress: Progress | None = None,
    formats: Sequence[str] = FORMATS,
    kv_formats: Sequence[str] = KV_FORMATS,
) -> MachineSpec:
    """Measures in a process of its own: memory of the probe must not count against the run that follows. Raises
    StorageFailed where that process fails."""
    done = child.run("penstock.runtime.probe", str(disk_folder), ",".join(formats), ",".join(kv_formats))
    if done.returncode:
        raise StorageFailed(f"measuring this machine failed: {child.last_words(done)}")
    if on_progress is not None:
        for line in done.stderr.splitlines():
            on_progress(line, 0, 0)  # a line about a figure that was measured again
    return machines.loads(done.stdout, "the probe's answer")


def quick_apart(disk_folder: Path, kind: str) -> MachineSpec | None:
    """Measures some figures in a process of its own, and has the rest of a machine that is alike
    (`runtime/probe_quick`). `kind`: the number format to measure, if the probe knows it. None where that process fails,
    as where no machine was measured that is alike."""
    done = child.run("penstock.runtime.probe_quick", str(disk_folder), kind if kind in FORMATS else "int4")
    return None if done.returncode else machines.loads(done.stdout, "the quick probe's answer")


def probe(
    disk_folder: Path,
    tell: Tell,
    formats: Sequence[str] = FORMATS,
    kv_formats: Sequence[str] = KV_FORMATS,
    isa: str | None = None,
) -> MachineSpec:
    """Measures now, in this process. The disk is the one that holds `disk_folder`. `tell` gets a line about each
    figure that was measured again. `isa`: the instruction set of the kernels; None: the best one. Raises
    StorageFailed."""
    threadpool_limits(1, user_api="blas")  # as a session does
    threads = host.usable_cpus()
    memory_bytes = min(_WORK_BYTES, host.available_bytes() // 4)
    kernels = native(isa, threads, exact=False)
    with probe_file(disk_folder) as file:
        reads = best_reads(file.loads_s)
        file.reader = new_reader(reads[-1].engine, reads[-1].depth, reads[-1].block_bytes)
        loads = LoadVisits(file)
        loads.visit()
        rates = op_rates(kernels, memory_bytes, tell, formats, kv_formats, loads.between)
        rates += task_rates(kernels)
        rates += disk_rates(file, disk_folder, tell)
        sharing = _sharing(file, kernels, memory_bytes, loads.between)
        loads.visit()
        rates += loads.rates(tell)
    alpha_s = min(rate.alpha_s for rate in rates if rate.op in ROW_OPS)
    rates.append(Rate(CPU, "*", "*", alpha_s, 1 / ram_read_bytes_per_s(threads)))
    source = f"probe {date.today().isoformat()}"
    return of_this_machine(tuple(rates), disk_folder, threads, source, sharing=sharing, reads=reads)


def of_this_machine(rates: tuple[Rate, ...], disk_folder: Path, threads: int, source: str, **more: Any) -> MachineSpec:
    """This machine with some rates; `more`: further fields of it."""
    machine = MachineSpec(
        name=platform.node() or "this machine",
        tiers=(Capacity(HOST, host.memory_limit_bytes()), Capacity(DISK.tier, _disk_bytes(disk_folder))),
        rates=rates,
        threads=threads,
        cpu=cpu_name(),
        source=source,
        **more,
    )
    return _with_memory(machine)


def _with_memory(machine: MachineSpec) -> MachineSpec:
    """The same machine with the RAM that a process may use here now: nine tenths of what is available."""
    usable = int(host.available_bytes() * 0.9)
    tiers = tuple(replace(t, bytes=max(1, usable)) if t.name == HOST else t for t in machine.tiers)
    return replace(machine, tiers=tiers)


def _sharing(file: ProbeFile, kernels: Native, memory_bytes: int, between: Callable[[], None]) -> tuple[Sharing, ...]:
    """How much kernels and reads slow each other down: FFNs of one row alone, reads alone, then both at once.

    The median of several turns, for RAM and disk swing: in single turns of a second the factors were anything from 1
    to 1.4."""
    layers = Layers(Format("int4", DEFAULT_GROUP), Format("float16"), kernels, memory_bytes)

    def compute_s(seconds: float) -> float:
        rounds_s: list[float] = []
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s or len(rounds_s) < 3:
            rounds_s.append(sum(timed.seconds for timed in layers.time(1, 64, ("ffn",), repeats=1)))
        return statistics.fmean(rounds_s)

    def read_s() -> float:
        return file.loads_s(file.reader, UNIT_BYTES, 8)

    try:
        turns = []
        for _ in range(_SHARING_TURNS):
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


def _disk_bytes(folder: Path) -> int:
    stat = os.statvfs(folder)
    return max(1, stat.f_bavail * stat.f_frsize)


def cpu_name() -> str:
    """The processor's model as Linux names it, or else its architecture."""
    try:
        model_name = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model_name = None
    return model_name[1].strip() if model_name else platform.machine()


def _fingerprint() -> str:
    """Names everything that the figures depend on: processor, CPUs we may use, RAM to the GiB, and the native code."""
    hardware = f"{cpu_name()}-{host.usable_cpus()}cpu-{host.physical_bytes() >> 30}g"
    built = Path(_native.__file__).stat()
    text = f"{hardware}-{cpu.best_isa()[0]}-{built.st_size:x}-{built.st_mtime_ns // 10**9:x}"
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


if __name__ == "__main__":
    try:
        folder, formats, kv_formats, *isa = sys.argv[1:]
        wanted = formats.split(","), kv_formats.split(",")
        found = probe(Path(folder), lambda text: print(text, file=sys.stderr), *wanted, isa[0] if isa else None)
        print(machines.dumps(found))
    except PenstockError as failure:
        sys.exit(failure.message)
