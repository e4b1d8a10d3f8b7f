"""Keeps predicted and measured speed of every run, and derives the error band of the next prediction from them.

Each machine has a file beside its figures, with a JSON object a line, of the last few hundred runs. A line that cannot
be read (of another version, or half written when the power went) counts as not there.

Only runs that were predicted with the machine's present figures count. After a calibration or another probe the earlier
runs stay in the file, and count again if those figures return. The band of a prediction comes from runs that are like
it: the same lane binds, a pass takes about as long, and the same is done about neurons that do not fire. So runs of a
tiny model say nothing of a large one, nor do runs that ask predictors of runs that compute all.

Predictions take some figures as the runs of the last days show them (`serve/lately`). Runs are kept under the measured
figures all the same, so such a shift does not make earlier runs count as another machine's.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import BadRequest, BrokenModel, StorageFailed
from penstock.graph.tasks import Pass
from penstock.planner import dominant
from penstock.planner.dominant import Dominant
from penstock.planner.explain import Band, Width
from penstock.planner.predict import Prediction
from penstock.spec import codec
from penstock.spec import plan as plans
from penstock.spec.machine import MachineSpec
from penstock.spec.places import CPU, GPU, is_disk
from penstock.spec.plan import Plan
from penstock.store.files import read_text, write_bytes
from penstock.units import MIB

if TYPE_CHECKING:  # it brings numpy, which planning does without
    from penstock.serve.generation import Generation

_KEPT, _RECENT = 500, 50  # runs in a file; alike runs that a band comes from
_LEAST_STEPS = 4  # decode passes of a run that is kept
_MOST_STEPS = 1 << 31  # of one that a damaged file may hold
_ENOUGH_RUNS = 3
LEAST_RAM_BYTES = 64 * MIB  # twice a large L3 cache: less tells nothing of the RAM
# Factors of a band. The least is for predictions that were all right, since machines drift by as much in an hour.
# Beyond the most a band says nothing any more.
_LEAST, _MOST = 1.1, 100.0
_ROUGH = 1.5  # where figures were scaled from another machine's, and no runs are known
# Where others had cores besides during so large a share of these measurements: they may have them in the run too.
_CROWDED, _ROUGH_CROWDED = 0.1, 2.0
_SHARE_WITHIN = 0.8  # of runs whose error was within the band
_DECADES = 1.0  # two predicted times that lie so far apart have likeness 0
_OTHER_FORMAT = 0.5  # the likeness of a run in another format: other kernels, the same disk and RAM
_LEAST_ALIKE = 0.25  # the likeness of a run that counts
_ENOUGH_ALIKE = 2.0  # the sum of the likenesses of all runs that count


@dataclass(frozen=True)
class Phase:
    """One of the two phases of a run: until the first tokens, or a decode pass. `bound_by`: the lane that was predicted
    to be busiest. `dominant`: the machine's figure that `predicted_s` depends on most. `taken`: how many times as long
    as measured the prediction took that figure to be, by the runs of the days before."""

    predicted_s: float
    measured_s: float
    bound_by: str
    dominant: Dominant
    taken: float = 1.0

    @property
    def log_ratio(self) -> float:
        """ln(measured seconds / predicted seconds)."""
        return math.log(self.measured_s) - math.log(self.predicted_s)

    @property
    def figure_log_ratio(self) -> float:
        """ln of how many times as long as measured the dominant figure takes, if it alone is to blame."""
        return self.log_ratio + math.log(self.taken)

    def likeness(self, predicted_s: float, bound_by: str) -> float:
        """How much this phase tells of a prediction of `predicted_s` that is bound by this lane, from 0 to 1. It is 1
        less the decades between the two predicted times, and 0 where another lane binds."""
        if bound_by != self.bound_by or not predicted_s > 0:
            return 0.0
        return max(0.0, 1 - abs(math.log10(predicted_s) - math.log10(self.predicted_s)) / _DECADES)


@dataclass(frozen=True)
class Run:
    """One run, as it is kept.

    figures       the hash of the machine's figures (`figures_id`)
    plan          the hash of the plan
    weights       the format of the weights
    decode_steps  the number of decode passes, which took `decode_s` seconds together
    first, step   until the first tokens, and an average decode pass
    sparsity      the plan's sparsity, the share of values that attention reads if not all, and whether records are
                  asked for. Older versions did not keep it: their runs count as "off"
    at_s          when the run ended, in seconds since 1970. 0 for older versions, which did not keep it
    elsewhere     the model lay on another disk than the one that was measured
    read_ahead    the prompt was begun while weights were loaded. Then `first` is only what was left of it, and cannot
                  be held beside a prediction
    """

    figures: str
    plan: str
    weights: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    decode_steps: int
    decode_s: float
    first: Phase
    step: Phase
    sparsity: str = "off"
    at_s: float = 0.0
    elsewhere: bool = False
    read_ahead: bool = False

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that may be held beside what was predicted."""
        return (self.step,) if self.read_ahead else (self.first, self.step)

    def passes(self, phase: Phase) -> int:
        """How many passes a phase of this run had. The phase until the first tokens counts as one pass."""
        return self.decode_steps if phase is self.step else 1


