"""Finds a plan for an ask: all solvers propose candidates, and the best of those that the runtime can run is taken.

`solve` is the entry. Candidates are ranked by their simulated times. Simulating takes most of the planning time, so a
candidate is not simulated where a simple bound (`bound`) says that it cannot win.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.errors import BadRequest, DoesNotFit
from penstock.graph.arenas import Layout
from penstock.planner.firing import Firing, foretold_of
from penstock.planner.firing import reason as firing_reason
from penstock.planner.predict import Prediction
from penstock.planner.routing import RouterTrace
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
from penstock.units import format_bytes


@dataclass(frozen=True)
class Solved:
    """What `solve` answers.

    plan, prediction  the best plan that the runtime runs, and its prediction
    reasons         a sentence for each choice in the plan
    strategy        the name of the plan's strategy
    compared        every candidate that was simulated: the plan first, the others ranked
    not_yet         candidates that would be better than the plan, but that this version cannot run
    """

    plan: Plan
    prediction: Prediction
    reasons: tuple[str, ...]
    strategy: str = "as given"
    compared: tuple[Compared, ...] = ()
    not_yet: tuple[Compared, ...] = ()


# Two plans are equals if their times differ by less than the first factor. The second compares a simulated time with a
# bound. It is smaller, because loads that ran ahead before the simulated passes can make a simulated time too short.
_EQUAL, _SURELY_EQUAL = 1.05, 1.04
_READS_WEIGH = 0.2


def _settles(rival: Compared, least_s: float, plan: Plan, ask: Ask) -> bool:
    """Whether a simulated rival makes it needless to simulate `plan`. It does if the plan reads at least as much from
    disks as the rival, and is no better than an equal even if it takes only its bound of `least_s` seconds."""
    if reads_bytes(plan) / sequences(plan, ask) < rival.prediction.disk_bytes_per_token:
        return False
    return _score_s(rival, ask) <= least_s * _SURELY_EQUAL


def settle_context(ask: Ask, spec: ModelSpec) -> Ask:
    """The ask with its context decided, in tokens. By default it is DEFAULT_CONTEXT, or the prompt and the output where
    these need more, but never more than the model's maximum.

    Raises BadRequest if a context that the user named is more than the model's maximum."""
    wanted = ask.prompt_tokens + ask.output_tokens
    context = ask.context or min(spec.max_positions, max(DEFAULT_CONTEXT, wanted))
    if context > spec.max_positions:
        raise BadRequest(f"context {context} is more than the model's {spec.max_positions} positions")
    return replace(ask, context=context)


def candidates(problem: Problem, every: bool = False, may_plan: bool = False) -> Iterator[Candidate]:
    """The candidates of every solver that applies, those with a device first. If a device has room for the whole model,
    there are no others, unless `every` one is wanted. `may_plan`: also ask solvers whose plans the runtime cannot run.

    Raises DoesNotFit if nothing fits, and BadRequest if the ask insists on a device for a model with experts.

    Solvers are imported when they apply. Importing all of them takes 25 ms, which a run without a device need not wait.
    """
    any_found, dense = False, not problem.spec.is_routed
    if problem.has_device and not dense:
        from penstock.planner.solve.ours import device, experts

        device.require_minimum(problem)
        for candidate in experts.candidates(problem):
            yield candidate
            any_found = any_found or _may_be_chosen(candidate)
    elif problem.has_device:
        from penstock.planner.solve import llama_cpp, pipo, powerinfer, scheinfer
        from penstock.planner.solve.ours import device

        device.require_minimum(problem)
        for candidate in device.candidates(problem):
            yield candidate
            any_found = True
            if candidate.strategy == device.WHOLE and not every:
                return
        if any_found:
            for solver in (scheinfer, llama_cpp, pipo, *((powerinfer,) if every or may_plan else ())):
                yield from solver.candidates(problem)
    # FlexGen's blocks of many batches delay the first token, so they are no candidates where latency is wanted.
    if problem.ask.objective == "throughput" and dense:
        from penstock.planner.solve import flexgen

        for candidate in flexgen.candidates(problem):
            yield candidate
            any_found = any_found or _may_be_chosen(candidate)
    if problem.ask.use_device and problem.has_device:
        if not any_found:
            device.refuse(problem)
        return
    try:
        yield from ram.candidates(problem)
    except DoesNotFit:
        if not any_found:
            raise


