"""What a schedule is made of. NamedTuples: a step of a large model makes thousands of them.

A Slot is a byte range of an arena; two tasks conflict where ranges overlap and one of them writes. A Call
is one op on one executor; a Task is calls that run in order on its lanes. Who waits for a task of a lane waits
for those before it too, so `after` names tasks of other lanes only, at most one (the latest) per lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.graph.batch import Batch
from penstock.graph.ops import NAMES, Copy, Experts, Load, Operands, WithUnit
from penstock.graph.ops.operand import Slot as Slot
from penstock.spec.places import Lane, is_device, is_disk, is_link, lane_between, tier_of
from penstock.spec.plan import Unit


class Stream(NamedTuple):
    """Which weights a pass reads, in order: by purpose, whether the head is among them, and whether so `few` rows come
    that it asks routers which experts they want, as decode does."""

    purpose: str
    logits: bool
    few: bool = False

    @property
    def asks(self) -> bool:
        """Whether of experts with a cache only those are read that routers ask for."""
        return self.few or self.purpose == "decode"


class Pass(NamedTuple):
    """One step of the model over its batches. `then`: what the next pass will read, None = nothing. `few`: as of its
    stream."""

    purpose: str  # prefill | decode | verify
    batches: tuple[Batch, ...]
    then: Stream | None
    few: bool = False

    @property
    def stream(self) -> Stream:
        return Stream(self.purpose, any(batch.logits for batch in self.batches), self.few)


class Call(NamedTuple):
    """One op on one executor. `operands`: what it works on, by name, as the op's definition says (`graph/ops`). `unit`:
    index into plan.units, -1 where the op reads none."""

    operands: Operands
    unit: int
    batch: Batch | None
    format: str
    bytes: int
    flops: int

    @property
    def op(self) -> str:
        """The op's name."""
        return NAMES[self.operands.__class__]


class Task(NamedTuple):
    """Calls that run in order while all of `lanes` are occupied. `bytes`, `flops`: the sums over the calls.

    `like`: an earlier task that differs in its batches' positions alone (and what follows from them), -1: none is
    known. Whoever has prepared that one need not prepare this one."""

    id: int
    lanes: tuple[Lane, ...]
    calls: Sequence[Call]
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    bytes: int
    flops: int
    after: tuple[int, ...]
    like: int = -1


def streamed_bytes(task: Task, units: Sequence[Unit]) -> int:
    """Bytes of units at home on a disk that a task's calls take out of rings, or that it loads into a cache: what a
    load brings is counted where it is used, in its own pass. `units`: the plan's."""
    found: set[Slot] = set()
    for call in task.calls:
        operands = call.operands
        if isinstance(operands, Load) and operands.target.arena.endswith(".cache"):
            found.add(operands.target)  # of the pass that asks for it
        elif isinstance(operands, WithUnit) and is_disk(units[call.unit].home):
            weights = operands.weights if isinstance(operands, Experts) else (operands.weights,)
            found.update(slot for slot in weights if slot.arena.endswith(".ring"))
    return sum(slot.nbytes for slot in found)


def fetched_bytes(task: Task) -> int:
    """Bytes that a task reads for single embedding rows, at most: tokens that share a granule share its read."""
    return sum(call.bytes for call in task.calls if call.op == "fetch")


def kv_loaded_bytes(task: Task) -> int:
    """Bytes of KV that a task brings from a disk."""
    return sum(call.bytes for call in task.calls if call.op == "kv_load" and is_disk(task.lanes[0]))


def link_bytes(task: Task) -> dict[Lane, int]:
    """Bytes that a task moves over a device's link, by direction."""
    if is_link(task.lanes[0]):
        return {task.lanes[0]: task.bytes}
    found: dict[Lane, int] = {}
    for call in task.calls if is_device(task.lanes[0]) else ():
        if isinstance(call.operands, Copy):
            lane = link_lane(call.operands)
            found[lane] = found.get(lane, 0) + call.bytes
    return found


def link_lane(copy: Copy) -> Lane:
    """Which way a copy of activations crosses the link."""
    source, target = (tier_of(slot.arena) for slot in (copy.source, copy.target))
    return lane_between(source, target)


# Their tasks move bytes while others compute: a pass does not end with them.
KV_MOVES = ("kv_load", "kv_save")
MOVES = ("load", "lift", *KV_MOVES)
