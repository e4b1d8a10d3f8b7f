"""Plans without a device: as much as fits stays in RAM, and the rest streams from the disk (placements CC and DC).

How many bytes a token reads does not depend on which granules stay. So the same share of every part stays: the disk
then reads evenly while the CPU computes, and a small ring is enough. A tied embedding stays before all other parts. It
is the head too, and if it streamed, the row of each token would have to be read on its own as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from penstock.graph.arenas import ARENA_ALIGN, Layout
from penstock.planner.candidate import Candidate
from penstock.planner.guests import leaves_room, still_streamed, with_guests
from penstock.planner.reasons import without_device
from penstock.planner.shares import Resident
from penstock.planner.shorten import kv_moved, staying, streamed
from penstock.planner.sizes import CHUNK_ROWS, MIN_CHUNK_ROWS, chunk_options, prompt_and_half_way
from penstock.planner.solve.ours.asking import HOT_SHARES, RECENT_SHARES, asking, may_ask, scattered
from penstock.planner.solve.ours.filling import caching, partly_in_ram
from penstock.planner.solve.problem import Problem, too_little
from penstock.planner.solve.skeleton import Skeleton
from penstock.spec.ask import Ask
from penstock.spec.parts import FFNS, PINNED
from penstock.spec.places import HOST
from penstock.spec.plan import Plan
from penstock.units import MIB, format_mib_up

MAX_RING_BYTES = 256 * MIB
# Of equally fast plans the one that reads least is taken, which has a small ring. So where one ring is tried alone, it
# has this size.
USUAL_RING_BYTES = 64 * MIB
_LESS = 0.9  # of what is read with all KV in memory. KV on the disk is written too, and its loads are small


def skeleton(problem: Problem, chunk_rows: int, in_memory: int, ring_bytes: int, order: str = "overlapped") -> Skeleton:
    """The skeleton of a plan without a device. `in_memory`: so many layers keep their KV in memory, the others on the
    disk. They are the first ones: while they are computed, the first KV of a pass is loaded."""
    return Skeleton(problem, chunk_rows, in_memory, HOST, ring_bytes, order, HOST)


def ring_options(problem: Problem) -> list[int]:
    """Bytes of rings to try, ascending. The first ring holds the largest granule once. The others hold it at least
    twice, so that the disk reads while the CPU computes."""
    streamed = [part for part in problem.parts.values() if part.kind not in PINNED]
    least = max(part.least_bytes for part in streamed)
    total = sum(part.nbytes for part in streamed)
    wanted = {2 * least, total // 16, total // 8, 64 * MIB, 128 * MIB, MAX_RING_BYTES}
    # An arena takes whole huge pages, so a ring that does not fill them wastes memory.
    whole = {max(n // ARENA_ALIGN, 1) * ARENA_ALIGN for n in wanted}
    most = min(MAX_RING_BYTES, total // 2)
    return [least, *sorted(n for n in whole if 2 * least <= n <= most)]


def guess_options(problem: Problem) -> list[int]:
    """How many missing experts of a layer a token may have loaded ahead by guesses: none, one, two, or half as many as
    the token goes to. One or two loads fill the time in which the disk would idle while attention is computed. With
    more of them the layer's own loads come later (docs/LOG.md). Only simulation can tell whether guesses gain. So if no
    trace says how good guesses are, there are none."""
    active = max((layer.routed.active for layer in problem.spec.layers if layer.routed), default=0)
    known = problem.trace is not None and any(problem.trace.guesses)
    return sorted({0, *(n for n in (1, 2, active // 2) if n <= active)}) if known else [0]


def candidates(problem: Problem, near_ring_bytes: int | None = None) -> Iterator[Candidate]:
    """Plans that fit, small rings first. `near_ring_bytes`: for each way to keep KV and to read prompts, only the plan
    whose ring is nearest to so many bytes.

    KV stays in memory if it fits. A byte of KV in memory saves as much reading as a byte of weights at the end of the
    context, and less before that; but KV on the disk would have to be written too. If memory has no room for all KV, a
    part of it, or all, goes to the disk; also where the ask reaches so little of it that a tenth less would be read.

    Raises DoesNotFit if no plan fits.
    """
    any_found, wanted = False, None if near_ring_bytes is None else 1
    reading: list[Plan] = []  # that keep all KV in memory and have weights on the disk
    for in_memory in _kv_options(problem):
        if reading:  # all KV has room in memory; with KV on the disk, weights would have that room
            near_ring_bytes, wanted = USUAL_RING_BYTES, 1
        for chunk_rows in chunk_options(problem.ask):
            least_ring, *rings = ring_options(problem)
            if near_ring_bytes is not None:
                rings.sort(key=lambda ring: abs(ring - near_ring_bytes))
            # In the smallest ring, which holds one granule, nothing overlaps. It is tried only if no other fits.
            size = skeleton(problem, chunk_rows, in_memory, least_ring)
            fitting = list(islice(_fitting(size, rings), wanted)) or list(_fitting(size, [least_ring]))
            every = list(chain.from_iterable(fitting))
            yield from (each for each in every if not reading or _reads_less(each.plan, reading, problem.ask))
            any_found |= bool(fitting)
            if fitting and chunk_rows <= CHUNK_ROWS:
                break
        if in_memory == problem.layers and any_found and chunk_rows > MIN_CHUNK_ROWS:
            reading = [each.plan for each in every if each.plan.ring_bytes]
            if near_ring_bytes is not None or not _kv_lies_idle(reading, problem.ask):
                return
    if any_found:
        return
    least = chain.from_iterable(_fitting(size, [size.host_ring_bytes]) for size in _least(problem))
    if (fits := next(least, None)) is None:
        need = minimum_bytes(problem)
        raise too_little("host memory", "", HOST, need, problem.host_bytes, f"--host-memory {format_mib_up(need)}")
    yield from fits


def _kv_lies_idle(plans: Sequence[Plan], ask: Ask) -> bool:
    """Whether plans without caches could read _LESS, if their KV were on the disk: weights in its place, less what the
    ask reaches of it half-way, and less the weights that stay in its pages already. Not of several sequences whose
    answers are wanted soon: a server's share pages of KV in memory, and how many there are nobody knows."""
    if not plans or any(plan.caches for plan in plans) or (ask.batch > 1 and ask.objective == "latency"):
        return False

    read_bytes = [_reads_bytes(plan, ask) for plan in plans]

    def saved(plan: Plan, reads: int) -> float:
        seqs, pool = plan.at_once(ask.batch, ask.sequence_tokens), Layout(plan).kv
        reached = seqs * prompt_and_half_way(ask, plan.context)[1] / (pool.pages * plan.page_tokens)
        kv_bytes = sum(arena.bytes for arena in plan.arenas if arena.name.endswith(".kv"))
        guests_bytes = sum(streamed(plan, from_disk=True).values()) - reads
        return (1 - min(1.0, reached)) * kv_bytes - guests_bytes

    return max(map(saved, plans, read_bytes)) > (1 - _LESS) * min(read_bytes)


