"""`penstock plan`: shows where everything would go, and how fast it would be, without reading weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cli.flags import flag
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
    where,
)
from penstock.cli.output import fits, fitted, note, print_json, progress
from penstock.cli.plan_facts import figures_of, known
from penstock.cli.writing import writing
from penstock.errors import BadRequest

if TYPE_CHECKING:
    from penstock.hubs.listing import Several
    from penstock.planner.explain import Band
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


@dataclass(frozen=True)
class Planning:
    """Whose figures a plan goes by, and what is shown beside it."""

    machine_file: str | None = flag("--machine", "NAME", "A bundled machine, or a file of `penstock probe --json`.")
    answers: str | None = flag(
        "--answers", "FILE", "Routers say what a run's did, and as many neurons fire: a file of `run --record`."
    )
    svg: str | None = flag("--svg", "FILE", "Also draw it: what fills each tier, what each lane does.")
    compare: bool = flag(
        "--compare", None, "Also list every plan that was compared: speed, what binds, bytes per tier.", False
    )

    @property
    def is_here(self) -> bool:
        """Whether the plan is for this machine."""
        return self.machine_file is None


def plan(
    model: Shape, machine: Machine, work: SharedWorkload, weights: Weights = None, planning: Planning = Planning(),
    trace: TraceName = None, why: Why = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Where everything would go, how fast it would be, and what would make it faster.

    Reads the model's config.json, or a GGUF file's header, and no weights. Of a model of the Hub that is not here no
    more is downloaded; where it is there in several GGUF files, a line for each says what it would do here. --trace
    writes the predicted timeline: the prompt and the first tokens. With --objective throughput, --compare also shows
    which blocks of sequences are worth their time: seconds of a block against tokens a second.
    """
    machine.prepare()
    svg = planning.svg
    if trace is not None and svg is not None and file_to_write(trace, "--trace") == file_to_write(svg, "--svg"):
        raise BadRequest(f"--trace and --svg both name {svg}: one would replace the other")
    from penstock.hubs.listing import Several
    from penstock.serve.named import to_plan
    from penstock.spec.format import parse_format

    own = parse_format(weights) if weights else None
    how = _How(machine, work, own, planning, why, as_json)
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
        if any((svg, trace, planning.answers, planning.compare)):
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
    planning: Planning
    why: bool
    as_json: bool


class _Planned(NamedTuple):
    """A plan, and what there is to tell of it. `ask`: with the context that it grew to. `figures`: the machine's.
    `routers`: what they were taken to say. `others`: what else would be faster or smaller. `points`: blocks of
    sequences that are worth their time. `context_told`: what the context costs, in a sentence. `not_trained`: of
    `plan_facts.known`."""

    ask: Ask
    lately: Lately
    solved: Solved
    routers: RouterTrace | None
    others: WhatIf
    points: tuple[Point, ...]
    band: Band
    context_told: str | None
    not_trained: str

    @property
    def figures(self) -> MachineSpec:
        return self.lately.machine


def _plan_one(path: Path, name: str, how: _How, record: TraceFile | None, draw: Callable[[str], None] | None) -> None:
    """Plans a model, and shows the plan. `name`: the model's, for the picture. Raises BadRequest."""
    planned = _planned(path, how)
    if draw is not None:
        from penstock.planner import explain, picture

        others = explain.others(planned.solved, planned.others, planned.ask)
        draw(picture.svg(planned.solved, planned.ask, planned.figures, name, planned.band, others, planned.points))
    if record is not None:
        from penstock.planner.solve import settle_context
        from penstock.planner.timelines import timelines

        plan, ask = planned.solved.plan, settle_context(planned.ask, planned.solved.plan.target.spec)
        for timeline, p in timelines(plan, ask, planned.figures, _TRACED_TOKENS, planned.routers):
            record.add(timeline, p)
    if how.as_json:
        print_json(_report(planned))
    else:
        _show(planned, how)


