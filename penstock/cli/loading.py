"""From flags to a loaded engine and its trace: what `run`, `demo`, `bench` and `eval` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import Machine, file_to_write
from penstock.cli.output import note, progress
from penstock.spec.ask import Ask

if TYPE_CHECKING:
    from penstock.serve.engine import Engine
    from penstock.serve.trace_file import TraceFile
    from penstock.spec.plan import Plan


def packed_folder(model: str, weights: str | None, machine: Machine) -> Path:
    """The packed model that MODEL names; a checkpoint is packed into the cache first."""
    from penstock.serve.source import resolve

    with progress() as tell:
        return resolve(model, weights=weights, cache=machine.cache_folder, on_progress=tell)


@contextmanager
def tracing(name: str | None, title: str) -> Iterator[TraceFile | None]:
    """The file of --trace, open from now on and whole at the end; None where none is wanted."""
    if name is None:
        yield None
        return
    from penstock.serve.trace_file import TraceFile

    with TraceFile(file_to_write(name, "--trace"), title) as record:
        yield record
    if record.left_out:
        note(f"the trace {name} would be too long: its last {record.left_out} tasks are left out")


@contextmanager
def loaded(
    folder: Path, ask: Ask, machine: Machine, plan: Plan | None = None, record: TraceFile | None = None
) -> Iterator[Engine]:
    """An engine with its weights in place, closed at the end. `record` hears of its passes."""
    from penstock.serve.engine import Engine

    with progress() as tell:
        engine = Engine.load(
            folder,
            ask,
            device=machine.device,
            cache=machine.cache_folder,
            plan=plan,
            threads=machine.threads,
            exact=machine.exact,
            on_progress=tell,
        )
    for line in engine.notes:
        note(line)
    if record is not None:
        engine.session.watchers.append(record.add)
    try:
        yield engine
    finally:
        engine.close()