def cached(phase: Phase, s_per_byte: float) -> bool:
    """Whether the bytes that a phase's dominant figure prices may have been in a cache: such a run is faster than the
    RAM, which the probe measured. `s_per_byte`: what the figure is now, as measured."""
    figure, share = phase.dominant.figure, phase.dominant.share
    if (figure.lane, figure.term) != (CPU, "s_per_byte"):
        return False
    return share * phase.predicted_s / (s_per_byte * phase.taken) < LEAST_RAM_BYTES


def figures_id(machine: MachineSpec) -> str:
    """A hash of the machine's figures that predictions without a device use. Its memory, which changes all the time,
    is left out."""

    def of_host(lane: str) -> bool:
        return lane == CPU or is_disk(lane)

    rates = sorted((rate for rate in machine.rates if of_host(rate.lane)), key=repr)
    sharing = sorted((s for s in machine.sharing if of_host(s.lane) and of_host(s.beside)), key=repr)
    return hashlib.sha256(repr((machine.threads, rates, sharing)).encode()).hexdigest()[:16]


def plan_hash(plan: Plan) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a plan's JSON."""
    return hashlib.sha256(plans.dumps(plan).encode()).hexdigest()[:16]


def step_s(prediction: Prediction, plan: Plan, batch: int) -> float:
    """Predicted seconds of a decode pass of `batch` sequences, or of as many as the plan has at once."""
    return min(batch, plan.sequences) / prediction.decode_tokens_per_s


def history_file(machine_file: Path) -> Path:
    """The file of runs beside a machine's file."""
    return machine_file.with_suffix(".runs.jsonl")


