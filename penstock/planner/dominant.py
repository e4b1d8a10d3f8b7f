"""Finds the figure of the machine that a prediction depends on most, before the first token and in decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass
from penstock.planner.cost import Cost
from penstock.planner.predict import Prediction
from penstock.planner.routing import Replay
from penstock.planner.simulate import WARM_PASSES, lowered_pass
from penstock.spec.machine import TERMS, Figure, MachineSpec
from penstock.spec.places import CPU, Lane
from penstock.spec.plan import Plan


@dataclass(frozen=True)
class Dominant:
    """A figure of the machine. `share`: the share of the predicted seconds that comes from it. No other figure of the
    busiest lane has a larger share."""

    figure: Figure
    share: float


def of_prompts(
    plan: Plan, prediction: Prediction, machine: MachineSpec, prompt: int, batch: int, wanted: Sequence[Pass] = ()
) -> Dominant:
    """The dominant figure until the first tokens of `batch` prompts of `prompt` tokens each. It is that of their middle
    pass. `wanted`: the passes that read them, where these are others than the plan's."""
    wanted = wanted or list(passes.prompts(plan, range(batch), (prompt,) * batch, passes.DECODE))
    lane = prediction.ttft_bound_by
    seconds_of = _by_figure([wanted[len(wanted) // 2]], plan, lane, Cost(machine))
    return _most(seconds_of, lane, prediction.ttft_lane_share[lane])


def of_decoding(plan: Plan, prediction: Prediction, machine: MachineSpec, position: int, batch: int) -> Dominant:
    """The dominant figure of a decode pass of `batch` sequences at `position`. The pause between passes counts too."""
    cost, seqs = Cost(machine), range(batch)
    wanted = [passes.decode(plan, seqs, (position,) * batch, passes.DECODE)] * (WARM_PASSES + 1)
    lane = prediction.bound_by
    dominant = _most(_by_figure(wanted, plan, lane, cost), lane, prediction.lane_share[lane])
    pause, step_s = machine.overhead(CPU, "pass"), batch / prediction.decode_tokens_per_s
    if pause is not None and cost.between_passes_s / step_s > dominant.share:
        return Dominant(pause.figure("alpha_s"), min(1.0, cost.between_passes_s / step_s))
    return dominant


def _by_figure(wanted: Sequence[Pass], plan: Plan, lane: Lane, cost: Cost) -> dict[Figure, float]:
    """Figure → its seconds on a lane in the last of the passes `wanted`, if no other lane is busy."""
    lowering, replay, seconds_of = Lowering(plan), Replay(plan), dict[Figure, float]()
    for p in wanted:
        seconds_of = {}
        tasks, one_piece = lowered_pass(lowering, p, replay.answer)
        for task in tasks:
            for figure, seconds in cost.by_figure(lane, task, one_piece) if lane in task.lanes else ():
                seconds_of[figure] = seconds_of.get(figure, 0.0) + seconds
    return seconds_of


def _most(seconds_of: dict[Figure, float], lane: Lane, lane_share: float) -> Dominant:
    """The figure with the most seconds. `lane_share`: the share of the time in which the lane is busy, slowed by
    others. If the lane has nothing to do in the pass, the share of the result is 0."""
    if not any(seconds_of.values()):
        return Dominant(Figure(lane, "*", "*", 0, TERMS[0]), 0.0)
    figure = max(seconds_of, key=lambda each: seconds_of[each])
    return Dominant(figure, lane_share * seconds_of[figure] / sum(seconds_of.values()))
