"""PIPO's plans: attention and FFN as separate whole blocks, all computed on the device, in two pipelines.

Which home the weights have and which pipeline runs is Eq. 1's question (`memory`). What fits is asked of the plans
themselves, to the byte; the paper's own account stands among the reasons. The overlapped pipeline has a ring for two
blocks, so that the next one comes while this one computes; the memory-saving one a ring for one. KV lives in RAM
(section 3.1.1), on the device only where all weights do and nothing needs to be offloaded (appendix C.7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

from penstock.graph.arenas import ARENA_ALIGN
from penstock.planner.solve.beside import DeviceSkeleton, Split
from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.fill import Resident, chunk_options
from penstock.planner.solve.pipo import memory
from penstock.planner.solve.problem import Problem, most
from penstock.spec.parts import PINNED
from penstock.spec.places import DISK, GPU, HOST, Tier
from penstock.spec.plan import Plan
from penstock.units import format_bytes, format_rate, round_up

NAMES = {"overlapped": "PIPO, overlapped", "saving": "PIPO, memory-saving"}
PARTIAL = ", partly on the device"
_SHARES = 256  # a share of weights on the device is a multiple of 1/256
_PLACES = {GPU.executor: "in device memory", HOST: "in RAM", DISK.tier: "on the disk"}


def candidates(problem: Problem) -> Iterator[Candidate]:
    """For each pipeline the nearest home in which all weights fit, and what the device holds beside it (partial
    offloading, appendix C.5). Nothing where there is no device or KV is to be on the disk; where all weights stay on
    the device one plan, since nothing is left to be pipelined."""
    if not problem.has_device or problem.ask.kv_home == "disk":
        return
    for pipeline in memory.PIPELINES:
        whole = _whole(problem, pipeline)
        if whole is not None:
            yield _candidate(problem, *whole)
            if whole[0].home == GPU.executor:
                return
        partial = _partial(problem, pipeline) if problem.ask.resident_bytes is None else None
        if partial is not None:
            yield _candidate(problem, *partial)


def plan(
    problem: Problem,
    choice: memory.Choice,
    kv_home: Tier,
    chunk_rows: int,
    order: str | None = None,
    whole_blocks: bool = True,
) -> Plan:
    """Complete; whether it fits is another question. `order`: another than the pipeline's. Without `whole_blocks`,
    units and rings are as small as granules allow. An embedding that is only looked up stays in RAM, or on the disk
    where a limit on what stays is asked for. The stage between disk and device holds what the ring of two blocks does
    twice: with less, the disk waits for its bytes while a large block is lifted."""
    ask, parts = problem.ask, problem.parts
    block, two = memory.block_bytes(problem) if whole_blocks else (0, 0)
    granule = max(part.granule_bytes for part in parts.values() if part.kind not in PINNED)
    ring = round_up(max(two if choice.pipeline == "overlapped" else block, 2 * granule), ARENA_ALIGN)
    skeleton = DeviceSkeleton(
        problem, Split("link", 1.0, problem.layers, kv_home, True), chunk_rows,
        ring_bytes=ring, host_ring_bytes=ring, stage_bytes=2 * round_up(max(two, 2 * granule), ARENA_ALIGN),
        order=order or choice.pipeline, unit_bytes=block,
    )  # fmt: skip
    on_device = {key: int(part.granules * choice.on_device) for key, part in parts.items()}
    in_memory: Resident = {}
    if choice.home == HOST:
        in_memory = {key: part.granules - on_device[key] for key, part in parts.items()}
    if not problem.spec.tied:
        on_device["embed"], in_memory["embed"] = 0, parts["embed"].granules if ask.resident_bytes is None else 0
    return skeleton.plan(on_device, in_memory)


def _homes(problem: Problem) -> tuple[Tier, ...]:
    """The nearest first. RAM only where the link is faster than the disk (Eq. 1); the disk alone where a limit on what
    stays in memory is asked for."""
    if problem.ask.resident_bytes is not None:
        return (DISK.tier,)
    return memory.HOMES if memory.limits_of(problem).link_is_faster else (GPU.executor, DISK.tier)


def _whole(problem: Problem, pipeline: str) -> tuple[memory.Choice, Plan] | None:
    """The first home that fits, with the longest chunks of prompts that do."""
    matrices = [part for part in problem.parts.values() if part.kind not in PINNED]
    looked_up = 0 if problem.spec.tied else problem.parts["embed"].nbytes
    in_ram = sum(part.nbytes for part in matrices)
    too_large: dict[Tier, bool] = {
        GPU.executor: in_ram - looked_up > problem.device_bytes,
        HOST: in_ram > problem.host_bytes,
    }
    for home in (home for home in _homes(problem) if not too_large.get(home)):  # by weights alone
        choice = memory.Choice(home, pipeline, float(home == GPU.executor))
        found = _fitting(problem, choice, (GPU.executor, HOST) if home == GPU.executor else (HOST,))
        if found is not None:
            return choice, found
    return None


def _partial(problem: Problem, pipeline: str) -> tuple[memory.Choice, Plan] | None:
    """As much as fits on the device, in even shares of every part, beside the longest chunks that fit with none; the
    rest in the nearest home that takes it."""
    limit = problem.device_bytes
    for home in (home for home in _homes(problem) if home != GPU.executor):

        @cache
        def of(rows: int, shares: int, home: Tier = home) -> Plan:
            return plan(problem, memory.Choice(home, pipeline, shares / _SHARES), HOST, rows)

        def used(rows: int, shares: int, of: Callable[[int, int], Plan] = of) -> int:
            return of(rows, shares).tier_bytes()[GPU.executor]

        rows = next((rows for rows in chunk_options(problem.ask) if used(rows, 0) <= limit), None)
        if rows is None:
            continue
        shares = most(_SHARES - 1, partial(used, rows), limit)
        if shares and problem.fits(of(rows, shares)):
            return memory.Choice(home, pipeline, shares / _SHARES), of(rows, shares)
    return None


def _fitting(problem: Problem, choice: memory.Choice, kv_homes: tuple[Tier, ...]) -> Plan | None:
    """The plan with the longest chunks that fits. Whole blocks; the memory-saving pipeline goes below them where they
    leave no room, and nothing else stays."""
    cuts = (True, False) if choice.pipeline == "saving" else (True,)
    for kv_home in kv_homes:
        for whole_blocks in cuts:
            for chunk_rows in chunk_options(problem.ask):
                found = plan(problem, choice, kv_home, chunk_rows, whole_blocks=whole_blocks)
                if problem.fits(found):
                    return found
    return None


def _candidate(problem: Problem, choice: memory.Choice, found: Plan) -> Candidate:
    partly = PARTIAL if choice.home != GPU.executor and choice.on_device else ""
    return Candidate(NAMES[choice.pipeline] + partly, found, _reasons(problem, choice, found))


def _reasons(problem: Problem, choice: memory.Choice, found: Plan) -> tuple[str, ...]:
    """What Eq. 1 says with its own account of bytes, and what the plan does."""
    ask, limits, s = problem.ask, memory.limits_of(problem), memory.sizes(problem.spec, problem.weights, problem.kv)
    tokens = ask.prompt_tokens + ask.output_tokens
    published = memory.equation_1(s, ask.batch, tokens, limits)
    need, kv = memory.peak_bytes(s, ask.batch, tokens, "overlapped"), s.kv_total_bytes(ask.batch, tokens)
    account = (
        f"PIPO Eq. 1: W {format_bytes(s.weights_bytes)} and M {format_bytes(need)} against "
        f"{format_bytes(limits.device_bytes)} of the device, W and C {format_bytes(kv)} against "
        f"{format_bytes(limits.host_bytes)} of RAM, link {format_rate(limits.link_bytes_per_s)}, disk "
        f"{format_rate(limits.disk_bytes_per_s)}: weights {_PLACES[published.home]}, {NAMES[published.pipeline][6:]}"
    )
    ring = found.ring_bytes.get(GPU.executor)
    if ring is None:
        lines = [account, f"all weights {_PLACES[choice.home]}"]
    elif choice.on_device:
        lines = [account, f"{choice.on_device:.0%} of the weights in device memory, the rest {_PLACES[choice.home]}"]
    else:
        lines = [account, f"all weights {_PLACES[choice.home]}: each token lifts all of them"]
    if ring is not None:
        how = "two blocks: one comes while the other computes" if choice.pipeline == "overlapped" else "one block"
        lines.append(f"a ring of {format_bytes(ring)}, for {how}")
    home = found.kv[0].home
    lines.append(f"KV in {found.kv[0].format.name} {_PLACES[home]}" + (", an attention ahead" if home == HOST else ""))
    return tuple(lines)
