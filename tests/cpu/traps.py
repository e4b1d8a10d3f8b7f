"""A folder that lies in wait: a module of every name that Python or a library of ours might import."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

# Python looks for these two by itself, and pip's own start for the third.
_AT_START = ("sitecustomize", "usercustomize", "_virtualenv")
SCRIPT = Path(sys.executable).with_name("penstock")  # as pip installs it: what users type


class Trap:
    """`folder`: where a command is to be run. `caught`: the files there that were imported meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._log = folder, folder.parent / f"{folder.name}.caught"
        folder.mkdir(exist_ok=True)
        spring = f"with open({str(self._log)!r}, 'a') as log:\n    log.write(__file__ + '\\n')\n"
        names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), *_AT_START, "penstock"}
        for name in filter(str.isidentifier, names):
            (folder / f"{name}.py").write_text(spring)
        for name in ("penstock", "penstock/runtime"):
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(spring)
        (folder / "penstock/runtime/probe.py").write_text(spring)
        (folder / "pyvenv.cfg").write_text("home = /nonexistent\n")
        (folder / ".pdbrc").write_text("import json\n")
        self._files = self.files()

    def files(self) -> set[Path]:
        return set(self.folder.rglob("*"))

    @property
    def caught(self) -> list[str]:
        return sorted(set(self._log.read_text().splitlines())) if self._log.exists() else []

    def run(self, *args: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """The console script, in the folder. Asserts that nothing was imported from it, and nothing written into it."""
        command = [str(SCRIPT), *map(str, args)]
        done = subprocess.run(command, cwd=self.folder, input=stdin, capture_output=True, text=True, timeout=900)
        self.check()
        return done

    def check(self) -> None:
        assert self.caught == []
        assert self.files() == self._files
