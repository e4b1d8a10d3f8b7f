"""Cuts what streams so that some of it may stay in KV pages which nobody has (`graph.guests`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from penstock.graph.arenas import Layout, with_arenas
from penstock.graph.guests import Pool, is_guest, may_have_guests
from penstock.planner.solve.fill import Run, units
from penstock.spec.parts import Part
from penstock.spec.plan import UNIT_BYTES, Plan, Unit

# Guests of a pool, if granules are small enough. With more of them the room that sequences leave is used better, and
# their loads are smaller: a quarter of 16 MiB, as 8,192 tokens of an 8B model have in a layer, is still read at the
# disk's rate.
_IN_A_POOL = 4
# Of what streams. Fewer bytes are not worth the tasks of smaller units.
_LEAST_SHARE = 0.05


def with_guests(plan: Plan) -> Plan:
    """The plan with units that may stay in KV pages, in place of some of the FFNs' units on the disk. The same plan
    where there may be none, where it is for one sequence, or where they would be a twentieth or less of what streams.
    Only where units lie changes, and no arena grows but for scratch."""
    if plan.batch_seqs * plan.batches_per_pass < 2 or plan.sparsity != "off" or not may_have_guests(plan):
        return plan
    pools: dict[int, list[Pool]] = {}
    for pool in Layout(plan).kv.pools_in_ram():
        pools.setdefault(pool.layer, []).append(pool)
    recut: list[Unit] = []
    for (key, may_stay), group in groupby(plan.units, key=lambda unit: (unit.part, is_guest(plan, unit))):
        part, alike = plan.parts[key], list(group)
        recut += _cut(plan, part, alike, pools[part.layer]) if may_stay else alike
    return _worth_it(plan, with_arenas(replace(plan, units=tuple(recut), guests=True)))


def _worth_it(before: Plan, plan: Plan) -> Plan:
    streamed = sum(plan.unit_bytes(unit) for unit in plan.units if unit.home != unit.decode)
    stay = sum(guest.slot.nbytes for guest in Layout(plan).guests.values())
    return plan if stay > _LEAST_SHARE * streamed else before


def _cut(plan: Plan, part: Part, streaming: list[Unit], pools: list[Pool]) -> list[Unit]:
    """A part's units on the disk anew: the last ones are of the size of a guest."""
    lo, hi, (unit, *_) = streaming[0].lo, streaming[-1].hi, streaming
    step, most = part.sum_granules, max(map(plan.unit_bytes, streaming))
    if step * part.granule_bytes > most:  # the ring has no room for more
        return streaming
    runs: list[Run] = []
    for pool in pools:
        room = pool.slot.nbytes - pool.page_bytes
        nbytes = max(min(pool.slot.nbytes // _IN_A_POOL, most), step * part.granule_bytes)
        granules = nbytes // part.granule_bytes // step * step
        for _ in range(room // (granules * part.granule_bytes)):
            begin = (hi - granules) // step * step
            if begin < lo:
                break
            runs.append((begin, hi, unit.home, unit.decode, unit.prefill, part.nbytes))
            hi = begin
    loads = max(most, part.least_bytes)
    runs.append((lo, hi, unit.home, unit.decode, unit.prefill, min(loads, UNIT_BYTES)))
    return units([part], lambda _: reversed(runs))
