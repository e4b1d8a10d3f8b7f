"""Predicted beside published: ratios, medians, and which published figures no machine could have reached."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import penstock
from bench.papers.published import METRICS, UNSUPPORTED, Cause, Published, cause_of
from bench.papers.stand_ins import STAND_INS
from bench.papers.traits import Traits, applied, fitting_tables
from penstock.errors import PenstockError
from penstock.serve.planning import describe
from penstock.spec import machine as machines
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.places import CPU

# Of all other metrics more is better.
SMALLER_IS_BETTER = frozenset(
    {"ttft_s", "decode_s", "latency_s", "seconds", "slowdown", "device_gb", "host_gb", "predictor_weights"}
)
assert set(METRICS) >= SMALLER_IS_BETTER
SPEEDS = frozenset(
    {"throughput", "decode_tokens_per_s", "ttft_s", "decode_s", "latency_s", "seconds", "speedup", "slowdown"}
)
MEMORY = frozenset({"device_gb", "host_gb"})
ROUNDING = 0.02  # a figure so much beyond the bound may be one of two digits
_TIMES = "×"
FAR_OFF = 1.5  # a ratio beyond this, or its inverse, is an outlier, which a sentence explains
MEDIAN = (0.8, 1.25)  # what a paper's median speed ratio should be within, as its systems were built


@dataclass(frozen=True, slots=True)
class Predicted:
    """`value`: in the row's metric and unit. `bound`: the best that physics allows in that metric on that machine
    (None: no bound applies), e.g. link bytes/s peak / bytes a token must cross. `note`: what was assumed; why it is far
    off, if it is (one sentence). `is_policy`: the plan does what the row's system did; if not, it is a stand-in."""

    value: float
    bound: float | None
    note: str = ""
    is_policy: bool = True


# With a system's traits, or none of them. None, or what the planner raises: the figure is left out.
Predictor = Callable[[Published, Traits], Predicted | None]


@cache
def machine_of(name: str, traits: Traits = ()) -> MachineSpec:
    """A test bed: a machine that comes with penstock, as a system with these traits uses it. `name`: with `×0.7` behind
    it the CPU and its RAM are so many times as fast."""
    known, _, times = name.partition(_TIMES)
    file = Path(penstock.__file__).parent / "machines" / f"{known}.json"
    machine = machines.loads(file.read_text(encoding="utf-8"), known)
    if times:
        rates = (
            replace(r, s_per_byte=r.s_per_byte / float(times), s_per_flop=r.s_per_flop / float(times))
            if r.lane == CPU else r
            for r in machine.rates
        )  # fmt: skip
        machine = replace(machine, rates=tuple(rates))
    return applied(machine, traits)


@cache
def model_of(name: str, weights: str | None = None) -> tuple[ModelSpec, Format]:
    """A bundled shape, or what stands for it (`stand_ins`), in a format, by default the checkpoint's own."""
    fmt = parse_format(weights) if weights else None
    if name in STAND_INS:
        return STAND_INS[name](), fmt or parse_format("float16")
    return describe(Path(name), fmt, to_plan=True)


def is_far_off(ratio: float) -> bool:
    return not 1 / FAR_OFF <= ratio <= FAR_OFF


def speed_ratio(row: Published, value: float) -> float | None:
    """Above 1 where a prediction promises too fast, of times as of speeds; None of what is no speed."""
    if row.metric not in SPEEDS:
        return None
    return row.value / value if row.metric in SMALLER_IS_BETTER else value / row.value


def explained(row: Published, value: float, bound: float | None, *notes: str) -> Predicted:
    """What is predicted, with its notes, and after them what `told` says of it."""
    note = "; ".join(filter(None, (*notes, told(row, value))))
    return Predicted(value, bound, note, is_policy=not is_beyond(row))


def told(row: Published, value: float) -> str:
    """Why a prediction is far off, where it is, and of any, why no policy can reproduce its figure; else nothing."""
    cause = cause_of(row)
    return cause.text if cause is not None and (cause.cannot or is_far_off(value / row.value)) else ""


def is_beyond(row: Published) -> bool:
    """Whether no policy can reproduce the figure: by its cause, however near the prediction is."""
    cause = cause_of(row)
    return cause is not None and cause.cannot


