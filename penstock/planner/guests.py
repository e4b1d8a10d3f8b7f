"""Cuts what streams so that some of it may stay in KV pages which nobody has (`graph.guests`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from penstock.graph.arenas import Layout, with_arenas
from penstock.graph.guests import Pool, is_guest, may_have_guests
from penstock.planner.cutting import Run, units
from penstock.spec.ask import Ask
from penstock.spec.format import PAGE_TOKENS
from penstock.spec.parts import PAGE_BYTES, Part
from penstock.spec.plan import UNIT_BYTES, Plan, Unit
from penstock.units import MIB, round_up

# Guests of a pool, if granules are small enough. With more of them the room that sequences leave is used better. With
# fewer, loads are larger and prompts have fewer calls, of which each begins anew: 1.5 ms with 512 rows. Guests of 2 MB
# took 7 % of a prompt of an 8B model. So several sequences have two where four would have less than 4 MiB each.
_MOST_IN_A_POOL, _LEAST_IN_A_POOL, _LEAST_BYTES = 4, 2, 4 * MIB
# A single sequence grows from the beginning of a pool. Guests there are an eighth of the room, for most conversations
# are short, and the one at the end is half of it. With four alike a quarter would leave after the first page.
_SMALLEST_SHARE = 8
# Of what streams. Fewer bytes are not worth the tasks of smaller units.
_LEAST_SHARE = 0.05


def with_guests(plan: Plan, ask: Ask) -> Plan:
    """The plan with guests: some of the FFNs' units on the disk are cut anew so that they may stay in KV pages. The
    plan stays as it is if it may have no guests, or if these would be a twentieth or less of the bytes that stream.

    A single sequence uses as many pages as the ask has tokens, and guests have the others. Such a plan has smaller
    pages if these make room for a twentieth more. No arena grows but scratch."""
    if plan.sparsity != "off" or not may_have_guests(plan):
        return plan
    best, streamed_bytes = plan, still_streamed(plan, ask)
    pages = (plan.page_tokens, PAGE_TOKENS) if _is_for_one(plan) and not plan.kv_pages else (plan.page_tokens,)
    for page_tokens in dict.fromkeys(pages):
        housing = _housing(with_arenas(replace(plan, page_tokens=page_tokens)), ask)
        if (left_bytes := still_streamed(housing, ask)) < (1 - _LEAST_SHARE) * streamed_bytes:
            best, streamed_bytes = housing, left_bytes
    return best


def _housing(plan: Plan, ask: Ask) -> Plan:
    """The plan with as many guests as its pages have room for."""
    reached, parts = _reached(plan, ask), plan.parts
    pools: dict[int, list[Pool]] = {}
    for pool in Layout(plan).kv.pools_in_ram():
        pools.setdefault(pool.layer, []).append(pool)
    recut: list[Unit] = []
    for (key, may_stay), group in groupby(plan.units, key=lambda unit: (unit.part, is_guest(parts[unit.part], unit))):
        part, alike = parts[key], list(group)
        recut += _cut(plan, part, alike, pools[part.layer], reached) if may_stay else alike
    return with_arenas(replace(plan, units=tuple(recut), guests=True))


def still_streamed(plan: Plan, ask: Ask) -> int:
    """Bytes that a pass streams when all guests are there that the ask leaves room for."""
    streamed = sum(plan.unit_bytes(unit) for unit in plan.units if unit.home != unit.decode)
    rooms, reached = Layout(plan).guests.values() if plan.guests else (), _reached(plan, ask)
    return streamed - sum(guest.slot.nbytes for guest in rooms if guest.first_page >= reached)


def leaves_room(plan: Plan, ask: Ask) -> bool:
    """Whether pages that the ask leaves free have room for a twentieth more of what streams."""
    layout, reached = Layout(plan), _reached(plan, ask)
    rooms = sum(max(0, pool.slot.nbytes - reached * pool.page_bytes) for pool in layout.kv.pools_in_ram())
    taken = sum(guest.slot.nbytes for guest in layout.guests.values())
    return rooms - taken > _LEAST_SHARE * still_streamed(plan, ask)


def _reached(plan: Plan, ask: Ask) -> int:
    """So many of a pool's first pages have no guests for long: those of all tokens of a single sequence. Of several
    sequences nobody knows how many come."""
    return -(-ask.sequence_tokens // plan.page_tokens) if _is_for_one(plan) else 1


def _is_for_one(plan: Plan) -> bool:
    """Whether a single sequence has all pages."""
    return plan.batch_seqs * plan.batches_per_pass == 1


def _cut(plan: Plan, part: Part, streaming: list[Unit], pools: list[Pool], reached: int) -> list[Unit]:
    """A part's units on the disk anew: the last ones are of the sizes of guests, from the end of the first pool on.
    `reached`: so many of a pool's first pages have no guests."""
    lo, hi, (unit, *_) = streaming[0].lo, streaming[-1].hi, streaming
    step, most = part.sum_granules, max(map(plan.unit_bytes, streaming))
    least = step * part.granule_bytes
    if least > most:  # the ring has no room for more
        return streaming
    runs: list[Run] = []
    for pool in pools:
        room = left = pool.slot.nbytes - reached * pool.page_bytes
        alike = max(room // _MOST_IN_A_POOL, min(room // _LEAST_IN_A_POOL, _LEAST_BYTES))
        while left >= least:
            wanted = min(max(left // 2, room // _SMALLEST_SHARE) if _is_for_one(plan) else alike, most, left)
            granules = max(step, wanted // part.granule_bytes // step * step)
            begin = (hi - granules) // step * step
            if begin < lo:
                break
            runs.append((begin, hi, unit.home, unit.decode, unit.prefill, part.nbytes))
            left -= round_up((hi - begin) * part.granule_bytes, PAGE_BYTES)
            hi = begin
    loads = max(most, part.least_bytes)
    runs.append((lo, hi, unit.home, unit.decode, unit.prefill, min(loads, UNIT_BYTES)))
    return units([part], lambda _: reversed(runs))
