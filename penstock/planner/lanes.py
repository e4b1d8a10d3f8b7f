"""Says what each lane does during one decode pass, for the picture of a plan: the simulator's spans, cut by the kind of
work."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Task, link_bytes
from penstock.planner.cost import Cost
from penstock.planner.predict import CACHE_PASSES
from penstock.planner.routing import Replay
from penstock.planner.simulate import WARM_PASSES, Simulator, lowered_pass
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.places import CPU, Lane
from penstock.spec.plan import Plan

_KINDS = {
    **dict.fromkeys(("qkv", "attend", "out"), "attention"),
    **dict.fromkeys(("ffn", "predict", "route", "experts", "combine", "gate"), "FFN"),
    "head": "head",
    "load": "weights that stream",
}


class Stretch(NamedTuple):
    """A lane's work of one kind without a break. `kind`: attention, FFN, head, weights that stream, or rest. `start_s`,
    `end_s`: seconds from the start of the pass."""

    kind: str
    start_s: float
    end_s: float


class DecodePass(NamedTuple):
    """`pieces`: lane → its pieces in order, the CPU's first. `seconds`: of the pass, with the pause after it.
    `link_bytes`: lane → the bytes that cross the link to a device. `sequences`: which get a token each."""

    pieces: dict[Lane, list[Stretch]]
    seconds: float
    link_bytes: dict[Lane, int]
    sequences: int


def decode_pass(plan: Plan, ask: Ask, machine: MachineSpec) -> DecodePass:
    """What lanes do in one of many decode passes: loads for it ran ahead in the pass before, and loads in it run ahead
    for the next one."""
    cost = Cost(machine)
    lowering, simulator, replay = Lowering(plan), Simulator(cost), Replay(plan)
    seqs = tuple(range(plan.at_once(ask.batch, ask.sequence_tokens)))
    position = min(ask.prompt_tokens + ask.output_tokens // 2, plan.context - 1)
    step = passes.decode(plan, seqs, (position,) * len(seqs), passes.DECODE)
    tasks: dict[int, Task] = {}
    replay.warm(lowering, step, CACHE_PASSES)
    crossed = Counter[Lane]()
    for i in range(WARM_PASSES + 1):
        emitted, one_piece = lowered_pass(lowering, step, replay.answer)
        tasks.update((task.id, task) for task in emitted)
        start_s = simulator.now_s
        spans = simulator.run(emitted, one_piece).spans
        if i == WARM_PASSES:
            for task in emitted:
                crossed.update(link_bytes(task))
        else:
            simulator.pause(cost.between_passes_s)
    end_s = simulator.now_s + cost.between_passes_s  # in which loads go on, as they do while draining
    spans += simulator.drain().spans
    lanes: dict[Lane, list[Stretch]] = {lane: [] for lane in (CPU, *sorted({ln for s in spans for ln in s.lanes}))}
    for span in spans:
        for lane in span.lanes:
            for piece in _cut(tasks[span.task], cost, span.start_s, span.end_s):
                inside = Stretch(piece.kind, max(piece.start_s, start_s) - start_s, min(piece.end_s, end_s) - start_s)
                if inside.start_s < inside.end_s:
                    lanes[lane].append(inside)
    ordered = {lane: sorted(inside, key=lambda p: p.start_s) for lane, inside in lanes.items() if inside}
    return DecodePass(ordered, end_s - start_s, dict(crossed), len(seqs))


def _cut(task: Task, cost: Cost, start_s: float, end_s: float) -> list[Stretch]:
    """The pieces of a task's span, in the order of its calls. Each piece has the share of the span that its calls
    take."""
    kinds = [_KINDS.get(call.op, "rest") for call in task.calls]
    if len(set(kinds)) == 1:
        return [Stretch(kinds[0], start_s, end_s)]
    each = [cost.seconds(task._replace(calls=(call,))) for call in task.calls]
    scale, begin_s = (end_s - start_s) / sum(each), start_s
    pieces: list[Stretch] = []
    for kind, seconds in zip(kinds, each, strict=True):
        until_s = begin_s + seconds * scale
        if pieces and pieces[-1].kind == kind:
            pieces[-1] = pieces[-1]._replace(end_s=until_s)
        else:
            pieces.append(Stretch(kind, begin_s, until_s))
        begin_s = until_s
    return pieces
