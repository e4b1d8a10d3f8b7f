"""The plans of FlexGen's with the least memory: of the smallest block, with weights and KV each in one tier.

A refusal names what the least of them takes. The program leaves room for arenas that are rounded up, so where memory is
that tight it finds no policy; then these plans are the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from penstock.planner.programs.block_sizes import BATCH_STEP, blocks
from penstock.planner.programs.policy import Shares
from penstock.planner.solve.flexgen.shape import ATTENDS, IN, BlockShape, chunk_options
from penstock.planner.solve.flexgen.terms import modes
from penstock.planner.solve.problem import Problem
from penstock.spec.places import GPU, HOST
from penstock.spec.plan import Plan

# The share of weights on the device is found within 1/64.
_HALVINGS = 6


def applies(problem: Problem) -> bool:
    """Whether FlexGen has plans: not of fewer sequences than BATCH_STEP, nor if the user limits the weights that stay
    (the program has no row for that), nor if the logits of every row are wanted."""
    ask = problem.ask
    return ask.batch >= BATCH_STEP and ask.resident_bytes is None and not ask.score


def least(problem: Problem) -> Iterator[tuple[BlockShape, Plan]]:
    """The plans, whether they fit or not; none where FlexGen has none. Plans whose weights are all on the disk but for
    what the device has room for, and the same with none there."""
    if not applies(problem):
        return
    main = GPU.executor if problem.has_device else HOST
    gpu_batch, batches = min(blocks(problem.ask.batch, problem.ask.objective == "latency"), key=prod)
    for attends in ATTENDS if main == GPU.executor else ("device",):
        shape = BlockShape(problem, main, gpu_batch, batches, chunk_options(problem, gpu_batch)[0], attends)
        tried = dict.fromkeys(  # weights in RAM take more of it than those on the disk
            (weights, kv)
            for mode in modes(shape)
            for weights in _alone(mode.weights)
            for kv in _alone(mode.kv)
            if weights != IN[1]
        )  # fmt: skip
        for weights, kv in tried:
            plan = shape.plan(weights, kv)
            if not problem.moves_chosen_values(plan):
                yield shape, plan
                if main == GPU.executor and weights == IN[2] and problem.fits(plan, GPU.executor):
                    yield shape, _partly_there(shape, kv, plan)


def _alone(may: tuple[bool, bool, bool]) -> list[Shares]:
    """All in one tier, for each tier that a mode allows."""
    return [shares for shares, allowed in zip(IN, may, strict=True) if allowed]


def _partly_there(shape: BlockShape, kv: Shares, least: Plan) -> Plan:
    """The plan with as large a share of the weights on the device as it has room for, and the others on the disk: so
    less of a layer passes the stage in RAM. `least`: with none there, which fits on the device."""
    lo, hi = 0.0, 1.0
    for _ in range(_HALVINGS):
        there = (lo + hi) / 2
        plan = shape.plan((there, 0.0, 1 - there), kv)
        if shape.problem.fits(plan, GPU.executor):
            lo, least = there, plan
        else:
            hi = there
    return least
