"""What this machine is, before anything is measured: its name, processor, memory, and the name of the file that keeps
its figures."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock import _native
from penstock.kernels import cpu
from penstock.runtime import host
from penstock.spec.machine import Capacity, MachineSpec, Rate
from penstock.spec.places import DISK, HOST


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
    return with_memory(machine)


def with_memory(machine: MachineSpec) -> MachineSpec:
    """The same machine with the RAM that a process may use here now: nine tenths of what is available."""
    usable = int(host.available_bytes() * 0.9)
    tiers = tuple(replace(t, bytes=max(1, usable)) if t.name == HOST else t for t in machine.tiers)
    return replace(machine, tiers=tiers)


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


def fingerprint(isa: str | None = None) -> str:
    """Names everything that the figures depend on: processor, CPUs we may use, RAM to the GiB, and the native code, of
    the kernels `isa` (None: of the best ones)."""
    hardware = f"{cpu_name()}-{host.usable_cpus()}cpu-{host.physical_bytes() >> 30}g"
    built = Path(_native.__file__).stat()
    text = f"{hardware}-{isa or cpu.best_isa()[0]}-{built.st_size:x}-{built.st_mtime_ns // 10**9:x}"
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()