def _reads_less(plan: Plan, others: Sequence[Plan], ask: Ask) -> bool:
    """Whether a pass of the plan half-way through the output reads _LESS of what the others read at least."""
    return _reads_bytes(plan, ask) < _LESS * min(_reads_bytes(other, ask) for other in others)


def _reads_bytes(plan: Plan, ask: Ask) -> int:
    """Bytes that a pass half-way through the output reads. Of several sequences predictions count on no guests; here
    those stay that the ask leaves room for."""
    if plan.guests and ask.batch > 1:
        return still_streamed(plan, ask)
    weights = streamed(plan, from_disk=True, without=staying(plan, ask))
    return sum(weights.values()) + kv_moved(plan, ask, from_disk=True)


def minimum_bytes(problem: Problem) -> int:
    """The bytes of RAM that the smallest plan takes. In this plan every matrix streams through the smallest ring, or
    all matrices stay, if the model is so tiny that this takes less than a ring."""
    wanted: tuple[Resident | None, ...] = ({}, None) if problem.may_stay is None else ({},)
    return min(size.plan({}, stays).tier_bytes()[HOST] for size in _least(problem) for stays in wanted)


def _kv_options(problem: Problem) -> Iterator[int]:
    """How many layers may keep their KV in memory, the preferred number first."""
    layers, home = problem.layers, problem.ask.kv_home
    if home != "disk":
        yield layers
    if home is None and layers >= 4:
        yield from (layers * part // 4 for part in (3, 2, 1))
    if home != "memory":
        yield 0


def _least(problem: Problem) -> list[Skeleton]:
    """The smallest skeletons: with KV in memory, and with all KV on the disk in a window of one layer."""
    orders = {problem.layers: "overlapped", 0: "saving"}
    kinds = [(n, orders[n]) for n in _kv_options(problem) if n in orders]
    return [skeleton(problem, MIN_CHUNK_ROWS, n, ring_options(problem)[0], order) for n, order in kinds]


def _streaming(sized: Skeleton) -> Plan | None:
    """The plan of as much in RAM as fits, with guests in free KV pages where these pay. FFNs alone can be guests. So
    where the pages have room for more than an even share of FFNs leaves to the disk, all else stays in RAM first."""
    problem = sized.problem
    usual = partly_in_ram(sized, {})
    if usual is None or not (housing := with_guests(usual, problem.ask)).guests:
        return usual
    apart = partly_in_ram(sized, {}, last=FFNS) if leaves_room(housing, problem.ask) else None
    housings = [housing] if apart is None else [housing, with_guests(apart, problem.ask)]
    fitting = filter(problem.fits, housings)
    return min(fitting, key=lambda plan: still_streamed(plan, problem.ask), default=usual)


def _fitting(size: Skeleton, rings: list[int]) -> Iterator[list[Candidate]]:
    """Lists of candidates that fit: one with all weights in memory, or, if that does not fit, a list for each ring."""
    problem = size.problem
    if problem.may_stay is None:
        whole = size.plan({})
        if problem.fits(whole):
            if size.chunk_rows <= CHUNK_ROWS:  # longer chunks only save reading, and this plan reads nothing
                yield [Candidate("RAM", whole, without_device(whole, problem.ask))]
            return
    for ring in rings:
        sized = replace(size, host_ring_bytes=ring)
        plans = {"RAM and disk": _streaming(sized)}
        for guesses in guess_options(problem):
            ahead = f", {guesses} guessed ahead" if guesses else ""
            plans[f"experts in caches{ahead}"] = caching(sized, {}, guesses=guesses)
        # Such plans take more than the one in which everything streams.
        asks = may_ask(problem) and problem.fits(sized.plan({}, {}), HOST)
        slots = asks and scattered(problem)
        for hot in HOT_SHARES[: 1 if slots else None] if asks else ():
            plans[f"neurons that fire from the disk, {hot:.0%} hot"] = asking(sized, hot)
        for recent in RECENT_SHARES if slots else ():
            plans[f"neurons that fire from the disk, slots for {recent:.0%}"] = asking(sized, 0.0, recent)
        fitting = {name: plan for name, plan in plans.items() if plan is not None}
        if fitting:
            yield [Candidate(name, plan, without_device(plan, problem.ask)) for name, plan in fitting.items()]
