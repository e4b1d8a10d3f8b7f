"""Which figure of the machine a prediction hangs on most, before the first token and while decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass
from penstock.planner.cost import Cost
from penstock.planner.predict import Prediction
from penstock.planner.routing import Replay
from penstock.spec.machine import TERMS, Figure, MachineSpec
from penstock.spec.places import CPU, Lane
from penstock.spec.plan import Plan

_REPEATED = 3  # decode passes until calls that come again need no preparing


@dataclass(frozen=True)
class Dominant:
    """The figure that most of some predicted seconds come from, on the lane that binds, and its share of them."""

    figure: Figure
    share: float


def of_prompts(plan: Plan, prediction: Prediction, machine: MachineSpec, prompt: int, batch: int) -> Dominant:
    """Until the first tokens of `batch` prompts of so many tokens: of the pass in their middle."""
    wanted = list(passes.prompts(plan, range(batch), (prompt,) * batch, passes.DECODE))
    lane = prediction.ttft_bound_by
    found = _by_figure([wanted[len(wanted) // 2]], plan, lane, Cost(machine))
    return _most(found, lane, prediction.ttft_lane_share[lane])


def of_decoding(plan: Plan, prediction: Prediction, machine: MachineSpec, position: int, batch: int) -> Dominant:
    """What dominates a decode pass of `batch` sequences at a position."""
    cost, seqs = Cost(machine), range(batch)
    wanted = [passes.decode(plan, seqs, (position,) * batch, passes.DECODE)] * _REPEATED
    lane = prediction.bound_by
    dominant = _most(_by_figure(wanted, plan, lane, cost), lane, prediction.lane_share[lane])
    pause, step_s = machine.overhead(CPU, "pass"), batch / prediction.decode_tokens_per_s
    if pause is not None and cost.between_passes_s / step_s > dominant.share:
        return Dominant(pause.figure("alpha_s"), min(1.0, cost.between_passes_s / step_s))
    return dominant


def _by_figure(wanted: Sequence[Pass], plan: Plan, lane: Lane, cost: Cost) -> dict[Figure, float]:
    """Seconds of the last of these passes on a lane, where nothing else is busy."""
    lowering, replay, found = Lowering(plan), Replay(plan), dict[Figure, float]()
    for p in wanted:
        found = {}
        for task in lowering.step(p, replay.answer):
            for figure, seconds in cost.by_figure(lane, task) if lane in task.lanes else ():
                found[figure] = found.get(figure, 0.0) + seconds
    return found


def _most(found: dict[Figure, float], lane: Lane, lane_share: float) -> Dominant:
    """`lane_share`: how much of the time the lane is busy, other lanes slowing it down. Where it has nothing to do in
    the pass that was looked at, nothing dominates."""
    if not any(found.values()):
        return Dominant(Figure(lane, "*", "*", 0, TERMS[0]), 0.0)
    figure = max(found, key=lambda each: found[each])
    return Dominant(figure, lane_share * found[figure] / sum(found.values()))