def _planned(path: Path, how: _How) -> _Planned:
    """The plan of the model at this path. Raises BadRequest."""
    from penstock.planner import explain
    from penstock.planner.room import cost_of_context, grown
    from penstock.planner.solve import solve
    from penstock.planner.what_if import what_if
    from penstock.serve.planning import describe
    from penstock.store.packed import part_disks

    machine, planning = how.machine, how.planning
    spec, fmt = describe(path, how.weights, not machine.no_verify, to_plan=True)
    ask = how.work.ask(machine)
    lately = _lately(how, figures_of(planning.machine_file, machine, ask), ask, spec, fmt)
    figures, disks = lately.machine, part_disks(path)
    routers, firing, not_trained = known(path, spec, ask, how.weights, machine, planning.answers)

    def again(one: Ask, **how_far: bool) -> Solved:
        return solve(one, spec, fmt, figures, disks, trace=routers, firing=firing, **how_far)

    solving = partial(again, every=planning.compare, may_plan=not planning.is_here, keep=True)
    context_told: str | None
    if ask.grow_context:
        ask, solved, context_told = grown(ask, spec, solving)
    else:
        solved = solving(ask)
        context_told = cost_of_context(ask, spec, solved, solving)
    if planning.is_here:
        from penstock.kernels.cpu import chosen_isa

        solved = replace(solved, reasons=(*solved.reasons, chosen_isa(machine.isa)[1]))
    others = what_if(solved, ask, figures, routers, firing)
    points: tuple[Point, ...] = ()
    if planning.compare and ask.objective == "throughput":
        from penstock.planner.frontier import frontier

        points = frontier(solved, ask, figures, again)
    band = _band(machine, solved, lately.measured, ask.batch) if planning.is_here else explain.Band()
    return _Planned(ask, lately, solved, routers, others, points, band, context_told, not_trained)


def _show(planned: _Planned, how: _How) -> None:
    """Prints the table of a plan, and what flags want beside it."""
    from penstock.planner import explain

    ask, solved = planned.ask, planned.solved
    print(fitted(explain.table(solved, ask, planned.figures, planned.band, planned.others, why=how.why)))
    if planned.not_trained:
        print(fitted(f"does not run yet: {planned.not_trained}"))
    if planned.context_told is not None:
        print(fitted(planned.context_told))
    if how.why and how.planning.is_here:  # other machines' figures are data sheets', which no run shifts
        from penstock.planner.solve import settle_context
        from penstock.serve import lately as rates

        lines = rates.why(planned.lately, solved, settle_context(ask, solved.plan.target.spec))
        print(fitted("\n".join(f"· {line}" for line in lines)))
    if how.planning.compare:
        from penstock.planner.compare import comparison, listed

        table = comparison(solved)
        print(fitted(f"\n{table if fits(table) else listed(solved)}"))
    if planned.points:
        from penstock.planner import frontier

        print(fitted(f"\n{frontier.table(planned.points)}"))


def _plan_files(several: Several, how: _How) -> None:
    """Plans each of several GGUF files on the Hub. Raises as `peek_each`, and for flags."""
    from penstock.cli.plan_files import plan_each, report, table
    from penstock.hubs.headers import peek_each
    from penstock.planner.solve import solve
    from penstock.serve.planning import describe
    from penstock.store.packed import part_disks

    ask = how.work.ask(how.machine)
    figures = figures_of(how.planning.machine_file, how.machine, ask)

    def solved(path: Path) -> Solved:
        spec, fmt = describe(path, how.weights, to_plan=True)
        machine = _lately(how, figures, ask, spec, fmt).machine
        return solve(ask, spec, fmt, machine, part_disks(path), may_plan=not how.planning.is_here)

    with progress() as tell, peek_each(several, where(), tell) as peeked:
        planned = list(plan_each(several, peeked, solved))
    if how.as_json:
        print_json(report(planned))
    else:
        print(fitted(table(planned)))
    note(several.message.partition(";")[0])


def _report(planned: _Planned) -> dict[str, Any]:
    """The JSON object: the plan as `--plan` reads it, and the figures of the table."""
    from penstock.planner import explain, frontier
    from penstock.planner.compare import to_json
    from penstock.spec import plan as plans

    solved, others, band = planned.solved, planned.others, planned.band
    limits, never = explain.limits(solved, planned.ask, planned.figures), solved.plan.target.spec.cannot_run

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
        "cannot_run": never or solved.compared[0].candidate.cannot_run or planned.not_trained,
        "not_yet": to_json(solved.not_yet),
        "reasons": solved.reasons,
        "compared": to_json(solved.compared),
        "rates": planned.lately.report(),
        **({"frontier": frontier.to_json(planned.points)} if planned.points else {}),
    }


def _lately(how: _How, figures: MachineSpec, ask: Ask, spec: ModelSpec, fmt: Format) -> Lately:
    """The figures as runs of the last days show them, where they are this machine's."""
    from penstock.serve.lately import Lately, as_runs_show

    if not how.planning.is_here:
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
