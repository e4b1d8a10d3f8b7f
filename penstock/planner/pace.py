"""How many rows of a prompt may go along with the answers that are under way, by the planner's own simulation.

A pass reads the weights that stream once, whatever its rows. So some rows of prompts cost nothing, until the pass is
bound by arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph import passes
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass, Stream
from penstock.planner.cost import Cost
from penstock.planner.routing import Replay
from penstock.planner.shorten import short
from penstock.planner.simulate import Simulator
from penstock.spec.machine import MachineSpec
from penstock.spec.plan import Plan

# A prompt that joins may make the others' gaps between tokens so many times as long.
LONGEST_GAP = 1.5
_WARM_PASSES, _COUNTED_PASSES, _CACHE_PASSES = 2, 2, 32


@dataclass(frozen=True)
class Pace:
    """`prompt_rows`: the most rows of prompts in a pass beside answers. `gap_ratio`: how many times as long the gap
    between two tokens is predicted to be while a prompt is read. `reason`: for the user."""

    prompt_rows: int
    gap_ratio: float
    reason: str


def pace(plan: Plan, machine: MachineSpec) -> Pace:
    """The most rows, a power of two or all that there is room for, with which a pass takes at most LONGEST_GAP times as
    long as without any; at least 1, or no prompt would ever end. Sequences are half-way through their context, or have
    half of their share of the pages."""
    plan = short(plan)
    most = max(plan.chunk_rows, plan.batch_seqs)
    speaking = plan.batch_seqs * plan.batches_per_pass - 1
    if not speaking:
        return Pace(most, 1.0, f"one sequence at a time: prompts are read {most} tokens a pass")
    gap_s = _pass_s(plan, machine, speaking, 0)
    rows, mixed_s, room = 1, _pass_s(plan, machine, speaking, 1), most - plan.batch_seqs + 1
    while rows < room:
        more = min(2 * rows, room)
        longer_s = _pass_s(plan, machine, speaking, more)
        if longer_s > LONGEST_GAP * gap_s:
            break
        rows, mixed_s = more, longer_s
    ratio = mixed_s / gap_s
    beside = (
        f"prompts are read {rows} tokens a pass beside {speaking} answers, whose gaps become {ratio:.2f} times as long"
    )
    return Pace(rows, ratio, beside)


def _pass_s(plan: Plan, machine: MachineSpec, speaking: int, prompt_rows: int) -> float:
    """Predicted seconds of a pass with a row of each of `speaking` sequences and `prompt_rows` rows of another's
    prompt, where passes like it came before."""
    lowering, simulator, replay = Lowering(plan), Simulator(Cost(machine)), Replay(plan)
    pause_s = Cost(machine).between_passes_s
    share = plan.kv_pages * plan.page_tokens // (plan.batch_seqs * plan.batches_per_pass)
    at = max(0, min((share or plan.context) // 2, plan.context - prompt_rows))
    p = passes.decode(plan, range(speaking), (at,) * speaking, passes.DECODE)
    replay.warm(lowering, p, _CACHE_PASSES)
    if prompt_rows:
        p = _with_prompt(plan, p, speaking, at, prompt_rows)
    seconds = []
    for _ in range(_WARM_PASSES + _COUNTED_PASSES):
        start_s = simulator.now_s
        simulator.busy_s(lowering.step(p, replay.answer))
        simulator.pause(pause_s)
        seconds.append(simulator.now_s - start_s)
    return sum(seconds[_WARM_PASSES:]) / _COUNTED_PASSES


def _with_prompt(plan: Plan, p: Pass, seq: int, at: int, rows: int) -> Pass:
    """The pass with rows of one more sequence, the last, whose prompt does not end."""
    number = seq // plan.batch_seqs
    batches = {batch.id: batch for batch in p.batches}
    before = batches.get(number, Batch(number, (), (), (), ()))
    batches[number] = Batch(
        number, (*before.seqs, seq), (*before.start, at), (*before.rows, rows), before.logits
    )  # fmt: skip
    together = tuple(batches.values())
    few = max(batch.total_rows for batch in together) <= plan.asking_rows
    return Pass("prefill", together, Stream("prefill", True, few), few)
