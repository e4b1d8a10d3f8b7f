"""A model that another program keeps on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Found:
    """`name`: as MODEL takes it. `path`: its GGUF file or its folder; None where it cannot be run, and `why` says why.
    `nbytes`: of its files. `left_out`: what the other program adds to the model and penstock does not use; ""."""

    name: str
    path: Path | None
    nbytes: int
    why: str = ""
    left_out: str = ""

    @property
    def short(self) -> str:
        """A name for its packed copy: `llama3.2-1b` of `ollama:llama3.2:1b`."""
        return self.name.partition(":")[2].rpartition("/")[2].replace(":", "-").removesuffix(".gguf")
