"""From flags to a loaded engine: what `run`, `demo` and `eval` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import Machine
from penstock.cli.output import progress
from penstock.spec.ask import Ask

if TYPE_CHECKING:
    from penstock.serve.engine import Engine
    from penstock.spec.plan import Plan


def packed_folder(model: str, weights: str | None, machine: Machine) -> Path:
    """The packed model that MODEL names; a checkpoint is packed into the cache first."""
    from penstock.serve.source import resolve

    with progress() as tell:
        return resolve(model, weights=weights, cache=machine.cache_folder, on_progress=tell)


@contextmanager
def loaded(folder: Path, ask: Ask, machine: Machine, plan: Plan | None = None) -> Iterator[Engine]:
    """An engine with its weights in place, closed at the end."""
    from penstock.serve.engine import Engine

    with progress() as tell:
        engine = Engine.load(
            folder,
            ask,
            cache=machine.cache_folder,
            plan=plan,
            threads=machine.threads,
            exact=machine.exact,
            on_progress=tell,
        )
    try:
        yield engine
    finally:
        engine.close()
