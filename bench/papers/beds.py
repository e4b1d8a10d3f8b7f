"""The papers' test beds as machines."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import penstock
from penstock.spec import machine as machines
from penstock.spec.machine import MachineSpec


@cache
def machine_of(name: str) -> MachineSpec:
    """A machine that comes with penstock."""
    file = Path(penstock.__file__).parent / "machines" / f"{name}.json"
    return machines.loads(file.read_text(encoding="utf-8"), name)
