"""The warm parent: all imports done, no thread started, and what has nothing to do with files made cheap.

What differs from a command that a user types, so that a hundred thousand take minutes and not hours:

- the probe of the machine and the figures of a GPU are made up
- the disk is not read again for 60 ms after a run, which serves to say how fast it was
- the process that opens tokenizers is a fork and no new interpreter, and has 0.4 s of processor time, not 4 s
- cycles of references are not collected

`as_it_is` undoes the last three; the seeds themselves, and one mutant of two hundred, run so.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import pkgutil
import resource
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import penstock
from tests.fuzz_files.world import MACHINE

_CONFINED_CPU_S, _REREAD_S = 0.4, 0.001
_FRESH_BYTES = 30 << 20  # of data, in an interpreter that has just started and imported the tokenizer

# What commands import where they first need it, beside all of penstock but what wants torch.
_USED = ("highspy", "jinja2.ext", "jinja2.sandbox", "numpy.random", "tokenizers")
_WANT_TORCH = ("penstock.kernels.gpu", "penstock.runtime.device.cuda")
_COMMANDS = ("run", "plan", "eval", "synth", "pack", "probe", "bench", "demo", "list", "rm", "prune")


def warm_up() -> None:
    """Once, before the first fork. Raises AssertionError where something started a thread, which a fork would lose."""
    from penstock.cli.options import quiet_blas

    quiet_blas()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["PENSTOCK_DEBUG"] = "1"  # a fault of ours says where
    ours = (found.name for found in pkgutil.walk_packages(penstock.__path__, "penstock."))
    for name in (*_USED, *ours):
        if not name.startswith(_WANT_TORCH) and not name.endswith("__main__"):
            importlib.import_module(name)
    import typer

    from penstock.cli import main as cli
    from penstock.runtime import probe
    from penstock.serve import confined, run_bound, text_limits
    from penstock.spec import machine as machines

    made_up = machines.loads(MACHINE.read_text(), str(MACHINE))
    patched: Any = probe
    patched.probe_apart = lambda *args, **kwargs: made_up
    # The commands' parsers: made by each call of `main`, they took a third of a refused one.
    cli.app, typer.main.get_command = functools.cache(cli.app), functools.cache(typer.main.get_command)
    for module, name, value in (
        (run_bound, "_REREAD_S", _REREAD_S),
        (text_limits, "_CPU_S", _CONFINED_CPU_S),
        (confined, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": _Forked})),
    ):
        _as_it_was.append((module, name, getattr(module, name)))
        setattr(module, name, value)
    # Parsing imports too: a command line of each kind that is refused at once.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for command in _COMMANDS:
            cli.main([command, "--help"])
            cli.main([command, "/nowhere/at/all", "/nowhere/at/all", "--json"])
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    gc.disable()  # a search for cycles touches, so copies, pages of the parent's


_as_it_was: list[tuple[Any, str, Any]] = []


def as_it_is() -> None:
    """In a child: processes are started and timed as ever, and cycles collected."""
    gc.enable()
    for module, name, value in _as_it_was:
        setattr(module, name, value)


class _Forked:
    """A `subprocess.Popen` of `penstock.serve.confined_child`, by a fork that has imported it already."""

    def __init__(self, command: list[str], stdin: int, **_: object) -> None:
        read_end, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.dup2(stdin, 0)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(write_end, 2)
            os.closerange(3, 64)
            os._exit(_ended_with(lambda: _confined(command[-1])))
        os.close(write_end)
        self.stderr = os.fdopen(read_end, "rb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until_s = time.perf_counter() + (1e9 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.perf_counter() > until_s:
                raise subprocess.TimeoutExpired("confined_child", timeout or 0.0)
            time.sleep(0.0005)
        return code

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, 9)


def _confined(parent: str) -> None:
    from penstock.serve import confined_child

    sys.argv = ["confined_child", parent]
    more_bytes, lower = max(0, data_bytes() - _FRESH_BYTES), confined_child._lower

    def lowered(limit: int, value: int) -> tuple[int, int]:
        # What the warm parent brought along is no part of the request.
        return lower(limit, value + more_bytes if limit == resource.RLIMIT_DATA else value)

    patched: Any = confined_child
    patched._lower = lowered
    confined_child.main()


def _ended_with(work: Callable[[], None]) -> int:
    """What an interpreter would end with."""
    try:
        work()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def data_bytes() -> int:
    """Of this process, what RLIMIT_DATA counts."""
    return int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) << 10
