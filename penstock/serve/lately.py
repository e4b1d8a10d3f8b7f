"""Takes a machine's rates as the runs of the last days show them.

A probe measures for minutes or seconds; disk and RAM of a shared machine drift by a tenth and more from day to day. So
a rate's seconds are multiplied by

    exp(weighted median of ln(measured seconds / seconds foretold by the rate as it was measured))

over the runs with a phase that the rate dominated. The measurement itself takes part, with the value 0 and the weight
of two runs of now. A run's weight halves every two days: what no run repeats is forgotten. Only the last few count, so
a bad hour of many runs is outvoted by as few good ones. The factor is bounded. One run alone changes nothing, and one
disturbed run beside others moves the median by one place at most.

Runs tell of the bytes of a disk whatever their format. Of the processor they tell only the bytes or flops of one
format, from runs of models in that format. Runs that leave neurons out tell of others that do so in the same way. A
machine's runs lie beside its own figures, and count only for these. Runs of a model on another disk than the one that
was measured say nothing of this one.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.planner import dominant
from penstock.planner.explain import lane_name
from penstock.planner.solve import Solved
from penstock.serve.history import Phase, Run, cached, runs
from penstock.spec.ask import Ask
from penstock.spec.machine import Figure, MachineSpec
from penstock.spec.places import CPU, Lane, is_disk
from penstock.units import format_rate

_DAY_S = 86400.0
HALF_LIFE_S, _OLDEST_S = 2 * _DAY_S, 14 * _DAY_S
RECENT = 16  # runs that count for one factor
MEASURED_WEIGHT = 2.0  # of the measurement, in runs of now
MOST_TIMES, MOST_TIMES_ROUGH = 1.5, 2.0  # both ways; rough: where figures were scaled from another machine's
LEAST_TIMES = 1.03  # a smaller factor is none
_LEAST_SHARE = 0.5  # of a phase's predicted seconds that the rate makes up
_LEAST_S = 0.25  # of a phase that counts


@dataclass(frozen=True)
class Taken:
    """Rates of a lane that are taken otherwise than measured. `format`: of the processor's; "*" of a disk's. `term`:
    s_per_byte or s_per_flop. `times`: the factor of their seconds. `runs`: how many were seen, the oldest
    `oldest_s` ago. `figure`: the rate that most of these depended on. `before`, `now`: its seconds as measured, as
    taken. `bounded`: whether runs show a larger factor than is allowed."""

    lane: Lane
    format: str
    term: str
    times: float
    runs: int
    oldest_s: float
    figure: Figure
    before: float
    now: float
    bounded: bool

    def covers(self, figure: Figure) -> bool:
        return _group(figure) == (self.lane, self.format, self.term)

    def __str__(self) -> str:
        was, is_ = (shown(self.term, seconds) for seconds in (self.before, self.now))
        bounded = ", the most that they can do" if self.bounded else ""
        days = max(1, math.ceil(self.oldest_s / _DAY_S))
        since = "day" if days == 1 else f"{days} days"
        return (
            f"{_named(self.figure)}: measured as {was}, taken as {is_}: {self.runs} runs of the last {since} "
            f"took × {self.times:.2f}{bounded}"
        )


@dataclass(frozen=True)
class Lately:
    """A machine as `measured`, and as it is taken (`machine`) by its runs; `taken`: what differs."""

    measured: MachineSpec
    machine: MachineSpec
    taken: tuple[Taken, ...] = ()

    def lines(self, figures: Iterable[Figure] = ()) -> list[str]:
        """A line for each rate that is taken otherwise than measured, and for each of `figures` that is not."""
        kept = dict.fromkeys(figure for figure in figures if not any(taken.covers(figure) for taken in self.taken))
        lines = [str(taken) for taken in self.taken]
        for figure in kept:
            value = self.measured.value(figure)
            if value and figure.term in _TERMS:
                why = "too few runs of the last days depend on it, or they agree"
                lines.append(f"{_named(figure)}: measured as {shown(figure.term, value)}, and taken so: {why}")
        return lines

    def report(self) -> list[dict[str, Any]]:
        """The JSON objects of `taken`."""
        return [
            {
                "lane": taken.lane,
                "op": taken.figure.op,
                "format": taken.format,
                "per": "byte" if taken.term == "s_per_byte" else "flop",
                "measured_s": taken.before,
                "taken_s": taken.now,
                "times": taken.times,
                "runs": taken.runs,
                "oldest_run_s": taken.oldest_s,
            }
            for taken in self.taken
        ]


_TERMS = ("s_per_byte", "s_per_flop")


def why(lately: Lately, solved: Solved, ask: Ask) -> list[str]:
    """Lines for the user: the rates that runs of the last days have shifted, and the rates that this prediction depends
    on most."""
    plan, p, machine, batch = solved.plan, solved.prediction, lately.machine, ask.batch
    prompt = min(ask.prompt_tokens, plan.context - 1)
    position = min(prompt + ask.output_tokens // 2, plan.context - 1)
    first = dominant.of_prompts(plan, p, machine, prompt, batch)
    step = dominant.of_decoding(plan, p, machine, position, batch)
    return lately.lines([each.figure for each in (first, step) if each.share > 0])


def as_runs_show(machine_file: Path, machine: MachineSpec, weights: str, sparsity: str) -> Lately:
    """The machine of a file, as the runs kept beside it show it for models in the format `weights` and what is done
    about neurons that do not fire (`Plan.sparsity`)."""
    return lately(machine, runs(machine_file, machine), weights, sparsity, time.time())


def lately(machine: MachineSpec, seen: Iterable[Run], weights: str, sparsity: str, now_s: float) -> Lately:
    """The machine as runs show it. `seen`: runs that were predicted with its figures, oldest first. `now_s`: seconds
    since 1970."""
    groups: dict[_Group, list[_Seen]] = {}  # oldest first
    value = functools.cache(machine.value)  # it goes through all rates
    for run in seen:
        age_s = abs(now_s - run.at_s)  # a clock that was wrong once must not keep a run for ever
        if age_s > _OLDEST_S or run.sparsity.partition(",")[0] != sparsity:
            continue
        of: dict[_Group, list[Phase]] = {}
        for phase in run.phases:
            if _tells(phase, run, value, weights):
                of.setdefault(_group(phase.dominant.figure), []).append(phase)
        for group, phases in of.items():
            mean = math.fsum(phase.figure_log_ratio for phase in phases) / len(phases)
            groups.setdefault(group, []).append(_Seen(mean, age_s, phases[-1].dominant.figure))
    most, changes, now = MOST_TIMES_ROUGH if machine.rough else MOST_TIMES, list[Taken](), machine
    for (lane, fmt, term), each in groups.items():
        last = each[-RECENT:]
        values = [(one.log_ratio, 0.5 ** (one.age_s / HALF_LIFE_S)) for one in last]
        median = _median([*values, (0.0, MEASURED_WEIGHT)])
        if abs(median) < math.log(LEAST_TIMES):
            continue
        times = math.exp(min(math.log(most), max(-math.log(most), median)))
        figures = [one.figure for one in last]
        figure, oldest_s = max(figures, key=figures.count), max(one.age_s for one in last)
        before, bounded = value(figure), abs(median) >= math.log(most)
        taken = Taken(lane, fmt, term, times, len(last), oldest_s, figure, before, before * times, bounded)
        changes.append(taken)
        now = now.longer(taken.covers, times)
    return Lately(machine, now, tuple(changes))


_Group = tuple[Lane, str, str]


class _Seen(NamedTuple):
    """What a run showed of rates that drift together: the mean over its phases of ln of their factor."""

    log_ratio: float
    age_s: float
    figure: Figure


def _tells(phase: Phase, run: Run, value: Callable[[Figure], float], weights: str) -> bool:
    """Whether a phase of a run says something of the rate that dominates it. `value`: of a figure, as measured."""
    figure = phase.dominant.figure
    of_disk, of_format = is_disk(figure.lane) and not run.elsewhere, figure.lane == CPU and run.weights == weights
    if figure.term not in _TERMS or not (of_disk or of_format):
        return False
    measured = value(figure)
    long = phase.dominant.share >= _LEAST_SHARE and run.passes(phase) * phase.measured_s >= _LEAST_S
    return long and measured > 0 and not cached(phase, measured)


def shown(term: str, seconds: float) -> str:
    """Seconds of a byte or a flop as a speed, such as '3.66 GB/s'."""
    return format_rate(1 / seconds) if term == "s_per_byte" else f"{1e-9 / seconds:.0f} GFLOP/s"


def _group(figure: Figure) -> _Group:
    """What drifts together: all bytes of a disk, all bytes or flops of a format on the processor."""
    return figure.lane, "*" if is_disk(figure.lane) else figure.format, figure.term


def _median(values: list[tuple[float, float]]) -> float:
    """The weighted median; of all values that are one, that nearest to 0. `values`: (value, weight)."""
    half, below, middle = sum(weight for _, weight in values) / 2, 0.0, list[float]()
    for value, weight in sorted(values):
        if below <= half * (1 + 1e-12) and below + weight >= half * (1 - 1e-12):
            middle.append(value)
        below += weight
    lo, hi = middle[0], middle[-1]
    return 0.0 if lo <= 0 <= hi else min(lo, hi, key=abs)


def _named(figure: Figure) -> str:
    """'the disk, load', 'the processor, ffn in int4'."""
    op = "" if figure.op == "*" else f", {figure.op}"
    of = "" if figure.format == "*" else f" in {figure.format}"
    rows = f", up to {figure.rows} row{'s' * (figure.rows > 1)}" if figure.rows else ""
    return f"{lane_name(figure.lane)}{op}{of}{rows}"
