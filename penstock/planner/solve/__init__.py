"""Finds a plan for an ask: all solvers propose candidates, and the best of those that the runtime can run is taken.

`solve` is the entry. Candidates are ranked by their simulated times. Simulating takes most of the planning time, so a
candidate is not simulated where a simple bound (`bound`) says that it cannot win.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from penstock.errors import BadRequest, DoesNotFit
from penstock.planner.bound import least_score_s
from penstock.planner.candidate import WHOLE, Candidate, Compared, distinct
from penstock.planner.firing import Firing, check_sparsity
from penstock.planner.firing import reason as firing_reason
from penstock.planner.predict import Prediction, reads_short
from penstock.planner.ranking import ranked, settles
from penstock.planner.reads import on_disks, with_reads
from penstock.planner.reasons import chosen_values, shared_pages
from penstock.planner.routing import RouterTrace
from penstock.planner.shorten import Kept, quick, streamed
from penstock.planner.solve.ours import ram
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import DEFAULT_CONTEXT, Ask
from penstock.spec.format import Format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.places import Tier
from penstock.spec.plan import Plan


@dataclass(frozen=True)
class Solved:
    """What `solve` answers.

    plan, prediction  the best plan that the runtime runs, and its prediction
    reasons         a sentence for each choice in the plan
    strategy        the name of the plan's strategy
    compared        every candidate that was simulated, each plan once: the chosen one first, the others ranked
    not_yet         candidates that would be better than the plan, but that this version cannot run
    tasks           those of the plan's prediction, if they were to be kept
    """

    plan: Plan
    prediction: Prediction
    reasons: tuple[str, ...]
    strategy: str = "as given"
    compared: tuple[Compared, ...] = ()
    not_yet: tuple[Compared, ...] = ()
    tasks: Kept | None = None


def settle_context(ask: Ask, spec: ModelSpec) -> Ask:
    """The ask with its context decided, in tokens. By default it is DEFAULT_CONTEXT, or the prompt and the output where
    these need more, but never more than the model's maximum. Where values of the best positions alone are read, KV is
    in memory.

    Raises BadRequest if a context that the user named is more than the model's maximum."""
    wanted = ask.sequence_tokens
    context = ask.context or min(spec.max_positions, max(DEFAULT_CONTEXT, wanted))
    if context > spec.max_positions:
        raise BadRequest(f"context {context} is more than the model's {spec.max_positions} positions")
    return replace(ask, context=context, kv_home="memory" if ask.value_share < 1 else ask.kv_home)


def candidates(problem: Problem, every: bool = False, may_plan: bool = False) -> Iterator[Candidate]:
    """The candidates of every solver that applies, those with a device first. If a device has room for a whole dense
    model and its KV, there are no others, unless `every` one is wanted. `may_plan`: also ask solvers whose plans the
    runtime cannot run.

    Raises DoesNotFit if nothing fits.

    Solvers are imported when they apply. Importing all of them takes 25 ms, which a run without a device need not wait.
    """
    any_found = False
    for candidate in chain(_beside_device(problem, every, may_plan), _in_blocks(problem)):
        if problem.moves_chosen_values(candidate.plan) or problem.keeps_kv_elsewhere(candidate.plan):
            continue
        yield candidate
        if candidate.strategy == WHOLE and not every and not problem.spec.is_routed:
            return
        any_found = any_found or candidate.may_be_chosen
    if problem.has_device and not any_found:
        from penstock.planner.solve import refusal

        if problem.ask.use_device or refusal.limits_too_much(problem):
            refusal.refuse(problem)
    if problem.ask.use_device and problem.has_device:
        return
    try:
        yield from ram.candidates(problem)
    except DoesNotFit:
        if not any_found:
            from penstock.planner.solve import refusal

            refusal.refuse(problem)
            raise


def _beside_device(problem: Problem, every: bool, may_plan: bool) -> Iterator[Candidate]:
    """The candidates of solvers that use a device. None without one, or if no plan of ours fits beside it."""
    if not problem.has_device:
        return
    if problem.spec.is_routed:
        from penstock.planner.solve.ours import experts

        yield from experts.candidates(problem)
        return
    from penstock.planner.solve.ours import device

    first = next(ours := device.candidates(problem), None)
    if first is None:
        return
    yield first
    yield from ours
    from penstock.planner.solve import llama_cpp, pipo, scheinfer

    for solver in (scheinfer, llama_cpp, pipo):
        yield from solver.candidates(problem)
    if every or may_plan or problem.sparsity == "predict":
        from penstock.planner.solve import powerinfer

        if every or may_plan or powerinfer.runs(problem):
            yield from powerinfer.candidates(problem)


