"""Turns of a bench's engines, kept in a file as they end: a bench that takes hours can be run part by part, and goes on
where it was cut off."""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock
from penstock import _native
from penstock.runtime import host
from penstock.runtime.this_machine import cpu_name

Figures = dict[str, Any]


class Rounds:
    """The turns of one bench. `about`: what it measures and on which machine; the build is added to it. A file whose
    turns say otherwise ends the bench. Each line of the file is a JSON object: `about`, `turn`, `began` (UTC), `took_s`
    and `figures`. Without a file nothing is kept."""

    def __init__(self, file: Path | None, about: Figures) -> None:
        self._file, self._about = file, about
        self._kept: dict[str, list[Figures]] = {}
        for row in kept_rows(file, about | {"build": build()}) if file is not None else ():
            self._kept.setdefault(row["turn"], []).append(row)

    def turns(self, turn: str) -> list[Figures]:
        """The figures of all turns of this name that count, in their order."""
        return [row["figures"] for row in self._kept.get(turn, ())]

    def measure(self, turn: str, measure: Callable[[], Figures]) -> None:
        """Adds one."""
        began, start_s = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.perf_counter()
        figures = measure()
        about = self._about | {"build": build()}  # anew: engines are started for each turn
        row = {"about": about, "turn": turn, "began": began, "took_s": time.perf_counter() - start_s}
        row["figures"] = figures
        self._kept.setdefault(turn, []).append(row)
        if self._file is not None:
            with self._file.open("a") as kept:
                kept.write(json.dumps(row) + "\n")

    def facts(self) -> Figures:
        """When the turns that count were measured, how long they took, and of how many builds they are."""
        rows = [row for of in self._kept.values() for row in of]
        return {
            "took_s": sum(row["took_s"] for row in rows),
            "began": {turn: [row["began"] for row in of] for turn, of in self._kept.items()},
            "builds": len({row["about"]["build"] for row in rows}),
        }


def kept_rows(file: Path, about: Figures) -> list[Figures]:
    """The rows of a file, a JSON object a line; none where there is no file. A row whose `about` is another one ends
    the bench. A last line that was torn is dropped, in the file too, where the next row would go on in it."""
    text = file.read_text() if file.exists() else ""
    lines = text.splitlines()
    rows = [json.loads(line) for line in lines[:-1]]
    if lines:
        try:
            rows.append(json.loads(lines[-1]))
        except json.JSONDecodeError:
            lines.pop()
    for row in rows:
        refuse_other(file, row.get("about"), about)
    whole = "".join(f"{line}\n" for line in lines)
    if whole != text:
        replace(file, whole)
    return rows


def refuse_other(file: Path, found: Figures | None, about: Figures) -> None:
    """Ends the bench where a file's figures are of another build, machine or shape, or were measured otherwise."""
    if found != about:
        sys.exit(f"{file} has figures of {found}, which are not those of {about}")


def replace(file: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    aside = file.with_name(f"{file.name}.tmp")
    aside.write_text(text)
    aside.replace(file)


def this_machine() -> Figures:
    """What figures of this machine have in common."""
    return {"cpu": cpu_name(), "threads": host.usable_cpus(), "memory_bytes": host.physical_bytes()}


def checksum(*files: Path) -> int:
    """Of the bytes of files, in this order."""
    found = 0
    for file in files:
        found = zlib.crc32(file.read_bytes(), found)
    return found


def build() -> int:
    """A checksum of the package's code, Python and native, wherever an editable install keeps the native part."""
    return checksum(*sorted(Path(penstock.__file__).parent.glob("**/*.py")), Path(_native.__file__))
