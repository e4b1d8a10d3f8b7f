"""Predicts the timelines of a plan's passes, for a trace that a viewer shows."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass
from penstock.graph.timeline import Timeline
from penstock.planner.cost import Cost
from penstock.planner.routing import Replay, RouterTrace
from penstock.planner.simulate import Simulator, lowered_pass
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.plan import Plan


def timelines(
    plan: Plan, ask: Ask, machine: MachineSpec, most_tokens: int, trace: RouterTrace | None = None
) -> Iterator[tuple[Timeline, Pass | None]]:
    """(timeline, pass) of the prompts' passes and of at most `most_tokens` decode passes after them. The last timeline
    has no pass: it is of the loads that are then still under way. `trace`: what routers say; None: `routing.stated`."""
    cost = Cost(machine)
    lowering, simulator, replay = Lowering(plan), Simulator(cost, plan.units), Replay(plan, trace)
    seqs = tuple(range(plan.at_once(ask.batch, ask.sequence_tokens)))
    prompt = max(1, min(ask.prompt_tokens, plan.context - 1))
    wanted = list(passes.prompts(plan, seqs, (prompt,) * len(seqs), passes.DECODE))
    last = min(prompt + min(ask.output_tokens - 1, most_tokens), plan.context)
    for position in range(prompt, last):
        then = passes.DECODE if position + 1 < last else None
        wanted.append(passes.decode(plan, seqs, (position,) * len(seqs), then))
    for p in wanted:
        yield simulator.run(*lowered_pass(lowering, p, replay.answer)), p
        simulator.pause(cost.between_passes_s)
    yield simulator.drain(), None
