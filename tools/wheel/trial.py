"""Tries a wheel as a user has it: a new environment, no compiler on the PATH, nothing of this repository.

A wheel for another processor than this one is tried under emulation, where Debian's packages have what it takes.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.wheel import emulated, sample
from tools.wheel.build import run
from tools.wheel.emulated import Emulated
from tools.wheel.pythons import Python

PROMPT = "Once upon a time"
# What the bundled model says on, greedily, with all its weights as they are: tests/cpu/test_wheel.py asks transformers.
GOLDEN = ", and then I was a good deal of a man."
_BUILDS = ("cc", "gcc", "g++", "c++", "clang", "make", "cmake", "ninja", "ld", "zig")
_RUN = ("--max-tokens", "16", "--temperature", "0", "--weights", "float32")


def tried(wheel: Path, machine: str, pythons: list[Python]) -> Iterator[str]:
    """A line for each Python that the wheel was tried with, or why it was not. Ends this process where it fails."""
    stable = "abi3" in wheel.name
    if machine != platform.machine():
        python = emulated.NEW if stable else emulated.OLD
        why = python.prepared()
        yield (
            f"not tried: {why}"
            if why
            else f"python{python.version} for {machine}, emulated: {_emulated(wheel, python)}"
        )
        return
    for here in pythons:
        if here.stable == stable:
            yield f"{here.name}: {_in_new_environment(wheel, here)}"


def _in_new_environment(wheel: Path, python: Python) -> str:
    with tempfile.TemporaryDirectory(prefix="penstock-wheel-") as folder:
        venv = Path(folder, "venv")
        run(python.program, "-m", "venv", venv)
        path = str(venv / "bin")
        assert not any(shutil.which(name, path=path) for name in _BUILDS)
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "CXX")}
        env["PATH"] = path
        _ends_well([str(venv / "bin/pip"), "install", "-q", "--disable-pip-version-check", "--only-binary", ":all:",
                    "-c", os.path.abspath("constraints.txt"), str(wheel)], folder, env)  # fmt: skip
        where = "import penstock; print(penstock.__path__[0])"
        model = Path(_ends_well([str(venv / "bin/python"), "-c", where], folder, env).strip(), "assets/tale-llama")
        assert model.is_relative_to(venv.resolve()) or model.is_relative_to(venv)
        said = _says([str(venv / "bin/penstock")], model, folder, env)
        return f"{said}; {_a_program_is_right(venv / 'bin/python', model, folder, env)}"


def _a_program_is_right(python: Path, model: Path, folder: str, env: dict[str, str]) -> str:
    """Types of a user's program by the wheel's own, and what it does. mypy is that of this Python: it reads the wheel
    where the other one has it."""
    program = Path(folder, "program.py")
    program.write_text(sample.program(str(model)))
    _ends_well(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), str(program)], folder, env
    )
    _ends_well([str(python), str(program)], folder, {**env, "HOME": folder})
    return "a user's program runs, and mypy --strict finds nothing in it"


def _emulated(wheel: Path, python: Emulated) -> str:
    site = python.installed(wheel)
    with tempfile.TemporaryDirectory(prefix="penstock-wheel-") as folder:
        env = {**os.environ, "PYTHONPATH": str(site)}
        command = [str(python.program), "-m", "penstock.cli"]
        return _says(command, site / "penstock/assets/tale-llama", folder, env)


def _says(penstock: list[str], model: Path, folder: str, env: dict[str, str]) -> str:
    words = [*penstock, "run", str(model), PROMPT, *_RUN, "--cache", str(Path(folder, "cache"))]
    said = _ends_well(words, folder, env)
    if not said.removeprefix(PROMPT).startswith(GOLDEN):  # the prompt comes first at a terminal alone
        sys.exit(f"wheel: it says {said!r}, and should say {GOLDEN!r}")
    return "says what it should"


def _ends_well(command: list[str], folder: str, env: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}\nwheel: {' '.join(command)[:200]} failed")
    return done.stdout