def solve(
    ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, disks: Mapping[str, Tier] | None = None,
    *, every: bool = False, may_plan: bool = False, trace: RouterTrace | None = None, firing: Firing | None = None,
) -> Solved:  # fmt: skip
    """Simulates every candidate that may win, and takes the fastest for the ask's objective that the runtime can run.

    disks           part key → the disk that it lies on. Needed only if the model lies on more than one
    every           simulate candidates that cannot win too, so that they can be compared
    may_plan        ask solvers too whose plans the runtime cannot run yet. Such plans are compared and never chosen
    trace           what routers are known to say; None: `routing.stated`
    firing          how many neurons are known to fire; None: `firing.expected`

    Raises DoesNotFit with the minimum that would do, and BadRequest for what no machine could do.
    """
    ask = settle_context(ask, spec)
    _check_neurons(ask, spec, weights, firing)
    problem = Problem(ask, spec, weights, machine, trace, firing)
    bounded = []
    for candidate in candidates(problem, every, may_plan):
        plan = on_disks(candidate.plan, disks or {})
        bounded.append((least_score_s(plan, ask, problem.cost), candidate._replace(plan=plan)))
    bounded.sort(key=lambda entry: entry[0])  # the most promising first, so that it settles most of the others
    compared: list[Compared] = []
    rivals: list[Compared] = []  # the compared candidates that may be chosen
    for least_s, candidate in bounded:
        if every or not any(_settles(rival, least_s, candidate.plan, ask) for rival in rivals):
            # Only the chosen plan's spread between tokens is wanted. Mostly the most promising plan is chosen.
            spread = not rivals and _may_be_chosen(candidate)
            compared.append(Compared(candidate, quick(candidate.plan, ask, machine, spread, trace)))
            rivals += compared[-1:] if _may_be_chosen(candidate) else []
    # `rivals` are ranked without the others: a plan that cannot run must not decide which plans are equals.
    chosen = _ranked(rivals, ask)[0]
    others = [each for each in _ranked(compared, ask) if each is not chosen]
    better = (each for each in others if _score_s(each, ask) < _score_s(chosen, ask))
    strategy, plan, reasons, _, _ = chosen.candidate
    prediction = chosen.prediction if chosen is rivals[0] else quick(plan, ask, machine, trace=trace)
    # The prediction stays: the disk's rate was measured with such reads. With caches fewer of them are in flight.
    plan, how = with_reads(plan, machine)
    reasons += (how,) if plan.caches or any(streamed(plan, from_disk=True).values()) else ()
    reasons += shared_reason(plan) + firing_reason(plan, firing)
    reasons += (f"{prediction.bound_by} is busiest while decoding: {prediction.lane_share[prediction.bound_by]:.0%}",)
    return Solved(
        plan, prediction, reasons, strategy, (chosen, *others),
        tuple(each for each in better if each.candidate.cannot_run),
    )  # fmt: skip


def _check_neurons(ask: Ask, spec: ModelSpec, weights: Format, firing: Firing | None) -> None:
    """Raises BadRequest where an ask wants of neurons what this model or version cannot do."""
    if ask.sparsity == "exact" and not spec.fires:
        raise BadRequest("--sparsity exact: all neurons of this model fire, since its activation is no ReLU")
    if ask.sparsity == "predict":
        if not spec.fires:
            raise BadRequest("--sparsity predict: this model's activation is no ReLU, so no neuron can be left out")
        if foretold_of(spec, firing) is None:
            raise BadRequest(
                "--sparsity predict: this model has no predictors (`penstock train-predictors` trains them)"
            )
        if ask.use_device:
            raise BadRequest("--sparsity predict runs without a device, whose kernels have no predictors yet")
    if weights.neurons and ask.use_device:
        raise BadRequest(
            f"weights in {weights.name} run without a device: pack them in {weights.in_tiles.name} for one"
        )
    if weights.for_cpu and ask.use_device:
        raise BadRequest(f"weights in {weights.name}, a format of GGUF files, run without a device in this version")


def _may_be_chosen(candidate: Candidate) -> bool:
    """Whether the runtime can run the plan, and its answers are the model's."""
    return not candidate.lossy and not candidate.cannot_run


def _score_s(each: Compared, ask: Ask) -> float:
    """Seconds that the objective brings down, as simulated."""
    return score_s(each.prediction, each.candidate.plan, ask)


def _ranked(compared: list[Compared], ask: Ask) -> list[Compared]:
    """The best first. Plans within _EQUAL of the best are equals, because predictions are no sharper. Of equals the one
    that reads less from disks comes first, because other programs may use the disk too: to read a tenth less is worth
    2 % of time. Of two plans that read nearly the same, such as with rings of two sizes, the faster one comes first."""
    equal_s = min(_score_s(each, ask) for each in compared) * _EQUAL

    def rank(each: Compared) -> tuple[bool, float]:
        seconds, read_bytes = _score_s(each, ask), each.prediction.disk_bytes_per_token
        return (True, seconds) if seconds > equal_s else (False, seconds * read_bytes**_READS_WEIGH)

    return sorted(compared, key=rank)


def shared_reason(plan: Plan) -> tuple[str, ...]:
    """A sentence about pages that sequences share, where they do."""
    if not plan.kv_pages:
        return ()
    seqs, layout = plan.batch_seqs * plan.batches_per_pass, Layout(plan)
    tokens = plan.kv_pages * plan.page_tokens
    pool_bytes = sum(arena.bytes for arena in plan.arenas if arena.name.endswith(".kv"))
    whole_bytes = pool_bytes // plan.kv_pages * seqs * layout.kv.pages_per_seq
    return (
        f"KV room for {tokens} tokens of {seqs} sequences together, in pages of {plan.page_tokens} that are handed out"
        f" as they grow: {format_bytes(pool_bytes)}, where whole contexts would take {format_bytes(whole_bytes)}",
    )
