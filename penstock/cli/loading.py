"""Loads an engine and opens its trace by the flags of a command. `run`, `demo`, `bench`, `eval`, `profile` share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.cli.options import Machine, file_to_write, where
from penstock.cli.output import note, progress
from penstock.errors import PenstockError
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.units import parse_bytes

if TYPE_CHECKING:
    from threading import Event

    from penstock.serve.cached import Require
    from penstock.serve.engine import Engine
    from penstock.serve.loading import Loading
    from penstock.serve.source import Source
    from penstock.serve.tokenizer import Tokenizer
    from penstock.serve.trace_file import TraceFile
    from penstock.spec.model import ModelSpec
    from penstock.spec.plan import Plan

# When a packed copy is written that a checkpoint lacks: before the caller has the engine; when the caller is done, or
# was ended by Ctrl-C or a closed pipe, but not where the caller failed; or in a thread beside the caller, who waits for
# it at the end for so many seconds.
When = Literal["first", "after", "beside"]
_ENDING_S = 5.0


def packed_model(
    model: str,
    weights: str | None,
    machine: Machine,
    cache_limit: str | None = None,
    chat: bool = False,
    unpacked: bool = False,
    sparsity: str = "auto",
    plan: Plan | None = None,
    require: Require | None = None,
    ends: Event | None = None,
) -> Source:
    """The packed model of MODEL. A model of the Hub is downloaded first, and a checkpoint is packed into the cache; a
    device that is not here is refused before that. `sparsity`, `plan`: one that the checkpoint cannot have is refused
    before that too. `chat`, `unpacked`, `require`: as for `resolve`. `ends`: as for `progress`. Raises BadRequest, and
    as `resolve`."""
    from penstock.runtime.device.choose import require_present
    from penstock.serve.source import resolve

    limit_bytes = None if cache_limit is None else parse_bytes(cache_limit, "--cache-limit")
    require_present(machine.device)
    with progress(ends) as tell:
        return resolve(
            model,
            weights=weights,
            cache=machine.cache_folder,
            host_memory_bytes=machine.host_memory_bytes,
            cache_limit_bytes=limit_bytes,
            verify=not machine.no_verify,
            on_progress=tell,
            chat=chat,
            where=where(),
            unpacked=unpacked,
            require=_requiring(sparsity, plan, weights, require),
        )


def _requiring(sparsity: str, plan: Plan | None, weights: str | None, more: Require | None) -> Require:
    """What is asked of a checkpoint before it is packed. `more`: is asked too."""
    from penstock.graph.check_plan import check_plan
    from penstock.planner.firing import require_unpacked

    def require(spec: ModelSpec, where: str) -> None:
        require_unpacked(sparsity, spec, where)
        if more is not None:
            more(spec, where)
        if plan is not None:
            from penstock.store.own import own_model

            check_plan(plan, *own_model(Path(where), parse_format(weights) if weights else None))

    return require


@contextmanager
def tracing(name: str | None, title: str) -> Iterator[TraceFile | None]:
    """Yields the file of --trace, which is whole at the end, and holds what was done until then after Ctrl-C; None
    where no trace is wanted. Raises BadRequest where it cannot be written."""
    if name is None:
        yield None
        return
    from penstock.serve.trace_file import TraceFile

    with TraceFile(file_to_write(name, "--trace"), title) as record:
        yield record
    if record.left_out:
        note(f"the trace {name} would be too long: its last {record.left_out} tasks are left out")


def loading(machine: Machine, **more: Any) -> Loading:
    """How a model is loaded by the flags of `Machine`. `more`: other fields of `Loading`."""
    from penstock.serve.loading import Loading

    return Loading(
        device=machine.device,
        cache=machine.cache_folder,
        threads=machine.threads,
        kernels=machine.isa,
        exact=machine.exact,
        verify=not machine.no_verify,
        **more,
    )


@contextmanager
def loaded(
    source: Source,
    ask: Ask,
    machine: Machine,
    plan: Plan | None = None,
    record: TraceFile | None = None,
    tokenizer: Tokenizer | None = None,
    beside_bytes: int = 0,
    guide_bytes: int = 0,
    family: str | None = None,
    prompt: Sequence[int] = (),
    copy: When = "after",
    ends: Event | None = None,
) -> Iterator[Engine]:
    """Yields an engine with its weights in place, and closes it at the end. `copy`: when a packed copy that the model
    lacks is written. Where it cannot be written that is noted, and the caller's work stands. `record`: a trace of the
    engine's passes. `tokenizer`: the model's, where it is open already. `beside_bytes`, `guide_bytes`, `family`,
    `prompt`: as for `Loading`. `ends`: as for `progress`. Raises as `Engine.open`."""
    from penstock.serve.engine import Engine

    how = loading(
        machine,
        plan=plan,
        tokenizer=tokenizer,
        beside_bytes=beside_bytes,
        guide_bytes=guide_bytes,
        family=family,
        prompt=tuple(prompt),
    )
    with progress(ends) as tell:
        engine = Engine.open(source, ask, how, tell)
    try:
        if copy == "first":
            _write_copy(engine)
        elif copy == "beside":
            engine.begin_copy(note, lambda text, _, total: None if total else note(text))
        for line in engine.notes:
            note(line)
        if record is not None:
            engine.session.watchers.append(record.add)
        try:
            yield engine
        except (KeyboardInterrupt, BrokenPipeError):  # the caller is done early
            if copy == "after" and engine.lacks_copy:
                note("writes the packed copy, which the next run starts from; Ctrl-C ends that too")
                _write_copy(engine)
            raise
        if copy == "after":
            _write_copy(engine, "the answer is whole, but ")
        elif copy == "beside":
            engine.end_copy(_ENDING_S)
    finally:
        engine.close()


def _write_copy(engine: Engine, else_said: str = "") -> None:
    """Writes the packed copy that the model lacks. Where that fails, it is noted after `else_said`."""
    from penstock.serve.copying import why_not_written

    try:
        with progress() as tell:
            engine.write_copy(tell)
    except (PenstockError, OSError) as error:
        note(f"{else_said}{why_not_written(error)}")
