"""FlexGen's plans of least memory: the smallest block, with all weights in one tier and all KV in one tier.

A refusal names the least bytes that one of them takes. They are also candidates if the linear program finds no policy.
That happens where memory is tight, because the program leaves room for arenas that are rounded up.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, compress, product
from math import prod

from penstock.planner.programs.block_sizes import blocks
from penstock.planner.programs.policy import Shares
from penstock.planner.solve.flexgen.shape import ATTENDS, IN, BlockShape, chunk_options
from penstock.planner.solve.flexgen.terms import modes
from penstock.planner.solve.problem import Problem
from penstock.spec.places import GPU, HOST
from penstock.spec.plan import Plan

# The share of weights on the device is found within 1/64.
_HALVINGS = 6


def least(problem: Problem) -> Iterator[tuple[BlockShape, Plan]]:
    """The plans, whether they fit or not, of an ask for which FlexGen has plans (`Problem.wants_blocks`). Plans whose
    weights are all on the disk but for what the device has room for, and the same with none there."""
    main = GPU.executor if problem.has_device else HOST
    gpu_batch, batches = min(blocks(problem.ask.batch, problem.ask.objective == "latency"), key=prod)
    for attends in ATTENDS if main == GPU.executor else ("device",):
        shape = BlockShape(problem, main, gpu_batch, batches, chunk_options(problem, gpu_batch)[0], attends)
        # Weights and KV, each in one tier. Weights in RAM take more of it than those on the disk.
        pairs = chain.from_iterable(product(compress(IN, mode.weights), compress(IN, mode.kv)) for mode in modes(shape))
        tried = dict.fromkeys(pair for pair in pairs if pair[0] != IN[1])
        for weights, kv in tried:
            plan = shape.plan(weights, kv)
            if not problem.moves_chosen_values(plan):
                yield shape, plan
                if main == GPU.executor and weights == IN[2] and problem.fits(plan, GPU.executor):
                    yield shape, _partly_there(shape, kv, plan)


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
