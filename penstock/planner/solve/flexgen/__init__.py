"""FlexGen's policy search: enumerate (batch on the device, batches a block), place by a linear program.

The batch is a multiple of 4 and a block has fewer than 20 of them, "so there are not too many choices" (slides, "Cost
Model and Policy Search"). For each, and for each way to attend to KV that is not at home on the device, `terms`
writes the program, `program` solves it and `shape` rounds the shares to a plan. KV goes by whole layers,
so the program is solved again with KV there; what is then off is less than a granule of weights a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.fill import MIN_CHUNK_ROWS
from penstock.planner.solve.flexgen import program as lp
from penstock.planner.solve.flexgen.shape import ATTENDS, Shape, whole_layers
from penstock.planner.solve.flexgen.terms import Mode, Terms, modes
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.places import GPU, HOST, Executor
from penstock.spec.plan import Plan
from penstock.units import format_bytes, round_up

BATCH_STEP, MOST_BATCHES = 4, 19
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, MOST_BATCHES)
# Sizes of block that are all tried: those of some 1,000 sequences. 10,000 have 94, which took 20 s with a device.
_MANY_SIZES, _USUAL_BATCHES = 61, (1, 2)
_MOST_CHUNK_ROWS, _FEWER_ROWS = 2048, 512
_ATTEMPTS = 4
_DISK_BINDS = 1.05
CANNOT_RUN = "attention on the CPU with its projections on the device"


class BestPolicy(NamedTuple):
    """A policy: its shape, the program that it solves, and the solution with KV in whole layers."""

    shape: Shape
    program: lp.Program
    solution: lp.Solution

    @property
    def seconds_a_sequence(self) -> float:
        """T of all sequences that were asked for, in blocks of which the last may not be full, over their number."""
        return a_sequence(self.shape, self.solution.seconds)


def a_sequence(shape: Shape, block_s: float) -> float:
    return block_s * -(-shape.problem.ask.batch // shape.block) / shape.problem.ask.batch


def blocks(batch: int, whole: bool) -> list[tuple[int, int]]:
    """(gpu_batch, batches) to try for so many sequences, in one block (`whole`) or in several that are alike; the
    largest first. None has a batch that the sequences leave empty."""
    found, block = set(), batch
    while True:
        for batches in _BATCHES:
            size = round_up(-(-block // batches), BATCH_STEP)
            if (batches - 1) * size < batch:
                found.add((size, batches))
        if whole or block <= BATCH_STEP:
            return sorted(found, key=lambda sizes: (-sizes[0] * sizes[1], sizes))
        block = -(-block // 2)


def search(problem: Problem, attends: Sequence[str] = ATTENDS) -> dict[str, BestPolicy]:
    """The best policy for each of some ways to attend; empty where nothing fits."""
    main, found = GPU.executor if problem.device_bytes else HOST, dict[str, BestPolicy]()
    for way in ATTENDS if main == GPU.executor else ("device",):
        # Scores on the CPU want blocks like those of the other ways: only these are tried.
        like = [policy.shape for policy in found.values()] if way == "cpu scores" else []
        best = _best(problem, main, way, like) if way in attends else None
        if best is not None:
            found[way] = best
    return found


def _best(problem: Problem, main: Executor, attends: str, like: Sequence[Shape]) -> BestPolicy | None:
    """The best policy of all blocks, for one way to attend.

    Thousands of sequences have many sizes of block. T of a sequence is smooth in the size of the block and nearly flat
    in its batches (docs/LOG.md). So few numbers of batches tell which blocks are worth trying with all; where `like`
    shapes are known, they do.
    """
    ask, best = problem.ask, None
    left = trying = blocks(ask.batch, ask.objective == "latency")
    if len(left) > _MANY_SIZES:
        trying = [size for size in left if any(_alike(size, shape) for shape in like)]
        trying = trying or [size for size in left if size[1] in _USUAL_BATCHES]
    while trying:
        for gpu_batch, batches in trying:
            for chunk_rows in chunk_options(ask, gpu_batch):
                best = _better(best, Terms(Shape(problem, main, gpu_batch, batches, chunk_rows, attends)))
        left = [size for size in left if size not in trying]
        trying = [size for size in left if best is None or _alike(size, best.shape)]
    return best


def _alike(size: tuple[int, int], shape: Shape) -> bool:
    """Whether a block has about as many sequences as a shape's, or half or twice as many in as many batches."""
    gpu_batch, batches = size
    ratio = gpu_batch * batches / shape.block
    return 0.7 < ratio < 1.4 or (batches == shape.batches and 0.4 < ratio < 2.5)


def _better(known: BestPolicy | None, terms: Terms) -> BestPolicy | None:
    """The best policy of a shape, where it is better than the one that is known."""
    for mode in modes(terms.shape):
        found = place(terms, mode, known.seconds_a_sequence if known else None)
        if found is not None and (known is None or found.seconds_a_sequence < known.seconds_a_sequence):
            known = found
    return known


