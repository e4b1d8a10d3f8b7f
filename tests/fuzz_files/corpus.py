"""The seeds: small files in `seeds/<kind>/`, each of a form that penstock reads, or hostile.

A name says what an unmutated seed must do: `good-…` exit code 0, `bad-…` exit code 2 under the first of its commands
(not every command reads all of a file), `odd-…` either.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SEEDS = Path(__file__).parent / "seeds"


@dataclass(frozen=True)
class Seed:
    """`kind`: the folder that it lies in, which says where the file goes and which commands read it."""

    kind: str
    path: Path
    content: bytes

    @property
    def name(self) -> str:
        """`config/good-llama.json`: what a case is called by."""
        return f"{self.kind}/{self.path.name}"

    def codes(self, number: int) -> tuple[int, ...]:
        """What the command of that number may end with where it reads this seed as it is."""
        kind = self.path.name.partition("-")[0]
        return {"good": (0,), "bad": (0, 2) if number else (2,), "odd": (0, 2)}[kind]


def seeds() -> tuple[Seed, ...]:
    """All seeds, sorted by name."""
    files = sorted(path for path in SEEDS.glob("*/*") if path.is_file())
    return tuple(Seed(path.parent.name, path, path.read_bytes()) for path in files)
