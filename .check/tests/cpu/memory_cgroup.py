"""Real memory limits for subprocesses: a cgroup (v1 or v2) where we may make one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path | None]:
    """A cgroup of that size, or None where this user or container may not make one."""
    root, file = (_V1, "memory.limit_in_bytes") if (_V1 / "cgroup.procs").exists() else (_V2, "memory.max")
    folder = root / f"penstock-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / file).write_text(str(limit_bytes))
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:  # the kernel still counts the process that just ended
                subprocess.run(["sleep", "0.05"], check=False)


def run_inside(folder: Path | None, command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Runs a command as a member of the cgroup from its first instruction on."""
    if folder is not None:
        command = ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)  # type: ignore[call-overload, no-any-return]
