"""FlexGen's policy search: sizes of a block are enumerated, and for each a linear program places weights and KV.

A block is a number of batches that go through a layer together. A batch is a multiple of 4 sequences and a block has
fewer than 20 batches, "so there are not too many choices" (slides, "Cost Model and Policy Search"). There are three
ways to attend to KV that is not at home on the device (`shape.ATTENDS`), and for each way some modes (`terms.modes`).
For each block and mode, `terms` writes the program, `programs/policy` solves it, and `shape` rounds the shares to a
plan. KV is placed by whole layers, so the program is solved again with KV fixed to whole layers. The plan differs from
that solution by less than a granule of weights a layer.

For each way and mode there are two candidates: the best block of one batch, and the best of several. `solve` simulates
the candidates that may win, because the program knows nothing of lanes that wait for each other, or that work at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from operator import le
from typing import NamedTuple

from penstock.planner.candidate import Candidate
from penstock.planner.delegation import sentences
from penstock.planner.paper_reasons import in_blocks
from penstock.planner.programs import policy as lp
from penstock.planner.programs.block_sizes import blocks
from penstock.planner.programs.whole_layers import whole_layers
from penstock.planner.solve.flexgen.least import least
from penstock.planner.solve.flexgen.shape import ATTENDS, BlockShape, chunk_options
from penstock.planner.solve.flexgen.terms import Mode, Terms, modes
from penstock.planner.solve.problem import Problem
from penstock.spec.places import GPU, HOST, Executor
from penstock.spec.plan import Plan

# Up to 61 sizes of a block are all tried: so many have some 1,000 sequences. 10,000 sequences have 94 sizes, and to try
# all of them took 20 s with a device. Of more sizes, blocks of 1 or 2 batches are tried first.
_MANY_SIZES, _USUAL_BATCHES = 61, (1, 2)
_ATTEMPTS = 4
# A mode is a candidate if its policy takes at most so many times as long as the best of its way, by the program. Of 57
# random machines the simulated best was never beyond 1.07 (docs/LOG.md).
_HOPELESS = 1.25
# Who attends (ATTENDS), what may be where, whether a block has several batches. The program adds up what the CPU and
# the device compute, so it cannot tell what it gains if the CPU attends to one batch while the device computes another.
# Nor does it know that each batch of a layer waits for its turn of the windows that KV moves through: where it saw no
# difference, 4 batches of 16 took 1.026 times as long as one of 64 (docs/LOG.md).
Way = tuple[str, Mode, bool]


class BestPolicy(NamedTuple):
    """The best policy of a mode. `solution`: the program's, with KV in whole layers."""

    shape: BlockShape
    solution: lp.Solution

    @property
    def seconds_a_sequence(self) -> float:
        """The seconds of all blocks, of which the last may not be full, over the number of sequences asked for."""
        return a_sequence(self.shape, self.solution.seconds)


