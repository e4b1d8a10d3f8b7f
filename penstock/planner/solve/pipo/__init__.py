"""PIPO's plans: attention and FFN are separate whole blocks, the device computes all of them, in one of two pipelines.

Eq. 1 of the paper chooses the home of the weights and the pipeline by an account of bytes (`programs/pipo_memory`).
Here a plan's own bytes decide, and the result of Eq. 1 stands among the reasons. The overlapped pipeline has a ring for
two blocks: one comes while the other computes. The memory-saving pipeline has a ring for one. KV lives in RAM (section
3.1.1). It lives on the device only if all weights do, so that nothing is offloaded (appendix C.7).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import product

from penstock.graph.arenas import ARENA_ALIGN
from penstock.planner.candidate import Candidate
from penstock.planner.paper_reasons import by_equation_1, in_pipeline
from penstock.planner.programs import pipo_memory as memory
from penstock.planner.programs.pipo_memory import Configuration
from penstock.planner.shares import Resident
from penstock.planner.sizes import chunk_options
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.skeleton import Skeleton
from penstock.spec.parts import PINNED
from penstock.spec.places import DISK, GPU, HOST, Tier
from penstock.spec.plan import Plan
from penstock.units import round_up

NAMES = {order: f"PIPO, {name}" for order, name in memory.PIPELINES.items()}
PARTIAL = ", partly on the device"
_SHARES = 256  # a share of weights on the device is a multiple of 1/256


def candidates(problem: Problem) -> Iterator[Candidate]:
    """At most two candidates for each pipeline. One has all weights in the nearest home that fits. The other has a
    share of them on the device (partial offloading, appendix C.5).

    If all weights fit on the device there is only one candidate, because nothing is left to be pipelined. There is none
    without a device, or if the ask wants KV on the disk."""
    if not problem.has_device or problem.ask.kv_home == "disk":
        return
    for pipeline in memory.PIPELINES:
        whole = _whole(problem, pipeline)
        if whole is not None:
            yield _candidate(problem, *whole)
            if whole[0].home == GPU.executor:
                return
        partly = _partial(problem, pipeline) if problem.ask.resident_bytes is None else None
        if partly is not None:
            yield _candidate(problem, *partly)


def plan(
    problem: Problem, choice: Configuration, kv_home: Tier, chunk_rows: int, order: str | None = None,
    whole_blocks: bool = True,
) -> Plan:  # fmt: skip
    """The complete plan of a choice, whether it fits or not.

    order           an order other than the pipeline's
    whole_blocks    units are whole blocks. If not, units and rings are as small as granules allow

    An embedding of which single rows are looked up stays in RAM, or on the disk if the user limits the weights that
    stay. The stage between disk and device holds twice as much as a ring of two blocks: with less, the disk would wait
    while a large block is lifted."""
    ask, parts = problem.ask, problem.parts
    block, two = _block_bytes(problem) if whole_blocks else (0, 0)
    granule = max(part.granule_bytes for part in parts.values() if part.kind not in PINNED)
    ring = round_up(max(two if choice.pipeline == "overlapped" else block, 2 * granule), ARENA_ALIGN)
    skeleton = Skeleton(
        problem, chunk_rows, problem.layers, kv_home, ring, order or choice.pipeline, prompts=True,
        lifted=(1.0,) * problem.layers, ring_bytes=ring, unit_bytes=block,
        stage_bytes=2 * round_up(max(two, 2 * granule), ARENA_ALIGN),
    )  # fmt: skip
    on_device = {key: int(part.granules * choice.on_device) for key, part in parts.items()}
    in_memory: Resident = {}
    if choice.home == HOST:
        in_memory = {key: part.granules - on_device[key] for key, part in parts.items()}
    if not problem.spec.tied:
        on_device["embed"], in_memory["embed"] = 0, parts["embed"].granules if ask.resident_bytes is None else 0
    return skeleton.plan(on_device, in_memory)


def _homes(problem: Problem) -> tuple[Tier, ...]:
    """The homes to try, the nearest first. RAM is tried only if the link is faster than the disk (Eq. 1). If the user
    limits the weights that stay, only the disk is tried."""
    if problem.ask.resident_bytes is not None:
        return (DISK.tier,)
    return memory.HOMES if _limits(problem).link_is_faster else (GPU.executor, DISK.tier)


def _whole(problem: Problem, pipeline: str) -> tuple[Configuration, Plan] | None:
    """The first plan that fits: with all weights in the nearest home, with the nearest KV, with whole blocks, with the
    longest chunks of prompts. Only the memory-saving pipeline may cut blocks. None if nothing fits."""
    looked_up = 0 if problem.spec.tied else problem.parts["embed"].nbytes
    in_ram = sum(part.nbytes for part in problem.parts.values() if part.kind not in PINNED)
    too_large: dict[Tier, bool] = {
        GPU.executor: in_ram - looked_up > problem.device_bytes,
        HOST: in_ram > problem.host_bytes,
    }
    cuts = (True, False) if pipeline == "saving" else (True,)
    for home in (home for home in _homes(problem) if not too_large.get(home)):  # a quick check by the weights alone
        choice = Configuration(home, pipeline, float(home == GPU.executor))
        kv_homes = (GPU.executor, HOST) if home == GPU.executor else (HOST,)
        for kv_home, whole_blocks, rows in product(kv_homes, cuts, chunk_options(problem.ask)):
            candidate = plan(problem, choice, kv_home, rows, whole_blocks=whole_blocks)
            if problem.fits(candidate):
                return choice, candidate
    return None


def _partial(problem: Problem, pipeline: str) -> tuple[Configuration, Plan] | None:
    """The same share of every part on the device, as large as fits, and the rest in the nearest home that has room. The
    chunks of prompts are the longest that fit with nothing on the device. None if nothing fits."""
    for home in (home for home in _homes(problem) if home != GPU.executor):

        @cache
        def plan_of(rows: int, shares: int, home: Tier = home) -> Plan:
            return plan(problem, Configuration(home, pipeline, shares / _SHARES), HOST, rows)

        fitting = (rows for rows in chunk_options(problem.ask) if problem.fits(plan_of(rows, 0), GPU.executor))
        rows = next(fitting, None)
        if rows is None:
            continue
        shares = problem.most_on_device(_SHARES - 1, partial(plan_of, rows))
        if shares and problem.fits(plan_of(rows, shares)):
            return Configuration(home, pipeline, shares / _SHARES), plan_of(rows, shares)
    return None


def _candidate(problem: Problem, choice: Configuration, plan: Plan) -> Candidate:
    """The candidate. Its first reason is the account of Eq. 1, which is the paper's and not the plan's."""
    partly = PARTIAL if choice.home != GPU.executor and choice.on_device else ""
    ask, s = problem.ask, memory.sizes(problem.spec, problem.weights, problem.kv)
    account = by_equation_1(s, ask.batch, ask.sequence_tokens, _limits(problem))
    return Candidate(NAMES[choice.pipeline] + partly, plan, (account, *in_pipeline(plan, choice)))


def _limits(problem: Problem) -> memory.MachineLimits:
    """The bytes that may be taken of both memories, and the machine's rates of lifts and of loads."""
    cost, kind = problem.cost, problem.weights.kind
    link, disk = cost.bytes_per_s(GPU.to_device, "lift", kind), cost.bytes_per_s(DISK.reads, "load", kind)
    return memory.MachineLimits(problem.device_bytes, problem.host_bytes, link, disk)


def _block_bytes(problem: Problem) -> tuple[int, int]:
    """(bytes of the largest block, bytes of the largest two blocks that follow each other), as packed. A block is a
    layer's attention or its FFN. Of the vocabulary a granule counts as a block, because it may come in many units."""
    blocks = [part.nbytes for part in problem.parts.values() if part.kind in ("attn", "ffn")]
    granule = problem.head.granule_bytes
    pairs = [a + b for a, b in zip(blocks, [*blocks[1:], blocks[0]], strict=True)]
    return max(*blocks, granule), max(*pairs, 2 * granule)