def _in_blocks(problem: Problem) -> Iterator[Candidate]:
    """FlexGen's candidates."""
    if problem.wants_blocks:
        from penstock.planner.solve import flexgen

        yield from flexgen.candidates(problem)


def solve(
    ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, disks: Mapping[str, Tier] | None = None,
    *, every: bool = False, may_plan: bool = False, trace: RouterTrace | None = None, firing: Firing | None = None,
    keep: bool = False,
) -> Solved:  # fmt: skip
    """Simulates every candidate that may win, and takes the fastest for the ask's objective that the runtime can run.

    disks           part key → the disk that it lies on. Needed only if the model lies on more than one
    every           simulate candidates that cannot win too, so that they can be compared
    may_plan        ask solvers too whose plans the runtime cannot run yet. Such plans are compared and never chosen
    trace           what routers are known to say; None: `routing.stated`
    firing          how many neurons are known to fire; None: `firing.expected`
    keep            keep the tasks of the plan's prediction, so that predictions on other machines take less time

    Raises DoesNotFit with the minimum that would do, and BadRequest for what no machine could do.
    """
    ask = settle_context(ask, spec)
    check_sparsity(ask, spec, firing)
    if weights.for_cpu and ask.use_device:
        raise BadRequest(f"weights in {weights.name} run without a device in this version")
    problem = Problem(ask, spec, weights, machine, trace, firing)
    proposed = distinct(candidates(problem, every, may_plan))
    placed = (each._replace(plan=on_disks(each.plan, disks or {})) for each in proposed)
    bounded = [(least_score_s(each.plan, ask, problem.cost), each) for each in placed]
    bounded.sort(key=lambda entry: entry[0])  # the most promising first, so that it settles most of the others
    compared: list[Compared] = []
    rivals: list[Compared] = []  # the compared candidates that may be chosen
    tasks: Kept | None = {} if keep else None
    for least_s, candidate in bounded:
        if every or not any(settles(rival, least_s, candidate.plan, ask) for rival in rivals):
            # Only the chosen plan's spread between tokens is wanted. Mostly the most promising plan is chosen.
            spread = not rivals and candidate.may_be_chosen
            kept = tasks if spread else None
            compared.append(Compared(candidate, quick(candidate.plan, ask, machine, spread, trace, kept)))
            rivals += compared[-1:] if candidate.may_be_chosen else []
    # `rivals` are ranked without the others: a plan that cannot run must not decide which plans are equals.
    chosen = ranked(rivals, ask)[0]
    others = [each for each in ranked(compared, ask) if each is not chosen]
    not_yet = (each for each in others if each.candidate.cannot_run and each.score_s(ask) < chosen.score_s(ask))
    strategy, plan, reasons, *_ = chosen.candidate
    prediction, told = chosen.prediction, tuple[str, ...]()
    if problem.has_device and not problem.spec.is_routed:
        from penstock.planner.solve.scheinfer.rows import with_short_prompts

        plan, told = with_short_prompts(problem, plan)
        reasons += told
    if chosen is not rivals[0] or (told and reads_short(plan, ask)):
        tasks = {} if keep else None
        prediction = quick(plan, ask, machine, trace=trace, kept=tasks)
    # The prediction stays: the disk's rate was measured with such reads. With caches fewer of them are in flight.
    plan, how = with_reads(plan, machine)
    reasons += (how,) if plan.caches or any(streamed(plan, from_disk=True).values()) else ()
    reasons += shared_pages(plan) + chosen_values(plan) + firing_reason(plan, firing, ask.resident_bytes is None)
    reasons += (f"{prediction.bound_by} is busiest while decoding: {prediction.lane_share[prediction.bound_by]:.0%}",)
    return Solved(plan, prediction, reasons, strategy, (chosen, *others), tuple(not_yet), tasks)
