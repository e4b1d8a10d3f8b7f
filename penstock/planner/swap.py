"""Decides whether KV that gives way to other requests is kept on the disk, or computed again when it is wanted."""

from __future__ import annotations

from typing import NamedTuple

from penstock.graph.arenas import Layout
from penstock.planner.cost import Cost
from penstock.planner.pass_times import PassTimes
from penstock.spec.machine import MachineSpec
from penstock.spec.places import DISK, is_disk
from penstock.spec.plan import Plan
from penstock.units import format_seconds


class Swap(NamedTuple):
    """`pays`: pages that give way are to be stored. `reason`: for the user."""

    pays: bool
    reason: str


def swap(plan: Plan, machine: MachineSpec, times: PassTimes, prompt_rows: int) -> Swap:
    """Compares two costs of a page: the seconds to store it and read it again, and the seconds by which passes of the
    other sequences become longer if its tokens are computed again, `prompt_rows` of them in each pass."""
    layout, cost = Layout(plan), Cost(machine)
    slots, tokens = layout.kv.page_slots(0), plan.page_tokens * layout.kv.page_group
    # KV that lies on a disk is read and written there once more each way.
    nbytes = sum(slot.nbytes * (2 if is_disk(slot.arena) else 1) for slot in slots)
    stored_s = sum(cost.call_s(lane, "load", "*", nbytes=nbytes) for lane in (DISK.writes, DISK.reads))
    others = plan.sequences - 1
    rows = max(1, min(prompt_rows, tokens))
    if others:
        computed_s = (times.seconds(others, rows) - times.seconds(others, 0)) * tokens / rows
    else:
        computed_s = times.seconds(0, tokens)
    pays = stored_s < computed_s
    return Swap(
        pays,
        f"{tokens} tokens whose KV gives way are {'kept on the disk' if pays else 'computed again'}: to store"
        f" and read them takes {format_seconds(stored_s)}, to compute them {format_seconds(max(0.0, computed_s))}",
    )
