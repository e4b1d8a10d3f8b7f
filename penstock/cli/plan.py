"""`penstock plan`: shows where everything would go, and how fast it would be, without reading weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import penstock
from penstock.cli.loading import tracing
from penstock.cli.options import (
    Json,
    Machine,
    Shape,
    SharedWorkload,
    TraceName,
    Weights,
    Why,
    as_path,
    file_to_write,
    read_text,
    where,
)
from penstock.cli.output import fits, fitted, note, print_json, progress
from penstock.cli.writing import writing
from penstock.errors import BadRequest

if TYPE_CHECKING:
    from penstock.hubs.listing import Several
    from penstock.planner.explain import Band, Limit
    from penstock.planner.firing import Firing
    from penstock.planner.frontier import Point
    from penstock.planner.predict import Prediction
    from penstock.planner.routing import RouterTrace
    from penstock.planner.solve import Solved
    from penstock.planner.what_if import WhatIf
    from penstock.serve.lately import Lately
    from penstock.serve.trace_file import TraceFile
    from penstock.spec.ask import Ask
    from penstock.spec.format import Format
    from penstock.spec.machine import MachineSpec
    from penstock.spec.model import ModelSpec

_TRACED_TOKENS = 16  # tokens in the trace of a prediction; further tokens look alike
_MACHINES = Path(penstock.__file__).parent / "machines"

MachineName = Annotated[
    str | None, Option("--machine", metavar="NAME", help="A bundled machine, or a file of `penstock probe --json`.")
]
AnswersName = Annotated[
    str | None,
    Option(
        "--answers",
        metavar="FILE",
        help="Routers say what a run's did, and as many neurons fire: a file of `run --record`.",
    ),
]
SvgName = Annotated[
    str | None, Option("--svg", metavar="FILE", help="Also draw it: what fills each tier, what each lane does.")
]


def plan(
    model: Shape,
    machine: Machine,
    work: SharedWorkload,
    weights: Weights = None,
    machine_file: MachineName = None,
    svg: SvgName = None,
    trace: TraceName = None,
    answers: AnswersName = None,
    compare: Annotated[
        bool, Option("--compare", help="Also list every plan that was compared: speed, what binds, bytes per tier.")
    ] = False,
    why: Why = False,
    as_json: Json = False,
) -> None:
    """Where everything would go, how fast it would be, and what would make it faster.

    Reads the model's config.json, or a GGUF file's header, and no weights. Of a model of the Hub that is not here no
    more is downloaded; where it is there in several GGUF files, a line for each says what it would do here. --trace
    writes the predicted timeline: the prompt and the first tokens. With --objective throughput, --compare also shows
    which blocks of sequences are worth their time: seconds of a block against tokens a second.
    """
    machine.prepare()
    if trace is not None and svg is not None and file_to_write(trace, "--trace") == file_to_write(svg, "--svg"):
        raise BadRequest(f"--trace and --svg both name {svg}: one would replace the other")
    from penstock.hubs.listing import Several
    from penstock.serve.named import to_plan
    from penstock.spec.format import parse_format

    own = parse_format(weights) if weights else None
    how = _How(machine, work, own, machine_file, answers, compare, why, as_json)
    try:
        with (
            tracing(trace, f"penstock plan {model}, predicted") as record,
            _drawing(svg) as draw,
            progress() as tell,
            to_plan(model, where(), tell) as path,
            _no_collector(),
        ):
            _plan_one(path, as_path(model).name or model, how, record, draw)
    except Several as several:
        if any((svg, trace, answers, compare)):
            raise
        _plan_files(several, how)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Without the collector of cycles: planning makes few. Off from the start it saved 7 % of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class _How:
    """The flags, but those that name files to write."""

    machine: Machine
    work: SharedWorkload
    weights: Format | None
    machine_file: str | None
    answers: str | None
    compare: bool
    why: bool
    as_json: bool


def _plan_one(path: Path, name: str, how: _How, record: TraceFile | None, draw: Callable[[str], None] | None) -> None:
    from penstock.planner import explain
    from penstock.planner.room import cost_of_context, grown
    from penstock.planner.solve import settle_context, solve
    from penstock.planner.what_if import what_if
    from penstock.serve.planning import describe
    from penstock.store.packed import part_disks

    machine = how.machine
    spec, fmt = describe(path, how.weights, not machine.no_verify, to_plan=True)
    ask = how.work.ask(machine)
    lately = _lately(how, _figures(how.machine_file, machine, ask), ask, spec, fmt)
    figures, disks = lately.machine, part_disks(path)
    routers, firing, not_trained = _known(path, spec, ask, how)
    kinds = {"every": how.compare, "may_plan": how.machine_file is not None}

    def solving(one: Ask) -> Solved:
        return solve(one, spec, fmt, figures, disks, trace=routers, firing=firing, **kinds, keep=True)

    context_told: str | None
    if ask.grow_context:
        ask, solved, context_told = grown(ask, spec, solving)
    else:
        solved = solving(ask)
        context_told = cost_of_context(ask, spec, solved, solving)
    if how.machine_file is None:
        from penstock.kernels.cpu import chosen_isa

        solved = replace(solved, reasons=(*solved.reasons, chosen_isa(machine.isa)[1]))
    others = what_if(solved, ask, figures, routers, firing)
    points: tuple[Point, ...] = ()
    if how.compare and ask.objective == "throughput":
        from penstock.planner import frontier

        def again(fewer: Ask) -> Solved:
            return solve(fewer, spec, fmt, figures, disks, trace=routers, firing=firing)

        points = frontier.frontier(solved, ask, figures, again)
    band = explain.Band() if how.machine_file is not None else _band(machine, solved, lately.measured, ask.batch)
    if draw is not None:
        from penstock.planner import picture

        draw(picture.svg(solved, ask, figures, name, band, explain.others(solved, others, ask), points))
    if record is not None:
        from penstock.planner.timelines import timelines

        for timeline, p in timelines(solved.plan, settle_context(ask, spec), figures, _TRACED_TOKENS, routers):
            record.add(timeline, p)
    if how.as_json:
        report = _report(solved, explain.limits(solved, ask, figures), band, others, lately, not_trained)
        print_json(report | ({"frontier": frontier.to_json(points)} if points else {}))
        return
    print(fitted(explain.table(solved, ask, figures, band, others, why=how.why)))
    if not_trained:
        print(fitted(f"does not run yet: {not_trained}"))
    if context_told is not None:
        print(fitted(context_told))
    if how.why and how.machine_file is None:  # other machines' figures are data sheets', which no run shifts
        from penstock.serve import lately as rates

        print(fitted("\n".join(f"· {line}" for line in rates.why(lately, solved, settle_context(ask, spec)))))
    if how.compare:
        from penstock.planner.compare import comparison, listed

        table = comparison(solved)
        print(fitted(f"\n{table if fits(table) else listed(solved)}"))
    if points:
        print(fitted(f"\n{frontier.table(points)}"))


def _plan_files(several: Several, how: _How) -> None:
    """Plans each of several GGUF files on the Hub. Raises as `peek_each`, and for flags."""
    from penstock.cli.plan_files import plan_each, report, table
    from penstock.hubs.headers import peek_each
    from penstock.planner.solve import solve
    from penstock.serve.planning import describe
    from penstock.store.packed import part_disks

    ask = how.work.ask(how.machine)
    figures = _figures(how.machine_file, how.machine, ask)

    def solved(path: Path) -> Solved:
        spec, fmt = describe(path, how.weights, to_plan=True)
        machine = _lately(how, figures, ask, spec, fmt).machine
        return solve(ask, spec, fmt, machine, part_disks(path), may_plan=how.machine_file is not None)

    with progress() as tell, peek_each(several, where(), tell) as peeked:
        planned = list(plan_each(several, peeked, solved))
    if how.as_json:
        print_json(report(planned))
    else:
        print(table(planned))
    note(several.message.partition(";")[0])


def _report(
    solved: Solved, limits: Iterable[Limit], band: Band, others: WhatIf, lately: Lately, not_trained: str
) -> dict[str, Any]:
    """The JSON object: the plan as `--plan` reads it, and the figures of the table. `not_trained`: of `_known`."""
    from penstock.planner.compare import to_json
    from penstock.spec import plan as plans

    def then(other: Prediction) -> dict[str, Any]:
        change = other.decode_tokens_per_s / solved.prediction.decode_tokens_per_s - 1
        return {"decode_tokens_per_s": other.decode_tokens_per_s, "ttft_s": other.ttft_s, "decode_change": change}

    def beside(other: Prediction | None) -> dict[str, Any] | None:
        return None if other is None else then(other)

    return {
        "plan": plans.to_json(solved.plan),
        "predicted": solved.prediction.to_json(),
        "band": _band_report(band, solved.prediction),
        "limits": {limit.tier: {"used_bytes": limit.used_bytes, "limit_bytes": limit.limit_bytes} for limit in limits},
        "one_more_gib": beside(others.one_more_gib),
        "one_more_device_gib": beside(others.one_more_device_gib),
        "faster_disk": beside(others.faster_disk),
        "faster_link": beside(others.faster_link),
        "commands": {what: {**then(other), "condition": given or None} for what, given, other in others.commands},
        "other_formats": {fmt.name: beside(other) for fmt, other in others.other_formats},
        "strategy": solved.strategy,
        "cannot_run": solved.plan.target.spec.cannot_run or solved.compared[0].candidate.cannot_run or not_trained,
        "not_yet": to_json(solved.not_yet),
        "reasons": solved.reasons,
        "compared": to_json(solved.compared),
        "rates": lately.report(),
    }


def _lately(how: _How, figures: MachineSpec, ask: Ask, spec: ModelSpec, fmt: Format) -> Lately:
    """The figures as runs of the last days show them, where they are this machine's."""
    from penstock.serve.lately import Lately, as_runs_show

    if how.machine_file is not None:
        return Lately(figures, figures)
    from penstock.planner.firing import sparsity_of
    from penstock.runtime.probe import machine_file

    file = machine_file(how.machine.cache_folder, how.machine.isa)
    return as_runs_show(file, figures, fmt.name, sparsity_of(ask.sparsity, spec))