def note_run(
    machine_file: Path, machine: MachineSpec, plan: Plan, prediction: Prediction, generation: Generation,
    reads: Sequence[Pass] = (), taken: MachineSpec | None = None, folder: Path | None = None,
) -> None:  # fmt: skip
    """Keeps a run. `machine`: with its figures as measured; `taken`: as the prediction took them, where that differs.
    `reads`: the passes that it predicts for the prompts, where these are others than the plan's. `folder`: the model's.
    Its disk may be another one than the disk that was measured, on which the machine's file lies. If the file cannot be
    written, nothing is kept and nothing is raised, since the answer is good."""
    taken = taken or machine
    steps, batch = generation.decode_steps, generation.batch
    if steps < _LEAST_STEPS:
        return
    prompt = max(1, generation.prompt_tokens)
    position = min(prompt + steps // 2, plan.context - 1)

    def phase(predicted_s: float, measured_s: float, bound_by: str, most: Dominant) -> Phase:
        before, now = machine.value(most.figure), taken.value(most.figure)
        return Phase(predicted_s, measured_s, bound_by, most, now / before if before else 1.0)

    run = Run(
        figures=figures_id(machine),
        plan=plan_hash(plan),
        weights=plan.target.weights.name,
        batch=batch,
        prompt_tokens=generation.prompt_tokens,
        output_tokens=generation.output_tokens,
        decode_steps=steps,
        decode_s=generation.decode_s,
        first=phase(
            prediction.ttft_s,
            generation.batch_ttft_s,
            prediction.ttft_bound_by,
            dominant.of_prompts(plan, prediction, taken, prompt, batch, reads),
        ),
        step=phase(
            step_s(prediction, plan, batch),
            generation.decode_s / steps,
            prediction.bound_by,
            dominant.of_decoding(plan, prediction, taken, position, batch),
        ),
        sparsity=_sparsity(plan),
        at_s=time.time(),
        elsewhere=folder is not None and not _on_one_disk(folder, machine_file.parent),
        read_ahead=generation.read_ahead,
    )
    with suppress(OSError):
        file = history_file(machine_file)
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [*_lines(file)[1 - _KEPT :], json.dumps(codec.to_json(run))]
        write_bytes(file, ("\n".join(lines) + "\n").encode())


def _on_one_disk(one: Path, other: Path) -> bool:
    """Whether two folders are on one file system. True if the system cannot say."""
    try:
        return one.stat().st_dev == other.stat().st_dev
    except OSError:
        return True


def runs(machine_file: Path, machine: MachineSpec) -> list[Run]:
    """The runs that were predicted with the figures that this machine has now, as measured, oldest first."""
    figures, kept = figures_id(machine), []
    for line in _lines(history_file(machine_file)):
        if figures not in line:  # to parse it would take 70 µs
            continue
        with suppress(BadRequest, ValueError, ArithmeticError, RecursionError):
            run = codec.from_json(Run, json.loads(line))
            phases = (run.first, run.step)
            seconds = [run.decode_s, *(s for phase in phases for s in (phase.predicted_s, phase.measured_s))]
            sane = 0 < run.decode_steps < _MOST_STEPS and all(1 / _MOST < phase.taken < _MOST for phase in phases)
            if run.figures == figures and min(seconds) > 0 and sane:
                kept.append(run)
    return kept


def band(seen: Iterable[Run], prediction: Prediction, plan: Plan, batch: int) -> Band:
    """The error band of a prediction for `batch` sequences, from the last runs that are like it."""
    decode_s, weights, sparsity = step_s(prediction, plan, batch), plan.target.weights.name, _sparsity(plan)
    firsts, steps = list[tuple[float, float]](), list[tuple[float, float]]()  # likeness, log ratio
    for run in seen:
        if run.sparsity != sparsity:
            continue
        like = 1.0 if run.weights == weights else _OTHER_FORMAT
        if not run.read_ahead:
            likeness = run.first.likeness(prediction.ttft_s, prediction.ttft_bound_by)
            firsts.append((like * likeness, run.first.log_ratio))
        steps.append((like * run.step.likeness(decode_s, prediction.bound_by), run.step.log_ratio))
    return Band(_width(steps), _width(firsts))


def error_band(machine_file: Path, machine: MachineSpec, prediction: Prediction, plan: Plan, batch: int) -> Band:
    """The error band of a prediction for this machine. No runs with a device are kept, so plans with a device have the
    usual band."""
    seen = Band() if GPU.executor in plan.tier_bytes() else band(runs(machine_file, machine), prediction, plan, batch)
    if not machine.rough:
        return seen
    crowded = machine.crowded >= _CROWDED
    factor = _ROUGH_CROWDED if crowded else _ROUGH
    return Band(*(w if w.known else replace(w, factor=factor, crowded=crowded) for w in (seen.decode, seen.ttft)))


def _sparsity(plan: Plan) -> str:
    chosen = f" top-k:{plan.value_share}" if plan.value_share < 1 else ""
    return plan.sparsity + chosen + ", asked" * any(unit.asked for unit in plan.units)


def _width(seen: list[tuple[float, float]]) -> Width:
    """The factor that the error stayed within for `_SHARE_WITHIN` of the alike runs, each weighted by its likeness. It
    is at least `_LEAST` and at most `_MOST`. It is the usual width if too few runs are alike, or if their likenesses
    add up to too little. `seen`: (likeness, log ratio), oldest first."""
    alike = [(likeness, log_ratio) for likeness, log_ratio in seen if likeness >= _LEAST_ALIKE][-_RECENT:]
    total, reached, within = sum(likeness for likeness, _ in alike), 0.0, 0.0
    if len(alike) < _ENOUGH_RUNS or total < _ENOUGH_ALIKE:
        return Width(runs=len(alike))
    for error, likeness in sorted((abs(log_ratio), likeness) for likeness, log_ratio in alike):
        reached, within = reached + likeness, error
        if reached > _SHARE_WITHIN * total:
            break
    return Width(math.exp(min(math.log(_MOST), max(math.log(_LEAST), within))), len(alike), True)


def _lines(file: Path) -> list[str]:
    """The lines of a file of runs; none where it cannot be read."""
    try:
        return read_text(file).splitlines()
    except (BrokenModel, StorageFailed):
        return []
