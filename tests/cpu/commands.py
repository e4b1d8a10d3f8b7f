"""Running commands in tests: in this process or another, and what a refusal must look like."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.cli import main
from penstock.cli.output import one_line
from penstock.runtime.probe import machine_file
from penstock.spec.machine import Capacity, MachineSpec, Rate
from penstock.spec.machine import dumps as dump_machine

ROOT = Path(__file__).parents[2]
RATES = (Rate("host", "*", "*", 1e-5, 1e-10, 1e-11), Rate("disk0", "*", "*", 1e-4, 5e-10))
MACHINE = MachineSpec("test", (Capacity("host", 1 << 34), Capacity("disk0", 1 << 40)), RATES, 2)

# The program, which stands still where a pass begins and `when` holds, until a signal ends that.
_STANDS = """#!{python}
import sys, time
from pathlib import Path
from penstock.serve.session import Session
step, passes = Session.step, 0
def standing(*arguments):
    global passes
    passes += 1
    if {when}:
        time.sleep(600)
    return step(*arguments)
Session.step = standing
from penstock.cli.entry import main
sys.exit(main())
"""

# What stderr may hold beside the error.
_NOTES = (
    "penstock: this model has no chat template",
    "penstock: measuring this machine, once",
    "penstock: measured this machine, once",
    "penstock: writes ",  # before a first packing
    "Try `penstock ",
)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """The JSON line."""
        found = json.loads(self.out.splitlines()[-1])
        assert isinstance(found, dict)
        return found


# A command of the CLI, called in this process.
Call = Callable[..., Outcome]


def machine_cache(folder: Path) -> Path:
    """A cache folder that knows this machine, so that no test waits for a probe."""
    path = machine_file(folder)
    path.parent.mkdir(parents=True)
    path.write_text(dump_machine(MACHINE))
    return folder


def here(capsys: pytest.CaptureFixture[str], *args: object) -> Outcome:
    """A command in this process: its imports are paid for once."""
    capsys.readouterr()
    code = main.main([str(arg) for arg in args])
    return Outcome(code, *capsys.readouterr())


def command(args: Iterable[object]) -> list[str]:
    return [sys.executable, "-m", "penstock.cli", *map(str, args)]


def apart(*args: object, **kwargs: Any) -> Outcome:
    """A command in a process of its own."""
    done = subprocess.run(command(args), cwd=ROOT, capture_output=True, timeout=600, **kwargs)
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


def start(*args: object, script: Path | None = None, cwd: Path = ROOT, **kwargs: Any) -> subprocess.Popen[bytes]:
    """A command that goes on beside the test, with Ctrl-C as a terminal has it: a shell's background job, and so
    its children, may have been started with SIGINT ignored. `script`: the console script to start it by."""
    return subprocess.Popen(
        command(args) if script is None else [str(script), *map(str, args)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **kwargs,
    )


def standing(folder: Path, when: str) -> Path:
    """The console script of a program that stands still in its work, so that whoever wants to meet it there does,
    however late. `when`: an expression, in which `passes` counts the one that would begin now."""
    file = folder / "standing"
    file.write_text(_STANDS.format(python=sys.executable, when=when))
    file.chmod(0o755)
    return file


def refused(found: Outcome, says: str = "", kind: str | None = None, code: int = 2) -> dict[str, Any]:
    """Asserts that a command with --json failed as all of ours fail. Returns the error object."""
    assert found.code == code, found
    error = found.report["error"]
    assert isinstance(error, dict) and isinstance(error["message"], str)
    assert says in error["message"], error
    assert kind in (None, error["type"]), error
    lines = [line for line in found.err.splitlines() if not line.startswith(_NOTES)]
    assert lines == [f"penstock: {one_line(error['message'])}"], found.err
    assert "Traceback" not in found.err
    return error