def a_sequence(shape: BlockShape, block_s: float) -> float:
    """Seconds a sequence, if a block takes `block_s` seconds."""
    return block_s * -(-shape.problem.ask.batch // shape.block) / shape.problem.ask.batch


def search(problem: Problem, attends: Sequence[str] = ATTENDS) -> dict[Way, BestPolicy]:
    """The best policy of each way. Those of which nothing fits, or that are hopeless (_HOPELESS), are left out.
    `attends`: who may attend. Raises InternalError if HiGHS fails."""
    main, policies = GPU.executor if problem.has_device else HOST, dict[Way, BestPolicy]()
    for who in ATTENDS if main == GPU.executor else ("device",):
        # The best blocks for scores on the CPU are like the best ones of the other ways, so only such are tried.
        like = [policy.shape for policy in policies.values()] if who == "cpu scores" else []
        best = _best(problem, main, who, like) if who in attends else {}
        most_s = min((policy.seconds_a_sequence for policy in best.values()), default=0.0) * _HOPELESS
        policies |= {key: policy for key, policy in best.items() if policy.seconds_a_sequence <= most_s}
    return policies


def _best(problem: Problem, main: Executor, attends: str, like: Sequence[BlockShape]) -> dict[Way, BestPolicy]:
    """The best policies of all blocks, for one way to attend.

    Thousands of sequences have many sizes of a block. The seconds of a sequence are smooth in the size of the block,
    and nearly the same for all numbers of batches and for all chunks of prompts (docs/LOG.md). So some sizes are tried
    first: those like the shapes `like`, or those of few batches with the largest chunks. Then sizes like the best ones
    are tried, until there are none left.
    """
    ask, best = problem.ask, dict[Way, BestPolicy]()
    sizes = blocks(ask.batch, ask.objective == "latency")
    left = trying = [(*size, rows) for size in sizes for rows in chunk_options(problem, size[0])]
    if len(sizes) > _MANY_SIZES:
        trying = [size for size in left if any(_alike(size, shape) for shape in like)]
        trying = trying or [
            size for size in left if size[1] in _USUAL_BATCHES and size[2] == chunk_options(problem, size[0])[-1]
        ]
    while trying:
        for gpu_batch, batches, chunk_rows in trying:
            terms = Terms(BlockShape(problem, main, gpu_batch, batches, chunk_rows, attends))
            for mode in modes(terms.shape):
                way = (attends, mode, batches > 1)
                policy = place(terms, mode, best[way].seconds_a_sequence if way in best else inf)
                if policy is not None:
                    best[way] = policy
        tried = set(trying)
        left = [size for size in left if size not in tried]
        trying = [size for size in left if not best or any(_alike(size, policy.shape) for policy in best.values())]
    return best


def _alike(size: tuple[int, int, int], shape: BlockShape) -> bool:
    """Whether a block has about as many sequences as a shape's block, or about half or twice as many in the same number
    of batches. Its chunks do not matter. `size`: sequences of a batch, batches, rows of a chunk."""
    gpu_batch, batches, _ = size
    ratio = gpu_batch * batches / shape.block
    return 0.7 < ratio < 1.4 or (batches == shape.batches and 0.4 < ratio < 2.5)


def place(terms: Terms, mode: Mode, better_than_s: float = inf) -> BestPolicy | None:
    """The best policy of a shape in a mode, with KV in whole layers. None if nothing fits, or if nothing takes less
    than `better_than_s` seconds a sequence. Raises InternalError if HiGHS fails."""
    shape = terms.shape
    if not _may_fit(shape, mode):
        return None
    program = terms.program(mode)
    below_s = better_than_s / a_sequence(shape, 1.0)
    relaxed = lp.solve(program) if program.least_s < below_s else None
    if relaxed is None or relaxed.seconds >= below_s:
        return None
    near = whole_layers(shape.problem.layers, relaxed.policy.kv, shape.moved_tier)
    options = (lp.solve(program, kv) for kv in near if all(map(le, map(bool, kv), mode.kv)))
    best = min((each for each in options if each is not None), key=lambda each: each.minimised_s, default=None)
    return BestPolicy(shape, best) if best is not None and best.seconds < below_s else None


def _may_fit(shape: BlockShape, mode: Mode) -> bool:
    """Whether the memory of the main executor has room for everything that the mode lets be nowhere else."""
    most = shape.problem.device_bytes if shape.main == GPU.executor else shape.problem.host_bytes
    return (not mode.streams) * shape.placed_bytes + (not any(mode.kv[1:])) * shape.kv_bytes <= most


def plan_of(best: BestPolicy) -> Plan | None:
    """The policy as a plan that fits. Arenas are rounded up to huge pages, so a plan may take too much. Then 2 % less
    of the weights stay, up to _ATTEMPTS times. None if that does not do."""
    policy = best.solution.policy
    for _ in range(_ATTEMPTS):
        plan = best.shape.plan(policy.weights, policy.kv)
        if best.shape.problem.fits(plan):
            return plan
        near, ram, disk = policy.weights
        near, ram = near * 0.98, ram * (0.98 if disk else 1.0)
        policy = replace(policy, weights=(near, ram if disk else 1 - near, 1 - near - ram if disk else 0.0))
    return None


def candidates(problem: Problem) -> Iterator[Candidate]:
    """The best policy of each way, as a plan. If none of them fits, the plans of least memory that do. The ask is one
    for which FlexGen has plans (`Problem.wants_blocks`)."""
    any_found = False
    for best in search(problem).values():
        plan = plan_of(best)
        if plan is not None and not problem.moves_chosen_values(plan):
            yield _candidate(best.shape, plan, best.solution)
            any_found = True
    if not any_found:
        for shape, plan in least(problem):
            if problem.fits(plan):
                yield _candidate(shape, plan)


_WHO = {"device": "", "cpu": ", attention on the CPU", "cpu scores": ", scores on the CPU"}


def _candidate(shape: BlockShape, plan: Plan, solution: lp.Solution | None = None) -> Candidate:
    """The candidate. Its reasons are about the block, what the program says of it, and delegated attention."""
    problem, placed = shape.problem, {part.key for part in shape.placed}
    told = in_blocks(plan, problem.ask.batch, placed, shape.kv_bytes, solution)
    told += sentences(plan, problem.cost, problem.half_way)
    return Candidate(f"block of {shape.batches} × {shape.gpu_batch}{_WHO[shape.attends]}", plan, told)
