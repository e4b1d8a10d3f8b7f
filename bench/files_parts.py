"""Figures of `bench.files` part by part, in a file if one is named: calls of minutes give one line together.

A part is a section of one kind of file: ("q4_k_m", "ram"). Each is kept with the time at which it began, and a later
call's takes the place of an earlier one's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.rounds import Figures, refuse_other, replace


class Parts:
    """`file`: where parts are kept; None: of this call alone. `facts`: what all parts have in common. A file whose
    facts are others ends the bench, as of another build, machine or shape."""

    def __init__(self, file: Path | None, facts: Figures) -> None:
        self._file, self._facts = file, facts
        self._parts: dict[str, dict[str, Figures]] = {}
        if file is not None and file.exists():
            kept = json.loads(file.read_text())
            refuse_other(file, kept["facts"], facts)
            self._parts = kept["parts"]

    def measure(self, kind: str, section: str, part: Callable[[], Figures], rounds: int) -> None:
        began, start_s = datetime.now(UTC), time.perf_counter()
        figures = part()
        told = {"began": began.isoformat(timespec="seconds"), "took_s": time.perf_counter() - start_s, "rounds": rounds}
        self._parts.setdefault(kind, {})[section] = {**told, "figures": figures}
        if self._file is not None:
            replace(self._file, json.dumps({"facts": self._facts, "parts": self._parts}, indent=1))

    def line(self, kinds: Sequence[str], always: Sequence[str]) -> Figures:
        """By kind: the figures of all its parts, in the order of their names; `always` are null where no part has
        them. `parts`: when each began, what it took, and of how many rounds its medians are."""
        found: Figures = {}
        for kind in kinds:
            parts = self._parts.get(kind, {})
            found[kind] = dict.fromkeys(always)
            for section in sorted(parts):
                found[kind] |= parts[section]["figures"]
            told = {
                name: {key: value for key, value in part.items() if key != "figures"} for name, part in parts.items()
            }
            found[kind]["parts"] = told
        return found
