"""What each lane does during one decode pass: the simulator's spans, cut by the kind of work."""

from __future__ import annotations

from typing import NamedTuple

from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Task
from penstock.planner.cost import Cost
from penstock.planner.predict import CACHE_PASSES
from penstock.planner.routing import Replay
from penstock.planner.simulate import Simulator
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.places import CPU, Lane
from penstock.spec.plan import Plan

_WARM_PASSES = 2
_KINDS = {
    **dict.fromkeys(("qkv", "attend", "out"), "attention"),
    **dict.fromkeys(("ffn", "predict", "route", "experts", "combine", "gate"), "FFN"),
    "head": "head",
    "load": "weights that stream",
}


class Piece(NamedTuple):
    """Seconds from the start of the pass. `kind`: attention, FFN, head, weights that stream, rest."""

    kind: str
    start_s: float
    end_s: float


def decode_pass(plan: Plan, ask: Ask, machine: MachineSpec) -> tuple[dict[Lane, list[Piece]], float]:
    """Lane → its pieces in order, executors first; and how long the pass takes in seconds, with what lies
    between two. It is one of many: loads run ahead into it, and out of it into the next."""
    cost = Cost(machine)
    lowering, simulator, replay = Lowering(plan), Simulator(cost), Replay(plan)
    seqs = tuple(range(min(ask.batch, plan.batch_seqs * plan.batches_per_pass)))
    position = min(ask.prompt_tokens + ask.output_tokens // 2, plan.context - 1)
    step = passes.decode(plan, seqs, (position,) * len(seqs), passes.DECODE)
    tasks: dict[int, Task] = {}
    replay.warm(lowering, step, CACHE_PASSES)
    for i in range(_WARM_PASSES + 1):
        emitted = list(lowering.step(step, replay.answer))
        tasks.update((task.id, task) for task in emitted)
        start_s = simulator.now_s
        spans = simulator.run(emitted).spans
        if i < _WARM_PASSES:
            simulator.pause(cost.between_passes_s)
    end_s = simulator.now_s + cost.between_passes_s  # in which loads go on, as they do while draining
    spans += simulator.drain().spans
    lanes: dict[Lane, list[Piece]] = {lane: [] for lane in (CPU, *sorted({ln for s in spans for ln in s.lanes}))}
    for span in spans:
        for lane in span.lanes:
            for piece in _cut(tasks[span.task], cost, span.start_s, span.end_s):
                inside = Piece(piece.kind, max(piece.start_s, start_s) - start_s, min(piece.end_s, end_s) - start_s)
                if inside.start_s < inside.end_s:
                    lanes[lane].append(inside)
    return {lane: sorted(found, key=lambda p: p.start_s) for lane, found in lanes.items() if found}, end_s - start_s


def _cut(task: Task, cost: Cost, start_s: float, end_s: float) -> list[Piece]:
    """A task's span in the order of its calls, as long as each takes."""
    kinds = [_KINDS.get(call.op, "rest") for call in task.calls]
    if len(set(kinds)) == 1:
        return [Piece(kinds[0], start_s, end_s)]
    each = [cost.seconds(task._replace(calls=(call,))) for call in task.calls]
    scale, at = (end_s - start_s) / sum(each), start_s
    found: list[Piece] = []
    for kind, seconds in zip(kinds, each, strict=True):
        until = at + seconds * scale
        if found and found[-1].kind == kind:
            found[-1] = found[-1]._replace(end_s=until)
        else:
            found.append(Piece(kind, at, until))
        at = until
    return found
