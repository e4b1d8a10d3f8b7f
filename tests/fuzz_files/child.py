"""One command in a forked child, under limits of memory, time and file size. Its parent has imported all, once."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz_files import warm

LIMIT_S = 5.0
_CPU_S = 10
_WALL_S = 120.0
_LOOK_MS = 50.0
MEMORY_BYTES = 512 << 20  # beside what the warm parent holds
FILE_BYTES = 64 << 20

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE_S = 10.0  # for processes that the child started, to end after it


@dataclass(frozen=True)
class Outcome:
    """`code`: negative for a signal. `seconds`: less the time that it was ready and other processes had the processors.
    `late`: it was killed at LIMIT_S of these. `orphans`: processes that outlived it."""

    code: int
    out: bytes
    err: bytes
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    late: bool
    orphans: int


def adopt_orphans() -> None:
    """What a child leaves running becomes a child of this process (which no fork of it inherits)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """This process is killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run(
    argv: Sequence[str],
    cwd: Path,
    home: Path,
    stdin: Path | None,
    logs: Path,
    limited: bool = True,
    as_it_is: bool = False,
) -> Outcome:
    """Calls `main(argv)`. `logs`: a folder for what it prints; `as_it_is`: see `warm`."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_the_child(argv, cwd, home, stdin, logs, limited, as_it_is)
    clock = _Clock(pid)
    late = not clock.ended_within(LIMIT_S if limited else _WALL_S)
    if late:
        for each in _family(pid):
            _kill(each)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    seconds = clock.spent_s()
    _, status, usage = os.wait4(pid, 0)
    orphans = _clear_orphans()
    return Outcome(
        os.waitstatus_to_exitcode(status),
        (logs / "stdout").read_bytes(),
        (logs / "stderr").read_bytes(),
        seconds,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss << 10,
        late,
        0 if late else orphans,
    )


def _be_the_child(
    argv: Sequence[str], cwd: Path, home: Path, stdin: Path | None, logs: Path, limited: bool, as_it_is: bool
) -> None:
    """Never returns."""
    code = 99
    try:
        os.setpgid(0, 0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(stdin or os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(logs / "stdout", flags), 1)
        os.dup2(os.open(logs / "stderr", flags), 2)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (the process's own)
        os.chdir(cwd)
        os.environ["HOME"] = str(home)
        if limited:
            _limit()
        if as_it_is:
            warm.as_it_is()
        from penstock.cli.main import main

        code = main(argv)
        # What the interpreter does on its way out.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _limit() -> None:
    for what, most in (
        (resource.RLIMIT_DATA, warm.data_bytes() + MEMORY_BYTES),
        (resource.RLIMIT_CPU, _CPU_S),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


class _Clock:
    """Time since the start, less what the processes waited for a processor: others are at work on a shared machine."""

    def __init__(self, pid: int) -> None:
        self._pid, self._start_s = pid, time.perf_counter()
        self._waited_s: dict[int, float] = {}  # also of processes that have ended since

    def spent_s(self) -> float:
        self._waited_s.update((each, _waited_s(each)) for each in _family(self._pid))
        return time.perf_counter() - self._start_s - sum(self._waited_s.values())

    def ended_within(self, limit_s: float) -> bool:
        """Waits for the process to end, until it has spent `limit_s`."""
        fd = os.pidfd_open(self._pid)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            while self.spent_s() < limit_s and time.perf_counter() - self._start_s < _WALL_S:
                if poll.poll(_LOOK_MS):
                    return True
            return False
        finally:
            os.close(fd)


def _waited_s(pid: int) -> float:
    """That the main thread of a process was ready to run and did not."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _family(pid: int) -> list[int]:
    """A process and those that it started, and so on."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for each in task.read_text().split():
                found += _family(int(each))
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _clear_orphans() -> int:
    """Ends what a child left running, and says how many processes that were. They are ours since their parent died."""
    until_s = time.perf_counter() + _GRACE_S
    killed: set[int] = set()
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return len(killed)
        if pid == 0:
            if time.perf_counter() > until_s:
                for each in _family(os.getpid())[1:]:
                    killed.add(each)
                    _kill(each)
            time.sleep(0.002)
