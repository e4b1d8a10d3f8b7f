"""Checks a task list, whoever produced it, by rules of its own. It shares no code with the lowering.

Raises InternalError at the first task that
- reaches outside an arena,
- reads bytes that nobody wrote,
- waits for a task that has not been handed out,
- conflicts with an earlier task that it is not ordered after,
- lifts or copies bytes into a slot of another size,
- reads records that its unit has not, or not as rising runs of whole pages,
- loads an expert and does not come after the answer that asks for it,
- takes (or lifts) an expert from a slot of a cache that holds another expert,
- takes a unit from KV pages that were not filled with it,
- or takes a neuron's record from a slot that holds another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from penstock.errors import InternalError
from penstock.graph import ops
from penstock.graph.recent import pairs
from penstock.graph.tasks import Call, Slot, Task
from penstock.spec.parts import PAGE_BYTES
from penstock.spec.places import CPU, Lane, is_device, is_disk
from penstock.spec.plan import Arena, Unit

# Arenas that a task list may read without having written them. Weights are loaded before the first pass, and KV stays
# from earlier passes. (Slots of tokens, which the engine writes, are excepted by `_tokens_of`.)
_PRELOADED = (".weights", ".kv")


def verify(tasks: Iterable[Task], arenas: Iterable[Arena], units: Sequence[Unit] = ()) -> int:
    """Returns how many tasks it checked. `units`: the plan's. With them it also checks which experts the slots of
    caches hold. It takes time quadratic in the tasks that share an arena, so it is for tests and dumps.

    Raises InternalError."""
    sizes = {arena.name: arena.bytes for arena in arenas}
    before: dict[int, int] = {}  # task → bit set of all tasks that have ended when it begins
    through: dict[int, int] = {}  # task → bit set of all tasks that have ended for one who has waited for it
    position: dict[int, int] = {}  # task → its bit
    last_on_lane: dict[Lane, int] = {}
    touched: dict[str, list[tuple[int, int, bool, int]]] = {}  # arena → lo, hi, whether it was written, task
    held: dict[Slot, tuple[str, int]] = {}  # slot of a cache → part and number of the expert that was loaded there
    guests: dict[Slot, int] = {}  # slot in a KV pool → the unit that was loaded there
    records: dict[int, dict[int, int]] = {}  # unit → slot for a record → neuron whose record was put there
    count = 0
    for task in tasks:
        ordered = 0
        for other in task.after:
            if other not in position:
                raise InternalError(f"task {task.id} waits for {other}, which has not been handed out")
            ordered |= through[other]
        earlier = 0
        for lane, other in ((lane, last_on_lane[lane]) for lane in task.lanes if lane in last_on_lane):
            earlier |= through[other]
            # A disk begins its loads in order, and they end in any order.
            ordered |= before[other] if is_disk(lane) else through[other]
        if task.id in position:
            raise InternalError(f"task id {task.id} appears twice")
        position[task.id], before[task.id] = count, ordered
        through[task.id] = ordered | earlier | 1 << count
        for lane in task.lanes:
            last_on_lane[lane] = task.id
        _check_tiers(task)
        _check_moves(task)
        _check_experts(task, units, held)
        _check_guests(task, guests)
        _check_picks(task, units)
        _check_recalls(task, records)
        _check_slots(task, sizes, touched, position, ordered)
        count += 1
    return count


def _check_tiers(task: Task) -> None:
    """An executor reads and writes only its own memory. Copies alone reach from one tier into another."""
    lane = task.lanes[0]
    for call in task.calls if lane == CPU or is_device(lane) else ():
        if isinstance(call.operands, ops.Copy | ops.Sync):
            continue
        other = next((s for _, s in ops.slots_of(call.operands) if not s.arena.startswith(f"{lane}.")), None)
        if other is not None:
            raise InternalError(f"task {task.id}: {call.op} on {lane} touches {other}")


def _check_moves(task: Task) -> None:
    for operands in (call.operands for call in task.calls):
        if isinstance(operands, ops.Lift | ops.Copy) and operands.source.nbytes != operands.target.nbytes:
            raise InternalError(
                f"task {task.id} moves {operands.source} into {operands.target}, which has another size"
            )


def _check_experts(task: Task, units: Sequence[Unit], held: dict[Slot, tuple[str, int]]) -> None:
    for call in task.calls if units else ():
        operands = call.operands
        if isinstance(operands, ops.Load | ops.Lift) and operands.target.arena.endswith(".cache"):
            slot = operands.target
            if isinstance(operands, ops.Lift):
                _check_held(task, operands.source, (units[call.unit].part, operands.expert), held)
            for other in [old for old in held if old.arena == slot.arena and old.lo < slot.hi and slot.lo < old.hi]:
                del held[other]
            held[slot] = (units[call.unit].part, _expert_of(operands))
        elif isinstance(operands, ops.Experts):
            for slot, expert in zip(operands.weights, operands.first_experts, strict=True):
                _check_held(task, slot, (units[call.unit].part, expert), held)


def _check_held(task: Task, slot: Slot, wanted: tuple[str, int], held: dict[Slot, tuple[str, int]]) -> None:
    if slot.arena.endswith(".cache") and held.get(slot) != wanted:
        raise InternalError(f"task {task.id} takes expert {wanted} from {slot}, which holds {held.get(slot)}")


def _check_guests(task: Task, guests: dict[Slot, int]) -> None:
    """A unit that is taken from KV pages was loaded there, and nothing else was loaded there since. (Tasks do not say
    which pages are free. `pages.check_tables` checks that.)"""
    for call in task.calls:
        operands = call.operands
        if isinstance(operands, ops.Load) and operands.target.arena.endswith(".kv"):
            slot = operands.target
            for other in [old for old in guests if old.arena == slot.arena and old.lo < slot.hi and slot.lo < old.hi]:
                del guests[other]
            guests[slot] = call.unit
        elif isinstance(operands, ops.Ffn) and operands.weights.arena.endswith(".kv"):
            if guests.get(operands.weights) != call.unit:
                raise InternalError(
                    f"task {task.id} takes unit {call.unit} from {operands.weights}, which has not got it"
                )


def _check_picks(task: Task, units: Sequence[Unit]) -> None:
    """Runs are whole pages, apart from each other, and end within what their target has room for."""
    for call in task.calls if units else ():
        if isinstance(call.operands, ops.Pick):
            runs, room = call.operands.runs, call.operands.target.nbytes
            edges = [edge for run in runs for edge in run]
            rising = all(a < b for a, b in pairwise(edges)) and not any(edge % PAGE_BYTES for edge in edges)
            if not rising or sum(hi - lo for lo, hi in runs) > room or not units[call.unit].asked:
                raise InternalError(f"task {task.id} picks {runs[:3]}… of unit {call.unit}, which are no such runs")


def _check_recalls(task: Task, records: dict[int, dict[int, int]]) -> None:
    """A record that is taken from a slot is the one that was put there last. `records`: unit → slot → neuron."""
    for call in task.calls:
        if isinstance(call.operands, ops.Recall):
            of_unit, recall = records.setdefault(call.unit, {}), call.operands
            for neuron, slot in pairs(recall.held):
                if of_unit.get(slot) != neuron:
                    raise InternalError(
                        f"task {task.id} takes neuron {neuron} of unit {call.unit} from slot {slot},"
                        f" which holds {of_unit.get(slot)}"
                    )
            of_unit.update((slot, neuron) for neuron, slot in pairs(recall.kept))


def _expert_of(moved: ops.Load | ops.Lift) -> int:
    """The expert that a load or a lift brings into a cache."""
    return moved.expert if isinstance(moved, ops.Lift) else moved.lo // (moved.hi - moved.lo)


def _check_slots(
    task: Task,
    sizes: dict[str, int],
    touched: dict[str, list[tuple[int, int, bool, int]]],
    position: dict[int, int],
    ordered: int,
) -> None:
    tokens = {slot for call in task.calls if (slot := _tokens_of(call)) is not None}
    own = _read_of_own(task)
    slots = [(s, True) for s in task.writes] + [(s, False) for s in task.reads if s not in own]
    for slot, write in slots:
        if not 0 <= slot.lo < slot.hi <= sizes.get(slot.arena, 0):
            raise InternalError(f"task {task.id} touches {slot}, outside the arena of {sizes.get(slot.arena, 0)} bytes")
        for lo, hi, other_writes, other in touched.get(slot.arena, []):
            conflict = lo < slot.hi and slot.lo < hi and (write or other_writes)
            if conflict and not ordered >> position[other] & 1:
                raise InternalError(f"tasks {other} and {task.id} both touch {slot} in no order")
        if not write and not slot.arena.endswith(_PRELOADED) and slot not in tokens:
            _check_written(task, slot, touched.get(slot.arena, []))
    for slot in {s for call in task.calls for operand, s in ops.slots_of(call.operands) if operand.mode == "a"}:
        writers = [mark for mark in touched.get(slot.arena, []) if mark[2] and mark[0] < slot.hi and slot.lo < mark[1]]
        if not writers or not ordered >> position[writers[-1][3]] & 1:
            raise InternalError(f"task {task.id} is asked for by {slot}, but does not come after its writer")
    for slot, write in slots:
        touched.setdefault(slot.arena, []).append((slot.lo, slot.hi, write, task.id))


def _read_of_own(task: Task) -> set[Slot]:
    """The slots whose bytes a task's own calls write before any of them reads them. What a call adds to may be what it
    starts, so that does not count as read."""
    written: list[Slot] = []
    before = set[Slot]()
    for call in task.calls:
        touched = ops.slots_of(call.operands)
        before.update(slot for operand, slot in touched if operand.mode == "r" and not _holds(written, slot))
        written += [slot for operand, slot in touched if operand.mode in "w+"]
    return {slot for slot in task.reads if slot not in before and _holds(written, slot)}


def _holds(slots: Iterable[Slot], slot: Slot) -> bool:
    """Whether one of some slots has all bytes of another."""
    return any(each.arena == slot.arena and each.lo <= slot.lo and slot.hi <= each.hi for each in slots)


def _tokens_of(call: Call) -> Slot | None:
    """The slot of tokens that a call reads."""
    operands = call.operands
    if isinstance(operands, ops.Gather | ops.Fetch):
        return operands.tokens
    return operands.source if isinstance(operands, ops.Copy) and operands.what == "tokens" else None


def _check_written(task: Task, slot: Slot, touched: list[tuple[int, int, bool, int]]) -> None:
    holes = [(slot.lo, slot.hi)]
    for lo, hi, write, _ in touched:
        if write:
            holes = [piece for a, b in holes for piece in ((a, min(b, lo)), (max(a, hi), b)) if piece[0] < piece[1]]
    if holes:
        raise InternalError(f"task {task.id} reads {slot}, of which bytes {holes[0]} were never written")