def _band(machine: Machine, solved: Solved, figures: MachineSpec, batch: int) -> Band:
    """The error band of a prediction for this machine, from the runs that it has done."""
    from penstock.runtime.probe import machine_file
    from penstock.serve.history import error_band

    return error_band(machine_file(machine.cache_folder, machine.isa), figures, solved.prediction, solved.plan, batch)


def _band_report(band: Band, p: Prediction) -> dict[str, Any]:
    """The JSON of a band. `decode`, `ttft`: the factor of the band less 1; the band reaches from prediction ÷ factor to
    prediction · factor. Then the runs that each width comes from, and both intervals."""
    from penstock.planner.explain import spread

    return {
        "decode": band.decode.factor - 1,
        "ttft": band.ttft.factor - 1,
        "runs": band.decode.runs,
        "ttft_runs": band.ttft.runs,
        "assumed": {"decode": not band.decode.known, "ttft": not band.ttft.known},
        "decode_tokens_per_s": spread(p.decode_tokens_per_s, band.decode.factor),
        "ttft_s": spread(p.ttft_s, band.ttft.factor),
    }


def _drawing(name: str | None) -> AbstractContextManager[Callable[[str], None] | None]:
    """Yields a function that writes a picture to the file of --svg; None where no picture is wanted. Raises BadRequest
    where the file cannot be written, if possible before the plan is made."""
    if name is None:
        return nullcontext()
    from penstock.planner import picture
    from penstock.store.files import Kind

    return writing(name, "--svg", Kind("a picture of `penstock plan`", picture.BEGINS.encode()))


