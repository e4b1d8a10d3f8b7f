"""Turns of a bench's engines, kept in a file as they end: a bench that takes hours can be run part by part, and goes on
where it was cut off."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock

Figures = dict[str, Any]


class Rounds:
    """The turns of one bench. `about`: what it measures and on which machine; turns in the file that say otherwise do
    not count. Each line of the file is a JSON object: `about`, `turn`, `began` (UTC), `took_s`, `build` (a checksum of
    the package) and `figures`. Without a file nothing is kept."""

    def __init__(self, file: Path | None, about: Figures) -> None:
        self._file, self._about = file, about
        self._kept: dict[str, list[Figures]] = {}
        for line in file.read_text().splitlines() if file is not None and file.exists() else ():
            row = json.loads(line)
            if row["about"] == about:
                self._kept.setdefault(row["turn"], []).append(row)

    def turns(self, turn: str) -> list[Figures]:
        """The figures of all turns of this name that count, in their order."""
        return [row["figures"] for row in self._kept.get(turn, ())]

    def measure(self, turn: str, measure: Callable[[], Figures]) -> None:
        """Adds one."""
        began, start_s = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.perf_counter()
        figures = measure()
        row = {"about": self._about, "turn": turn, "began": began, "took_s": time.perf_counter() - start_s}
        row |= {"build": build(), "figures": figures}
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
            "builds": len({row["build"] for row in rows}),
        }


def build() -> int:
    """A checksum of the package's code, Python and native."""
    folder = Path(penstock.__file__).parent
    found = 0
    for file in sorted([*folder.glob("**/*.py"), *folder.glob("_native*.so")]):
        found = zlib.crc32(file.read_bytes(), found)
    return found
