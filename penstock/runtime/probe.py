"""Measures this machine in under five seconds: RAM and disk reads, one matrix product per format.

A thin probe: enough to print predicted beside measured. It uses the movers and kernels that run later.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from penstock import _native
from penstock.errors import BadRequest, PenstockError, StorageFailed
from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.resident import resident_plan
from penstock.kernels import cpu
from penstock.runtime import host
from penstock.runtime.arena import Arenas
from penstock.runtime.bind_native import Native, NativeBinding, native
from penstock.spec import machine as machines
from penstock.spec.format import DEFAULT_GROUP, Format
from penstock.spec.machine import MachineSpec, Rate, Tier
from penstock.spec.model import Attention, Ffn, Layer, ModelSpec, Norm, Rope
from penstock.spec.parts import Block
from penstock.units import MIB

_RAM_BYTES = 128 * MIB  # four times a large L3 cache; less where memory is short
_DISK_BYTES = 128 * MIB
_READ_BYTES, _SMALL_READ_BYTES = 8 * MIB, 64 * 1024
_HAND_OVER_S = 6e-5  # a task to a lane's thread, and the word that it is done (docs/LOG.md)
_COLS, _ROWS = 2048, 64  # a block of a granule
_MANY_ROWS, _MANY_BLOCKS = 64, 16
PRODUCTS = ("qkv", "out", "ffn", "head")
FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")


def machine_file(cache: Path) -> Path:
    return cache / "machines" / f"{_fingerprint()}.json"


def load_or_probe(
    cache: Path, disk_folder: Path, on_progress: Callable[[str, int, int], None] | None = None
) -> MachineSpec:
    """The machine as measured before, or measured now and kept. Memory is always read afresh."""
    path = machine_file(cache)
    if path.exists():
        try:
            return _with_memory(machines.loads(path.read_text(), str(path)))
        except (BadRequest, UnicodeDecodeError):
            path.unlink(missing_ok=True)  # damaged, or written by another version: measure again
    if on_progress:
        on_progress("measuring this machine, once (about 3 s)", 0, 0)
    found = _probe_apart(disk_folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    aside.write_text(machines.dumps(found))
    aside.rename(path)
    return found


def _probe_apart(disk_folder: Path) -> MachineSpec:
    """In a process of its own: what the probe allocates must not count against the run that follows."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.runtime.probe", str(disk_folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise StorageFailed(
            f"measuring this machine failed: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}"
        )
    return machines.loads(done.stdout, "the probe's answer")


def probe(disk_folder: Path) -> MachineSpec:
    """Measures now; the disk is the one that holds `disk_folder`."""
    threadpool_limits(1, user_api="blas")  # as a session does
    threads = host.usable_cpus()
    ram_s_per_byte = _ram_s_per_byte(threads)
    kernels = native(None, threads, exact=False)
    overheads = _overheads(kernels)
    rates = [Rate("host", op, "*", seconds, ram_s_per_byte) for op, seconds in overheads.items()]
    rates.append(Rate("host", "*", "*", min(overheads.values()), ram_s_per_byte))
    for kind in FORMATS:
        fmt = Format(kind, DEFAULT_GROUP if kind.startswith("int") else 0)
        s_per_byte, s_per_flop = _product_s(fmt, kernels)
        rates += [Rate("host", op, kind, overheads[op], s_per_byte, s_per_flop) for op in PRODUCTS]
    rates.append(_disk_rate(disk_folder))
    found = MachineSpec(
        name=platform.node() or "this machine",
        tiers=(Tier("host", host.memory_limit_bytes()), Tier("disk0", _disk_bytes(disk_folder))),
        rates=tuple(rates),
        threads=threads,
        cpu=cpu_name(),
        source=f"probe {date.today().isoformat()}",
    )
    return _with_memory(found)


def _with_memory(machine: MachineSpec) -> MachineSpec:
    """With the memory that a process may use here now, nine tenths of what is free."""
    usable = int(host.available_bytes() * 0.9)
    tiers = tuple(Tier(t.name, max(1, usable)) if t.name == "host" else t for t in machine.tiers)
    return MachineSpec(machine.name, tiers, machine.rates, machine.threads, machine.cpu, machine.source)


def _ram_s_per_byte(threads: int) -> float:
    nbytes = max(8 * MIB, min(_RAM_BYTES, host.available_bytes() // 4))
    memory = _native.Memory(nbytes, True)
    memory.populate()
    seconds: float = _native.ram_read_s(memory.address, nbytes, threads, 5)
    memory.close()
    return seconds / nbytes


def _product_s(fmt: Format, kernels: Native) -> tuple[float, float]:
    """Few rows give seconds per byte of weights, from memory that no cache holds; many rows seconds per flop."""
    block = Block("up", _ROWS, _COLS, fmt, 0)
    few, many = max(1, _RAM_BYTES // block.nbytes), _MANY_BLOCKS
    weights = _native.Memory(few * block.nbytes, True)
    weights.populate()
    scratch = _native.Memory(16 * MIB, True)
    m = cpu.matrix(block)
    best = []
    for rows, blocks in ((1, few), (_MANY_ROWS, many)):
        x, out = np.ones((rows, _COLS), np.float32), np.zeros((rows, blocks * _ROWS), np.float32)
        times = []
        for _ in range(3):
            start_s = time.perf_counter()
            kernels.compute.project(
                weights.address, blocks, block.nbytes, m, int(x.ctypes.data), _COLS, rows, int(out.ctypes.data),
                blocks * _ROWS, blocks * _ROWS, not cpu.rounds_activations(fmt), scratch.address, scratch.nbytes,
            )  # fmt: skip
            times.append(time.perf_counter() - start_s)
        best.append(min(times))
    weights.close()
    return best[0] / (few * block.nbytes), best[1] / (2 * _MANY_ROWS * _ROWS * _COLS * many)


def _overheads(kernels: Native) -> dict[str, float]:
    """Seconds that a call of each op takes on a layer so small that bytes and flops hardly count."""
    layer = Layer(Attention(8, 4, 32, 32**-0.5, rope=Rope(1e4, 32)), Ffn(704, "silu", gated=True))
    spec = ModelSpec("llama", "float32", 4096, 256, 256, 512, (layer,), Norm("rms", 1e-5), True, True)
    fmt = Format("float32")
    plan = resident_plan(spec, fmt, kv=fmt, context=256)
    binding = NativeBinding(plan, Arenas(plan), None, kernels)
    times: dict[str, list[float]] = {}
    lowering = Lowering(plan)
    for position in (64,) * 20:
        for task in lowering.step(passes.decode(plan, (0,), (position,), None)):
            for call in task.calls:
                start_s = time.perf_counter()
                binding.call(call)
                times.setdefault(call.op, []).append(time.perf_counter() - start_s)
    return {op: statistics.median(taken) for op, taken in times.items()}


def _disk_rate(folder: Path) -> Rate:
    """A file written aside, then read back with direct reads into huge pages: large ones and small ones."""
    memory = _native.Memory(_READ_BYTES, True)
    memory.populate()
    name = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".penstock-probe-", delete=False) as file:
            name = file.name
            block = os.urandom(MIB)
            for _ in range(_DISK_BYTES // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        fd, _ = _native.open_direct(name)
        try:
            _native.drop_cached(fd, 0, _DISK_BYTES)
            times: dict[int, list[float]] = {_READ_BYTES: [], _SMALL_READ_BYTES: []}
            for offset in range(0, _DISK_BYTES, _READ_BYTES):
                for nbytes, taken in times.items():
                    start_s = time.perf_counter()
                    _native.read_into(fd, offset, memory.address, nbytes, nbytes)
                    taken.append(time.perf_counter() - start_s)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageFailed(f"cannot measure the disk at {folder}: {error.strerror}") from None
    finally:
        if name is not None:
            Path(name).unlink(missing_ok=True)
    large_s, small_s = (statistics.median(times[nbytes]) for nbytes in (_READ_BYTES, _SMALL_READ_BYTES))
    s_per_byte = max(large_s - small_s, 0.5 * large_s) / (_READ_BYTES - _SMALL_READ_BYTES)
    alpha_s = max(0.0, small_s - _SMALL_READ_BYTES * s_per_byte) + _HAND_OVER_S
    return Rate("disk0", "*", "*", alpha_s, s_per_byte)


def _disk_bytes(folder: Path) -> int:
    stat = os.statvfs(folder)
    return max(1, stat.f_bavail * stat.f_frsize)


def cpu_name() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def _fingerprint() -> str:
    """What the figures belong to: processor, CPUs we may use, RAM to the GiB, and the code that was measured."""
    hardware = f"{cpu_name()}-{host.usable_cpus()}cpu-{host.physical_bytes() >> 30}g"
    built = Path(_native.__file__).stat()
    text = f"{hardware}-{cpu.best_isa()[0]}-{built.st_size:x}-{built.st_mtime_ns // 10**9:x}"
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


if __name__ == "__main__":
    try:
        print(machines.dumps(probe(Path(sys.argv[1]))))
    except PenstockError as failure:
        sys.exit(failure.message)
