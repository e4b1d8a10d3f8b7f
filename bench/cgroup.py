"""A memory limit that is the kernel's, for whole processes, and a page cache that is empty."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.cpu.memory_cgroup import memory_cgroup

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NO_SWAP = {"memory.swappiness": "0", "memory.swap.max": "0"}  # v1, v2
_PEAK = ("memory.max_usage_in_bytes", "memory.peak")
_KILLS = ("memory.oom_control", "memory.events")


class Cgroup:
    """The folder of a memory cgroup, v1 or v2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def peak_bytes(self) -> int:
        """The most that its processes had together, page cache and kernel memory included; 0 where it is not kept."""
        return int(self._text(_PEAK) or 0)

    def kills(self) -> int:
        """Processes in it that the kernel killed for want of memory."""
        found = re.search(r"oom_kill (\d+)", self._text(_KILLS))
        return int(found[1]) if found else 0

    def _text(self, names: Iterable[str]) -> str:
        return next((file.read_text() for name in names if (file := self.folder / name).exists()), "")


@contextmanager
def limited(limit_bytes: int) -> Iterator[Cgroup]:
    """A cgroup of that limit, nothing of it swapped. Ends the bench where none can be made: the limit is its point."""
    with memory_cgroup(limit_bytes) as folder:
        if folder is None:
            sys.exit("no memory cgroup can be made here: this bench has to run as root, or in a delegated cgroup")
        for name, value in _NO_SWAP.items():
            with suppress(OSError):  # the other version's, or a machine without swap
                if (folder / name).exists():
                    (folder / name).write_text(value)
        yield Cgroup(folder)


@contextmanager
def slowed(process_id: int, share: float) -> Iterator[bool]:
    """A process, and those that it starts from now on, within a share of one processor. Yields False where that cannot
    be had: it needs root, and a hierarchy of its own for processors (cgroups v1)."""
    folder = Path(f"/sys/fs/cgroup/cpu/penstock-bench-{os.getpid()}")
    try:
        folder.mkdir()
        period_us = int((folder / "cpu.cfs_period_us").read_text())
        (folder / "cpu.cfs_quota_us").write_text(str(int(share * period_us)))
        (folder / "cgroup.procs").write_text(str(process_id))
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        yield False
        return
    try:
        yield True
    finally:
        with suppress(OSError):  # its processes may have ended
            (folder / "cpu.cfs_quota_us").write_text("-1")
        for each in (folder / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (folder.parent / "cgroup.procs").write_text(each)
        folder.rmdir()


def whole_pages(nbytes: int) -> int:
    """What the kernel makes of a limit."""
    return nbytes // _PAGE_BYTES * _PAGE_BYTES


def drop_page_cache(files: Iterable[Path]) -> None:
    """Everything cached where we may, else what is cached of these files."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return
    except OSError:
        pass
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
