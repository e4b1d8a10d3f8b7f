"""Decides how many rows of prompts go through the model together with answers that are under way, by the planner's own
simulation.

A pass reads the weights that stream once, however many rows it has. So the first rows of prompts cost nothing. Further
rows cost time once the pass is bound by arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph.passes import MIXED
from penstock.planner.explain import rate
from penstock.planner.pass_times import pass_s
from penstock.planner.shorten import short
from penstock.spec.machine import MachineSpec
from penstock.spec.plan import Plan

# A prompt that joins may make a pass so many times as long by prediction. Two bars are to be met: the 95th percentile
# of the others' gaps may be 1.5 times as long as without the prompt, and the prompt's first token may come after 3.5
# times its time alone. A row costs as much in a small pass as in a large one. So if passes take g times as long, the
# first token comes after 1 + 1 / (g - 1) times its time alone at best: 3.5 with g = 1.4, and 3.0 with g = 1.5.
# Rejected: 1.55, which gave the same six rows beside eight answers of a 1B model in RAM.
LONGEST_GAP = 1.5
# Numbers between powers of two are tried too. If passes with eight rows take 1.6 times as long, those with four take
# 1.25, and those with six 1.4: a prompt then needs a third fewer passes than with four.
_HALVINGS = 3


@dataclass(frozen=True)
class Pace:
    """`prompt_rows`: the most rows of prompts in a pass beside answers. `gap_ratio`: how many times as long the gap
    between two tokens is predicted to be while a prompt is read. `reason`: for the user. `mixed`: the purpose of such
    passes, which says whether the executors for decode compute them, or those for prefill."""

    prompt_rows: int
    gap_ratio: float
    reason: str
    mixed: str = MIXED


def pace(plan: Plan, machine: MachineSpec) -> Pace:
    """The most rows of prompts with which a pass takes at most LONGEST_GAP times as long as without any; at least 1, or
    no prompt would ever end.

    These numbers are tried: powers of two, the most rows that there is room for, and _HALVINGS numbers between the last
    number that will do and the first that will not. If some units have another executor for prefill than for decode,
    both purposes are tried, and the one that reads prompts faster is taken. In the simulated passes, sequences are
    half-way through their context, or have half of their share of the pages."""
    plan = short(plan)
    most = max(plan.chunk_rows, plan.batch_seqs)
    speaking = plan.sequences - 1
    if not speaking:
        return Pace(most, 1.0, f"one sequence at a time: prompts are read {most} tokens a pass")
    gap_s = pass_s(plan, machine, speaking, 0)
    same = all(unit.decode == unit.prefill for unit in plan.units)
    ways = [_way(plan, machine, speaking, gap_s, purpose) for purpose in ((MIXED,) if same else (MIXED, "prefill"))]
    rows, mixed_s, purpose = max(ways, key=lambda way: way[0] / way[1])
    ratio = mixed_s / gap_s
    beside = (
        f"prompts are read {rows} tokens a pass beside {speaking} answers, whose gaps become {ratio:.2f} times as long"
    )
    if not same:
        whose = "decode" if purpose == MIXED else "prefill"
        (other_rows, other_s, _) = min(ways, key=lambda way: way[0] / way[1])
        beside += (
            f"; such passes are computed where {whose} is: {rate(rows / mixed_s)} tokens/s of prompts, and"
            f" {rate(other_rows / other_s)} the other way"
        )
    return Pace(rows, ratio, beside, purpose)


def _way(plan: Plan, machine: MachineSpec, speaking: int, gap_s: float, purpose: str) -> tuple[int, float, str]:
    """(the most rows of prompts in a pass of this purpose, its seconds, the purpose)."""
    rows, mixed_s = 1, pass_s(plan, machine, speaking, 1, purpose)
    most = room_for_prompts(plan)  # the most that may still do
    while rows < most:
        more = min(2 * rows, most)
        longer_s = pass_s(plan, machine, speaking, more, purpose)
        if longer_s > LONGEST_GAP * gap_s:
            most = more
            break
        rows, mixed_s = more, longer_s
    for _ in range(_HALVINGS):
        if most - rows < 2:
            break
        between = (rows + most) // 2
        longer_s = pass_s(plan, machine, speaking, between, purpose)
        if longer_s > LONGEST_GAP * gap_s:
            most = between
        else:
            rows, mixed_s = between, longer_s
    return rows, mixed_s, purpose


def room_for_prompts(plan: Plan) -> int:
    """The most rows of one prompt in a pass in which all other sequences of its batch have a row."""
    return max(plan.chunk_rows, plan.batch_seqs) - plan.batch_seqs + 1
