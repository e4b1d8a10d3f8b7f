"""The timelines that a run of a plan is predicted to have, pass by pass."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass
from penstock.graph.timeline import Timeline
from penstock.planner.cost import Cost
from penstock.planner.routing import Replay, Trace
from penstock.planner.simulate import Simulator
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.plan import Plan


def timelines(
    plan: Plan, ask: Ask, machine: MachineSpec, most_tokens: int, trace: Trace | None = None
) -> Iterator[tuple[Timeline, Pass | None]]:
    """The predicted timelines of the prompts' passes and of the first tokens after them, at most `most_tokens`. The
    last one, with None for its pass, is of the loads that are then under way. `trace`: what routers say; None: what is
    stated of them."""
    cost = Cost(machine)
    lowering, simulator, replay = Lowering(plan), Simulator(cost, plan.units), Replay(plan, trace)
    seqs = tuple(range(min(ask.batch, plan.batch_seqs * plan.batches_per_pass)))
    prompt = max(1, min(ask.prompt_tokens, plan.context - 1))
    wanted = list(passes.prompts(plan, seqs, (prompt,) * len(seqs), passes.DECODE))
    last = min(prompt + min(ask.output_tokens - 1, most_tokens), plan.context)
    for position in range(prompt, last):
        then = passes.DECODE if position + 1 < last else None
        wanted.append(passes.decode(plan, seqs, (position,) * len(seqs), then))
    for p in wanted:
        yield simulator.run(lowering.step(p, replay.answer)), p
        simulator.pause(cost.between_passes_s)
    yield simulator.drain(), None
