"""Reads how much memory and how many processors this process may use. Limits of cgroups (v1 and v2) count."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penstock.units import KIB

# Gets a line about the work under way, how much of it is done, and how much it is in all (0: unknown).
Progress = Callable[[str, int, int], None]


def usable_threads(asked: int | None) -> int:
    """How many threads to compute with: `asked`, but at most one for each CPU that this process may use, which is also
    the default."""
    cpus = usable_cpus()
    return min(asked or cpus, cpus)


def peak_rss_bytes() -> int:
    """The most RAM that this process has had. By VmHWM, for a child inherits ru_maxrss from its parent."""
    return _status_bytes("VmHWM")


def peak_private_bytes(process: int) -> int:
    """The peak RAM of another process, less the pages that it shares now. Shared pages are those of the interpreter
    and its libraries, which count for every process that maps them. 0 where the process has ended."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        text = ""
    shared_kib = sum(map(int, re.findall(r"Shared_(?:Clean|Dirty):\s+(\d+) kB", text)))
    return max(0, _status_bytes("VmHWM", process) - shared_kib * 1024)


def rss_bytes() -> int:
    """The RAM that this process has now."""
    return _status_bytes("VmRSS")


def cpu_s(process: int) -> float:
    """Seconds of processor time that a process has taken, user and system. 0 where the system does not say."""
    fields = _stat(process)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def wants_cpu(process: int) -> bool:
    """Whether a process computes, or waits for nothing but a processor. False where the system does not say."""
    return _stat(process)[:1] == ["R"]


def _stat(process: int) -> list[str]:
    """The fields of /proc/PROCESS/stat from the third on; none where the system does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _status_bytes(field: str, process: int | None = None) -> int:
    try:
        text = Path(f"/proc/{process or 'self'}/status").read_text()
    except OSError:
        return 0
    line = re.search(rf"{field}:\s+(\d+) kB", text)
    return int(line[1]) * 1024 if line else 0


def physical_bytes() -> int:
    """All RAM of the machine, whatever part of it this process may use."""
    return _meminfo("MemTotal")


def memory_limit_bytes() -> int:
    """The most RAM that a process here may ever have: physical memory, or the smallest limit of a cgroup above us."""
    return min([physical_bytes(), *(limit for limit, _ in _cgroups())])


def available_bytes() -> int:
    """The RAM that this process can have now: free memory, and the memory that it holds already."""
    own = rss_bytes()
    return min([_meminfo("MemAvailable") + own, *(limit - max(0, used - own) for limit, used in _cgroups())])


def usable_cpus() -> int:
    """CPUs of the affinity mask, limited by the cgroup's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders("cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        try:
            words = (folder / "cpu.max").read_text().split()
            quota, period = (int(words[0]), int(words[1])) if words[0] != "max" else (quota, period)
        except (OSError, ValueError, IndexError):
            pass
        if quota and period and quota > 0:
            cpus = min(cpus, max(1, -(-quota // period)))
    return cpus


def all_cpus() -> int:
    """All CPUs of the machine, whatever part of them this process may use."""
    return os.cpu_count() or 1


def last_level_cache_bytes() -> int:
    """The size of the cache that the first CPU's cores share, as the kernel knows it; 0 where it does not say. (glibc's
    sysconf tells all caches of the socket.)"""
    sizes = [0]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        with suppress(OSError, ValueError):
            text = (index / "size").read_text()
            sizes.append(int(text.strip().removesuffix("K")) * KIB)
    return max(sizes)


def load() -> float:
    """How many processes ran or wanted to run, on average over the last minute. 0 where the system does not say."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def _meminfo(field: str) -> int:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    line = re.search(rf"{field}:\s+(\d+) kB", text)
    return int(line[1]) * 1024 if line else 0


def _cgroup_folders(controller: str) -> list[Path]:
    """The folders of our cgroup and of all cgroups above it: of v1, those of this controller, and of v2."""
    folders = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for root in (
            ("/sys/fs/cgroup/unified", "/sys/fs/cgroup") if not controllers else (f"/sys/fs/cgroup/{controller}",)
        ):
            here = Path(root) / path.lstrip("/")
            folders += [here, *(up for up in here.parents if str(up).startswith(root))]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _cgroups() -> list[tuple[int, int]]:
    """(limit, use without page cache), in bytes, of every memory cgroup above us that has a limit."""
    limits = []
    for folder in _cgroup_folders("memory"):
        limit = _number(folder / "memory.limit_in_bytes") or _number(folder / "memory.max")
        if not limit or limit >= 1 << 60:  # v1 writes "no limit" as a huge number
            continue
        used = _number(folder / "memory.usage_in_bytes") or _number(folder / "memory.current") or 0
        limits.append((limit, max(0, used - _cached(folder / "memory.stat"))))
    return limits


def _cached(stat: Path) -> int:
    """Bytes of page cache, which the kernel gives back before it refuses memory."""
    try:
        pairs = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    total = pairs.get("total_cache") or pairs.get("file") or "0"
    return int(total)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
