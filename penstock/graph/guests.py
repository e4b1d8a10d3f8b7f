"""Places units at home on a disk in KV pages that no sequence has. Such units are guests of the KV pools.

Pools have room for whole contexts, and sequences grow page by page. So much of the pools holds nothing for most of the
time, while weights stream from a disk. A plan with `Plan.guests` gives some units of FFNs a slot at the end of a
layer's K or V pool. A pass says up to which page its pools are used (`Pass.pages_used`). A unit whose slot lies beyond
that is loaded there once, in place of the ring, and the passes that follow do not load it. When sequences need its
pages, it streams through the ring again: nothing has to be written back.

Guests lie one beside the other from the end of a pool on, a layer's last unit at the very end of its first pool. So
guests leave one after the other when sequences grow page by page, if requests are given the first pages first
(`serve.pages`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.graph.ops.operand import Slot
from penstock.spec.parts import PAGE_BYTES, Part
from penstock.spec.places import HOST, is_disk
from penstock.spec.plan import Plan, Unit


class Pool(NamedTuple):
    """A layer's K or V in RAM, all pages of it."""

    layer: int
    slot: Slot
    page_bytes: int


class Guest(NamedTuple):
    """Room for a unit at the end of a pool. `first_page`: the first page of the pool that this room reaches into."""

    slot: Slot
    first_page: int


def may_have_guests(plan: Plan) -> bool:
    """Whether all KV lies in RAM and is attended to there, the CPU computes all, and no answer decides what streams."""
    return (
        plan.order == "overlapped"
        and HOST in plan.ring_bytes
        and not plan.asks
        and not plan.predictors
        and all(home.home == home.attend == HOST for home in plan.kv)
        and all(unit.decode == unit.prefill == HOST for unit in plan.units)
    )


def is_guest(part: Part, unit: Unit) -> bool:
    """Whether a unit of a part may be a guest: of a dense FFN on a disk."""
    return part.kind == "ffn" and is_disk(unit.home) and not unit.asked


def guests(plan: Plan, pools: Iterable[Pool]) -> dict[int, Guest]:
    """The number of a unit → its room, for as many of each layer's last units as its pools have room for. No guest lies
    in the first page of a pool, or no request could ever begin."""
    by_layer, parts = dict[int, list[tuple[int, int]]](), plan.parts
    for u, unit in enumerate(plan.units):
        if is_guest(part := parts[unit.part], unit):
            by_layer.setdefault(part.layer, []).append((u, (unit.hi - unit.lo) * part.granule_bytes))
    rooms: dict[int, Guest] = {}
    for pool in pools:
        rooms |= dict(_fill(pool, by_layer.get(pool.layer, [])))
    return rooms


def _fill(pool: Pool, units: list[tuple[int, int]]) -> Iterator[tuple[int, Guest]]:
    """Takes units from the end of a list, as long as a pool has room for them. `units`: number and bytes of each."""
    hi = pool.slot.hi // PAGE_BYTES * PAGE_BYTES  # direct reads begin at whole pages of memory
    while units:
        number, nbytes = units[-1]
        lo = (hi - nbytes) // PAGE_BYTES * PAGE_BYTES
        if lo < pool.slot.lo + pool.page_bytes:
            return
        units.pop()
        yield number, Guest(Slot(pool.slot.arena, lo, lo + nbytes), (lo - pool.slot.lo) // pool.page_bytes)
        hi = lo