@dataclass(frozen=True)
class Row:
    """`predicted`: as penstock would run the policy. `as_built`: with the traits of the row's system. `bound`: None
    where physics has none. `is_policy`: see Predicted. `undone`: of a far-off row, the prediction with what its cause
    names alone, traits or another reading; None where it names nothing."""

    figure: Published
    predicted: float
    as_built: float
    bound: float | None
    respects_physics: bool
    is_policy: bool
    undone: float | None
    note: str

    @property
    def cause_tested(self) -> bool:
        """That the row is far off, and no longer where its cause is undone."""
        return self.far_off and self.undone is not None and not is_far_off(self.undone / self.figure.value)

    @property
    def ratio(self) -> float:
        return self.predicted / self.figure.value

    @property
    def built_ratio(self) -> float:
        return self.as_built / self.figure.value

    def speed_ratio(self, built: bool) -> float | None:
        """speed_ratio of one of the two predictions."""
        return speed_ratio(self.figure, self.as_built if built else self.predicted)

    @property
    def far_off(self) -> bool:
        return is_far_off(self.ratio)

    @property
    def judges(self) -> bool:
        """Whether the row's table had no say in the traits' numbers."""
        return self.figure.table not in fitting_tables(self.figure.paper)

    def to_json(self) -> dict[str, object]:
        f = self.figure
        return {
            "paper": f.paper, "table": f.table, "setting": f.setting, "system": f.system, "model": f.model,
            "machine": f.machine, "metric": f.metric, "predicted": self.predicted, "as_built": self.as_built,
            "published": f.value, "ratio": self.ratio, "built_ratio": self.built_ratio,
            "speed_ratio": self.speed_ratio(built=True), "bound": self.bound, "judges": self.judges,
            "respects_physics": self.respects_physics, "is_policy": self.is_policy, "cause_tested": self.cause_tested,
            "undone": self.undone, "note": self.note,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A figure without a prediction. `cause`: what the planner refuses with, or why the model cannot be planned; empty
    where the figure is no prediction of a plan."""

    figure: Published
    cause: str

    def to_json(self) -> dict[str, object]:
        f = self.figure
        return {
            "paper": f.paper, "table": f.table, "setting": f.setting, "system": f.system, "model": f.model,
            "machine": f.machine, "metric": f.metric, "predicted": None, "published": f.value, "cause": self.cause,
        }  # fmt: skip


def respects(metric: str, value: float, bound: float | None) -> bool:
    """Whether a published value is no better than the bound, within rounding."""
    if bound is None:
        return True
    if metric in SMALLER_IS_BETTER:
        return value >= bound * (1 - ROUNDING)
    return value <= bound * (1 + ROUNDING)


def compare(
    figures: Iterable[Published], predictors: Mapping[str, Predictor], traits: Traits
) -> tuple[tuple[Row, ...], tuple[LeftOut, ...]]:
    """Rows of the papers that have a predictor, and their figures without a prediction."""
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for figure in figures:
        if figure.paper not in predictors:
            continue
        predictor, cause = predictors[figure.paper], UNSUPPORTED.get(figure.model, "")
        try:
            found, built = predictor(figure, ()), predictor(figure, traits)
        except PenstockError as refusal:
            found, built, cause = None, None, refusal.message
        if found is None or built is None:
            left_out.append(LeftOut(figure, cause))
            continue
        why, undone = cause_of(figure), None
        if is_far_off(found.value / figure.value) and why is not None:
            try:
                undone = undone_by(why, figure, predictor, traits)
            except PenstockError:  # the planner refuses the changed reading: the cause is untested
                undone = None
        fine = respects(figure.metric, figure.value, found.bound)
        rows.append(Row(figure, found.value, built.value, found.bound, fine, found.is_policy, undone, found.note))
    return tuple(rows), tuple(left_out)


def undone_by(cause: Cause, figure: Published, predictor: Predictor, traits: Traits) -> float | None:
    """The figure's prediction with the traits that a cause names, read as the cause reads it. None if it names
    nothing."""
    if not cause.can_be_undone:
        return None
    undone = predictor(cause.read(figure), tuple(trait for trait in traits if trait.kind in cause.kinds))
    return None if undone is None else undone.value


def once(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows that respect physics, without repeats: one figure printed in several tables counts once."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        f = row.figure
        if row.respects_physics:
            key = (f.paper, f.system, f.against, f.machine, f.model, f.metric, f.prompt, f.value, row.predicted)
            found.setdefault(key, row)
    return tuple(found.values())


def speed_ratio_median(rows: Iterable[Row], built: bool) -> float | None:
    """Of the rows of `once` that are speeds or times: above 1 where more is promised than was printed. `built`: as the
    systems were built; if not, as penstock would run them, where the plan does what the system did."""
    ratios = [ratio for row in once(rows) if built or row.is_policy if (ratio := row.speed_ratio(built)) is not None]
    return statistics.median(ratios) if ratios else None


def memory_ratio_median(rows: Iterable[Row]) -> float | None:
    """Of the rows of `once` that are memory: below 1 where a plan needs less than the paper's system took."""
    ratios = [row.ratio for row in once(rows) if row.figure.metric in MEMORY]
    return statistics.median(ratios) if ratios else None


def is_unknown(row: Row) -> bool:
    """Whether a row is far off and nothing was shown to be why: its cause is told alone, or does not do. Figures that
    no policy can reproduce, or that are better than physics allows, do not count."""
    return row.far_off and row.respects_physics and not row.cause_tested and not is_beyond(row.figure)


def untested_causes(rows: Iterable[Row]) -> int:
    """How many rows of `once` are far off for unknown causes."""
    return sum(map(is_unknown, once(rows)))


def not_reproducible(rows: Iterable[Row]) -> int:
    """Far-off rows of `once` that no policy can reproduce."""
    return sum(row.far_off and is_beyond(row.figure) for row in once(rows))