def _known(path: Path, spec: ModelSpec, ask: Ask, how: _How) -> tuple[RouterTrace | None, Firing | None, str]:
    """What routers say or how often neurons fire, how many do, and what has to be done before the plan runs; "" if
    nothing has. Raises BadRequest for what is damaged, or of another model."""
    from penstock.planner.firing import untrained
    from penstock.serve.planning import firing_of, routers_of, with_facts

    beside = with_facts(path, spec, how.weights, how.machine.cache_folder)
    firing = firing_of(beside, spec, ask.sparsity)
    not_trained = untrained(ask.sparsity, spec, firing)
    if how.answers is None:
        return routers_of(beside, spec, ask.sparsity), firing, not_trained
    return *_replayed(how.answers, beside, spec, ask, firing), not_trained


def _replayed(
    name: str, path: Path, spec: ModelSpec, ask: Ask, firing: Firing | None
) -> tuple[RouterTrace, Firing | None]:
    """The answers of routers in a file of `run --record`, or which neurons count, and how many. `firing`: how many are
    known to otherwise. Raises BadRequest where they are of another model."""
    from penstock.planner import recorded_sets
    from penstock.planner.routing import replayed
    from penstock.spec.answers import MOST_FILE_BYTES, loads
    from penstock.store.packed import is_packed, orders_of, read_manifest

    answers = loads(read_text(name, MOST_FILE_BYTES), name)
    answers.check(spec, name)
    if not answers.live:
        return replayed(answers, name), firing
    recorded_sets.require_kind(answers, ask.sparsity, name)
    orders = orders_of(path, read_manifest(path), spec) if is_packed(path) else {}
    return recorded_sets.trace_of(answers, orders, name), recorded_sets.firing_of(answers, spec, firing, name)


def _figures(name: str | None, machine: Machine, ask: Ask) -> MachineSpec:
    """The figures of the machine to plan for: of this one with the device that --device chooses, of a named one with
    its own device."""
    figures = _machine(name, machine)
    if name is not None and machine.device not in ("none", "emulated"):
        return figures
    from penstock.runtime.device.choose import choose

    with progress() as tell:
        return choose(machine.device, figures, ask.device_memory_bytes, machine.cache_folder, tell).machine


def _machine(name: str | None, machine: Machine) -> MachineSpec:
    """The machine of a file, a bundled machine by its name, or with None this one. Raises BadRequest."""
    from penstock.spec import machine as machines

    if name is None:
        from penstock.runtime.probe import load_or_probe

        with progress() as tell:
            return load_or_probe(machine.cache_folder, tell, isa=machine.isa)
    bundled = {path.stem: path for path in sorted(_MACHINES.glob("*.json"))}
    if not as_path(name).exists() and name not in bundled:
        hint = f"; bundled are {', '.join(bundled)}" if bundled else ""
        raise BadRequest(f"--machine {name}: there is no such file{hint}")
    if machine.threads is not None:
        note(f"--threads {machine.threads} says nothing about --machine {name}")
    if machine.isa is not None:
        note(f"--isa {machine.isa} says nothing about --machine {name}")
    if name in bundled:
        return machines.loads(read_text(str(bundled[name])), name)
    from penstock.runtime.probe_begins import with_short_begins

    return with_short_begins(machines.loads(read_text(name), name))