def chunk_options(ask: Ask, gpu_batch: int) -> list[int]:
    """Rows of a prompt's batch to try, fewest first: whole prompts, where one is no longer than that."""
    assert ask.context is not None, "settle_context came first"
    prompt = min(ask.prompt_tokens, ask.context - 1)
    whole = {min(gpu_batch, max(1, rows // prompt)) * prompt for rows in (_MOST_CHUNK_ROWS, _FEWER_ROWS)}
    return sorted({max(MIN_CHUNK_ROWS, min(rows, _MOST_CHUNK_ROWS)) for rows in whole})


def place(terms: Terms, mode: Mode, better_than_s: float | None = None) -> BestPolicy | None:
    """The optimum of a shape with KV in whole layers; None where nothing fits or, by the bound, nothing is better."""
    shape = terms.shape
    if not _may_fit(shape, mode):
        return None
    program = terms.program(mode)
    below_s = inf if better_than_s is None else better_than_s / a_sequence(shape, 1.0)
    if program.least_s >= below_s:
        return None
    relaxed = lp.solve(program, None, below_s)
    if relaxed is None:
        return None
    free = program.allowed["kv"]
    near = whole_layers(shape.problem.layers, relaxed.policy.kv, shape.moved_tier)
    near = [kv for kv in near if all(may or not share for share, may in zip(kv, free, strict=True))]
    program = terms.program(mode, relaxed.policy.weights)
    options = (lp.solve(program, kv, below_s) for kv in near)
    found = min((each for each in options if each is not None), key=lambda each: each.seconds, default=None)
    if found is None:
        return None
    program = terms.program(mode, found.policy.weights)
    if shape.main == GPU.executor and mode.weights[2] and mode.kv[2] and not _disk_binds(program, found.policy):
        return None
    return BestPolicy(shape, program, lp.settled(program, found.policy))


def _disk_binds(program: lp.Program, policy: lp.Policy) -> bool:
    """Whether reading the disk is what takes longest in decode. Where it is not, and weights and KV both come from it,
    weights wait for room in the stage, so for the link, and KV waits behind them: the lanes take turns."""
    found = lp.lanes(program.decode, policy)
    return found[lp.READ] >= _DISK_BINDS * max(seconds for lane, seconds in found.items() if lane != lp.READ)


def _may_fit(shape: Shape, mode: Mode) -> bool:
    """Whether what has to stay with the executor is less than it has."""
    most = shape.problem.device_bytes if shape.main == GPU.executor else shape.problem.host_bytes
    return (not mode.streams) * shape.placed_bytes + (not any(mode.kv[1:])) * shape.kv_bytes <= most


def plan_of(found: BestPolicy) -> Plan | None:
    """The policy as a plan that fits; where rounding up to huge pages took too much, with a little less at home."""
    policy = found.solution.policy
    for _ in range(_ATTEMPTS):
        plan = found.shape.rounded(policy)
        if found.shape.problem.fits(plan):
            return plan
        near, ram, disk = policy.weights
        near, ram = near * 0.98, ram * (0.98 if disk else 1.0)
        policy = replace(policy, weights=(near, ram if disk else 1 - near, 1 - near - ram if disk else 0.0))
    return None


def candidates(problem: Problem) -> Iterator[Candidate]:
    """The best policy of each way to attend, as a plan. No candidate for fewer sequences than a batch has, where a
    limit of weights was named (the program has no row for it), or where every row's logits are wanted."""
    ask = problem.ask
    if ask.batch < BATCH_STEP or ask.resident_bytes is not None or ask.score:
        return
    for attends, found in search(problem).items():
        plan = plan_of(found)
        if plan is not None:
            yield Candidate(_name(found), plan, _reasons(found, plan), CANNOT_RUN if attends == "cpu scores" else "")


def _name(found: BestPolicy) -> str:
    return f"block of {found.shape.batches} × {found.shape.gpu_batch}{_WHO[found.shape.attends]}"


_WHO = {"device": "", "cpu": ", attention on the CPU", "cpu scores": ", scores on the CPU"}


def _reasons(found: BestPolicy, plan: Plan) -> tuple[str, ...]:
    shape, solution = found.shape, found.solution
    here = "device memory" if shape.main == GPU.executor else "RAM"
    policy, asked = shape.shares_of(plan), shape.problem.ask.batch
    where = " · ".join(
        f"{what} {share:.0%} in {place}" if place != "disk" else f"{what} {share:.0%} on the disk"
        for what, shares in (("weights", policy.weights), ("KV", policy.kv))
        for share, place in zip(shares, (here, "RAM", "disk"), strict=True)
        if share > 0
    )
    rounds = -(-asked // shape.block)
    return (
        f"{asked} sequences in {rounds} block{'s' if rounds > 1 else ''} of {shape.batches} batches of"
        f" {shape.gpu_batch}: what streams crosses once a block and token",
        f"{where} of {format_bytes(shape.placed_bytes)} and {format_bytes(shape.kv_bytes)}",
        f"the linear program says {solution.seconds:.3g} s a block: a layer takes {solution.t_pre_s:.3g} s of prompts"
        f" ({_LANE[solution.busiest[0]]}) and {solution.t_gen_s:.3g} s a token ({_LANE[solution.busiest[1]]})",
    )


_LANE = {
    lp.READ: "bound by reading the disk",
    lp.WRITE: "bound by writing to the disk",
    lp.TO_DEVICE: "bound by the link to the device",
    lp.TO_HOST: "bound by the link to RAM",
    lp.COMPUTE: "bound by computing",
    lp.WINDOW: "bound by the windows that KV moves through",
}
