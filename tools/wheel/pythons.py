"""Finds the Pythons of this machine that wheels can be built for and tried in."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Where people keep Pythons that are not on the PATH.
_ELSEWHERE = (".pyenv/versions/*/bin/python3", ".local/share/uv/python/*/bin/python3")
_ASK = """
import ensurepip, json, sys, sysconfig
free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
ours = sys.implementation.name == "cpython" and sys.prefix == sys.base_prefix and not free_threaded
print(json.dumps([ours, *sys.version_info[:2], sysconfig.get_path("include"), sysconfig.get_config_h_filename()]))
"""


@dataclass(frozen=True)
class Python:
    program: Path
    version: tuple[int, int]
    include: Path  # the folder of Python.h
    config: Path  # its pyconfig.h, which some distributions keep elsewhere

    @property
    def name(self) -> str:
        return "python{}.{}".format(*self.version)

    @property
    def stable(self) -> bool:
        """Whether a wheel that is built with it is for all later Pythons too (nanobind needs 3.12 for that)."""
        return self.version >= (3, 12)

    @property
    def has_headers(self) -> bool:
        return (self.include / "Python.h").is_file() and self.config.is_file()


def found(home: Path) -> list[Python]:
    """The CPythons from 3.11 on, one of a version, the oldest first."""
    by_version: dict[tuple[int, int], Python] = {}
    for program in _candidates(home):
        python = _asked(program)
        if python is not None and python.version >= (3, 11):
            known = by_version.setdefault(python.version, python)
            if python.has_headers and not known.has_headers:
                by_version[python.version] = python
    return [by_version[version] for version in sorted(by_version)]


def _candidates(home: Path) -> Iterator[Path]:
    for minor in range(11, 20):
        if (program := shutil.which(f"python3.{minor}")) is not None:
            yield Path(program)
    for pattern in _ELSEWHERE:
        yield from sorted(home.glob(pattern))


def _asked(program: Path) -> Python | None:
    asked = subprocess.run([program, "-c", _ASK], capture_output=True, text=True, check=False)
    if asked.returncode != 0:  # a shim of pyenv for a version that is not chosen, or a Python without venv
        return None
    ours, major, minor, include, config = json.loads(asked.stdout)
    return Python(program, (major, minor), Path(include), Path(config)) if ours else None
