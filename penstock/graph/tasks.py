"""The elements of a schedule: slots, calls, tasks and passes. They are NamedTuples, since a step of a large model makes
thousands of them.

A Slot is a byte range of an arena. Two tasks conflict if their ranges overlap and one of the tasks writes. A Call is
one op on one executor. A Task is a sequence of calls that run in order on the task's lanes. To wait for a task is to
wait for all earlier tasks of its lane too. So `after` names at most one task of each lane, the latest. It names a task
of its own lane only on a disk, whose loads may end in another order than they began.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.graph.batch import Batch
from penstock.graph.ops import NAMES, Copy, Experts, Load, Operands, Pick, WithUnit
from penstock.graph.ops.operand import Slot as Slot
from penstock.spec.format import Kinds
from penstock.spec.places import Lane, is_device, is_disk, is_link, lane_between, tier_of
from penstock.spec.plan import Unit


class Stream(NamedTuple):
    """All that decides which weights a pass reads, and in which order. `logits`: the pass reads the head. `few`: the
    pass is of a prompt with so few rows that it asks routers which experts they want, as a decode pass does."""

    purpose: str
    logits: bool
    few: bool = False

    @property
    def asks(self) -> bool:
        """Whether the pass reads, of layers with a cache of experts, only the experts that routers ask for."""
        return self.few or self.purpose == "decode"


class Pass(NamedTuple):
    """One step of the model over its batches. `then`: what the next pass will read, None = nothing. `few`: as in
    `Stream`. `pages_used`: the pages of the pools from this number on hold nothing that anybody wants, so units may
    stay there (`Plan.guests`); None if that is not known.

    purpose         prefill: rows of prompts, computed by the units' executors for prefill
                    decode: one row of each answer, computed by the executors for decode. If layers have predictors,
                    only the neurons that these call active are computed
                    mixed: rows of prompts beside rows of answers, computed by the executors for decode, with all
                    neurons. The weights stream as in decode, but experts that have a cache stream whole, unless `few`.
                    If the executors for prefill are predicted to read prompts faster, a server's passes with both
                    kinds of rows are prefill instead (`planner.pace`)
    """

    purpose: str
    batches: tuple[Batch, ...]
    then: Stream | None
    few: bool = False
    pages_used: int | None = None

    @property
    def total_rows(self) -> int:
        return sum(batch.total_rows for batch in self.batches)

    @property
    def stream(self) -> Stream:
        return Stream(self.purpose, any(batch.logits for batch in self.batches), self.few)


class Call(NamedTuple):
    """One op on one executor. `operands`: the op's slots and settings by name, defined in `graph/ops`. `unit`: index
    into plan.units, -1 where the op reads none. `format`: number formats of the weights or KV, `*` where the op has
    none. `bytes`: read from memory or moved. `flops`: multiplications and additions."""

    operands: Operands
    unit: int
    batch: Batch | None
    format: Kinds
    bytes: int
    flops: int

    @property
    def op(self) -> str:
        """The op's name."""
        return NAMES[self.operands.__class__]

    @property
    def total_rows(self) -> int:
        """The rows of its batch, which it is known to have."""
        return batch_of(self).total_rows


class Task(NamedTuple):
    """Calls that run in order while all of `lanes` are occupied. `bytes`, `flops`: the sums over the calls.

    `like`: id of an earlier task that differs only in its batches' positions and in what follows from them. -1: none is
    known. Whoever has prepared the earlier task need not prepare this one.

    `batches`: () if the calls name the task's batches. Otherwise the task has these batches, while its calls, slots,
    `bytes` and `flops` are the earlier task's, which may have other numbers of rows (`Lowering.step`)."""

    id: int
    lanes: tuple[Lane, ...]
    calls: Sequence[Call]
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    bytes: int
    flops: int
    after: tuple[int, ...]
    like: int = -1
    batches: tuple[Batch, ...] = ()


def batch_of(call: Call) -> Batch:
    """The batch of a call that is known to have one."""
    assert call.batch is not None
    return call.batch


def streamed_bytes(task: Task, units: Sequence[Unit]) -> int:
    """Bytes of weights at home on a disk that a task uses: units that its calls take out of rings, experts that it
    loads into a cache, guests that it loads into KV pages, and records of neurons that fire. A unit in a ring is
    counted where it is used and not where it is loaded, since the load may belong to the pass before. `units`: the
    plan's."""
    streamed: set[Slot] = set()
    picked_bytes = 0
    for call in task.calls:
        operands = call.operands
        if isinstance(operands, Pick):
            picked_bytes += call.bytes
        elif isinstance(operands, Load) and operands.target.arena.endswith((".cache", ".kv")):
            streamed.add(operands.target)  # of the pass that asks for it
        elif isinstance(operands, WithUnit) and is_disk(units[call.unit].home):
            weight_slots = operands.weights if isinstance(operands, Experts) else (operands.weights,)
            streamed.update(slot for slot in weight_slots if slot.arena.endswith(".ring"))
    return picked_bytes + sum(slot.nbytes for slot in streamed)


def fetched_bytes(task: Task) -> int:
    """The most bytes that a task reads for single embedding rows. It reads less if tokens share a granule."""
    return sum(call.bytes for call in task.calls if call.op == "fetch")


def kv_loaded_bytes(task: Task) -> int:
    """Bytes of KV that a task brings from a disk."""
    return sum(call.bytes for call in task.calls if call.op == "kv_load" and is_disk(task.lanes[0]))


def link_bytes(task: Task) -> dict[Lane, int]:
    """Lane → bytes that a task moves over a device's link. The two directions are two lanes."""
    if is_link(task.lanes[0]):
        return {task.lanes[0]: task.bytes}
    by_lane: dict[Lane, int] = {}
    for call in task.calls if is_device(task.lanes[0]) else ():
        if isinstance(call.operands, Copy):
            lane = link_lane(call.operands)
            by_lane[lane] = by_lane.get(lane, 0) + call.bytes
    return by_lane


def link_lane(copy: Copy) -> Lane:
    """The lane of the link, one of its two directions, that a copy of activations takes."""
    source, target = (tier_of(slot.arena) for slot in (copy.source, copy.target))
    return lane_between(source, target)


# Ops whose tasks move bytes while others compute. A pass may end before they do.
KV_MOVES = ("kv_load", "kv_save")
MOVES = ("load", "pick", "lift", *KV_MOVES)
