"""Commands in forks of one process that has imported all they need, each with what it took, children included.

A fork is small and quick, so a hundred commands take seconds, and its peak is not that of the tests' own process, which
a child started from here would inherit (`ru_maxrss` outlives exec).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Taken(NamedTuple):
    """`cpu_s`: of the command and its children, user and system. `peak_bytes`: of the largest of them."""

    code: int
    out: str
    err: str
    cpu_s: float
    peak_bytes: int


class Warm:
    """The process that forks."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.cpu.warm"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def run(self, *args: object) -> Taken:
        """A command with these arguments."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(arg) for arg in args]) + "\n")
        return Taken(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    """Commands as lines of JSON on standard input, what they took on standard output."""
    import penstock.serve.engine  # noqa: F401 (what commands import)
    from penstock.cli.main import main as run

    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os._exit(_flushed(run(json.loads(line))))
            _, status, used = os.wait4(child, 0)
            said: list[Any] = [os.waitstatus_to_exitcode(status)]
            for stream in (out, err):
                stream.seek(0)
                said.append(stream.read().decode())
            print(json.dumps([*said, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]), flush=True)


def _flushed(code: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
