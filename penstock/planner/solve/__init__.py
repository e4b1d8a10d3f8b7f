"""Solvers: an ask, a model and a machine in, a plan with its reasons out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.errors import BadRequest, DoesNotFit
from penstock.planner.predict import Prediction
from penstock.planner.routing import Trace
from penstock.planner.shorten import quick, streamed
from penstock.planner.solve.bound import least_score_s, reads_bytes, score_s, sequences
from penstock.planner.solve.candidate import Candidate, Compared
from penstock.planner.solve.ours import ram
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.reads import on_disks, with_reads
from penstock.spec.ask import DEFAULT_CONTEXT, Ask
from penstock.spec.format import Format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.places import Tier
from penstock.spec.plan import Plan


@dataclass(frozen=True)
class Solved:
    """The best plan that the runtime runs, what it will do, the runner-up, and a sentence per choice. `compared`: every
    candidate that was simulated, this plan first, then the best. `not_yet`: those of them that would be better, and
    that this version cannot run."""

    plan: Plan
    prediction: Prediction
    reasons: tuple[str, ...]
    runner_up: Prediction | None = None
    strategy: str = "as given"
    compared: tuple[Compared, ...] = ()
    not_yet: tuple[Compared, ...] = ()


_EQUAL, _SURELY_EQUAL = 1.05, 1.04  # the difference: loads that ran ahead before the simulated passes


def _settles(prediction: Prediction, plan: Plan, least_s: float, other: Plan, ask: Ask) -> bool:
    """Whether a plan that was predicted beats another one that was not: that one reads as much from the disk or more,
    and at best (`least_s`) is an equal."""
    if reads_bytes(other) / sequences(other, ask) < prediction.disk_bytes_per_token:
        return False
    return score_s(prediction, plan, ask) <= least_s * _SURELY_EQUAL


def settle_context(ask: Ask, spec: ModelSpec) -> Ask:
    """The ask with its context decided: the model's maximum, at most 4096, unless the prompt and output
    need more. Raises BadRequest where the model cannot hold what was asked for."""
    wanted = ask.prompt_tokens + ask.output_tokens
    context = ask.context or min(spec.max_positions, max(DEFAULT_CONTEXT, wanted))
    if context > spec.max_positions:
        raise BadRequest(f"context {context} is more than the model's {spec.max_positions} positions")
    return replace(ask, context=context)


def candidates(problem: Problem, every: bool = False, may_plan: bool = False) -> Iterator[Candidate]:
    """The candidates of every solver that applies, those with a device first. A model that a device has room for needs
    no others, unless `every` one is wanted. `may_plan`: also solvers all of whose plans the runtime cannot run yet.

    The solvers are imported when they apply: a run without a device would wait 25 ms for nothing.
    """
    found, dense = False, not problem.spec.is_routed
    if problem.has_device and not dense:
        from penstock.planner.solve.ours import device, experts

        device.require_minimum(problem)
        for candidate in experts.candidates(problem):
            yield candidate
            found = found or _may_be_chosen(candidate)
    elif problem.has_device:
        from penstock.planner.solve import llama_cpp, pipo, powerinfer, scheinfer
        from penstock.planner.solve.ours import device

        device.require_minimum(problem)
        for candidate in device.candidates(problem):
            yield candidate
            found = True
            if candidate.strategy == device.WHOLE and not every:
                return
        if found:
            for solver in (scheinfer, llama_cpp, pipo, *((powerinfer,) if every or may_plan else ())):
                yield from solver.candidates(problem)
    if (
        problem.ask.objective == "throughput" and dense
    ):  # blocks of many batches: who waits for a first token has no use for them
        from penstock.planner.solve import flexgen

        for candidate in flexgen.candidates(problem):
            yield candidate
            found = found or _may_be_chosen(candidate)
    if problem.ask.use_device and problem.has_device:
        if not found:
            device.refuse(problem)
        return
    try:
        yield from ram.candidates(problem)
    except DoesNotFit:
        if not found:
            raise


def solve(
    ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, disks: Mapping[str, Tier] | None = None,
    *, every: bool = False, may_plan: bool = False, trace: Trace | None = None,
) -> Solved:  # fmt: skip
    """Lowers and simulates every candidate that may win and takes the fastest for the ask's objective.

    `disks`: the disk of each part of the model, where it lies on more than one. `every`: also candidates that cannot
    win, so that they can be compared. `may_plan`: also plans of solvers that the runtime cannot run yet. They are
    compared and never chosen. `trace`: what routers are known to say; None: what is stated of them.

    Raises DoesNotFit with the minimum that would do, and BadRequest for what no machine could do.
    """
    ask = settle_context(ask, spec)
    problem = Problem(ask, spec, weights, machine, trace)
    bounded = []
    for candidate in candidates(problem, every, may_plan):
        plan = on_disks(candidate.plan, disks or {})
        bounded.append((least_score_s(plan, ask, problem.cost), candidate._replace(plan=plan)))
    bounded.sort(key=lambda entry: entry[0])  # the most promising first: then most others need no simulation
    found: list[Compared] = []
    for least_s, candidate in bounded:
        rivals = [each for each in found if _may_be_chosen(each.candidate)]
        if every or not any(_settles(p, c.plan, least_s, candidate.plan, ask) for c, p in rivals):
            # The most promising one is mostly the one that is chosen, whose spread between tokens is wanted.
            spread = not rivals and _may_be_chosen(candidate)
            found.append(Compared(candidate, quick(candidate.plan, ask, machine, spread, trace)))
    # Ranked by themselves: what cannot run must not decide which of the others are equals.
    may_be_chosen = [each for each in found if _may_be_chosen(each.candidate)]
    first, chosen = may_be_chosen[0], _ranked(may_be_chosen, ask)[0]
    found = _ranked(found, ask)
    chosen_s = score_s(chosen.prediction, chosen.candidate.plan, ask)
    better = (each for each in found if score_s(each.prediction, each.candidate.plan, ask) < chosen_s)
    not_yet = tuple(each for each in better if each.candidate.cannot_run)
    strategy, plan, reasons, _, _ = chosen.candidate
    prediction = chosen.prediction if chosen is first else quick(plan, ask, machine, trace=trace)
    plan, how = with_reads(
        plan, machine
    )  # predictions stay, though with caches fewer reads are in flight than the probe had
    reasons += (how,) if plan.caches or any(streamed(plan, from_disk=True).values()) else ()
    reasons += (f"{prediction.bound_by} is busiest while decoding: {prediction.lane_share[prediction.bound_by]:.0%}",)
    others = [each for each in found if each is not chosen]
    runner_up = others[0].prediction if others else None
    return Solved(plan, prediction, reasons, runner_up, strategy, (chosen, *others), not_yet)


def _may_be_chosen(candidate: Candidate) -> bool:
    return not candidate.lossy and not candidate.cannot_run


def _ranked(found: list[Compared], ask: Ask) -> list[Compared]:
    """The best first. Among equals the plan that reads least: predictions are not that sharp, and the disk may be
    shared."""
    scores = [score_s(each.prediction, each.candidate.plan, ask) for each in found]
    best_s = min(scores)
    order = sorted(
        range(len(found)),
        key=lambda i: (
            scores[i] > best_s * _EQUAL,
            found[i].prediction.disk_bytes_per_token if scores[i] <= best_s * _EQUAL else scores[i],
        ),
    )
    return [found[i] for i in order]
