"""Passes of plans that stream: the tasks of one that comes again are those that the lowering would have made."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import ops, passes
from penstock.graph.lower import Lowering
from penstock.graph.ring import Ring
from penstock.graph.tasks import Pass, Slot, Task
from penstock.graph.verify import verify
from penstock.spec.format import Format, parse_format
from penstock.spec.places import CPU
from penstock.spec.plan import Plan
from tests.plans import device_plans, random_plans
from tests.pure.machine import model
from tests.pure.test_guests import streamed


def drawn_passes(data: st.DataObject, plan: Plan, most: int) -> list[Pass]:
    """Prompts, and runs of decode passes behind them, of one sequence."""
    drawn: list[Pass] = []
    for _ in range(data.draw(st.integers(1, 3))):
        prompt = data.draw(st.integers(1, plan.context - most - 1))
        drawn += passes.prompts(plan, (0,), (prompt,), passes.DECODE)
        tokens = data.draw(st.integers(1, most))
        drawn += [
            passes.decode(plan, (0,), (prompt + i,), passes.DECODE if i + 1 < tokens else None) for i in range(tokens)
        ]
    return drawn


@given(st.data())
def test_tasks_of_passes_that_come_again_are_those_of_the_lowering(data: st.DataObject) -> None:
    plans = data.draw(st.sampled_from([random_plans, device_plans]))
    plan = data.draw(plans(model(layers=2), data.draw(st.sampled_from([Format("float32"), parse_format("int4")]))))
    lowering, other = Lowering(plan), Lowering(plan, recurs=False)
    tasks: list[Task] = []
    before = 0
    for p in drawn_passes(data, plan, 10):
        found, wanted = list(lowering.step(p)), list(other.step(p))
        start = min(task.id for task in found) - before
        for a, b in zip(found, wanted, strict=True):
            assert told(a, start) == told(b, start) and tuple(a.calls) == tuple(b.calls)
        before = len(found)
        tasks += found
    verify(tasks, plan.arenas)


def told(task: Task, start: int) -> tuple[object, ...]:
    """All of a task but its calls, and what it waits for that is older than id `start`: that is done."""
    return (*task[:2], *task[3:7], [other for other in task.after if other >= start])


def test_the_fourth_pass_and_all_behind_it_are_known() -> None:
    lowering, lanes = Lowering(streamed()), []
    for position in range(3, 11):
        p = passes.decode(lowering.plan, (0,), (position,), passes.DECODE)._replace(pages_used=None)
        tasks = list(lowering.step(p))
        lanes.append({task.lanes for task in tasks if task.like >= 0})
    assert lanes[:3] == [set()] * 3 and lanes[3:] == [{(CPU,)}] * 5


def test_a_page_more_is_another_pass() -> None:
    """What attention may touch is another slot then, and guests may leave."""
    lowering = Lowering(streamed())
    known = []
    for number, pages in enumerate([2] * 6 + [3] * 6):  # guests come in the first pass
        p = passes.decode(lowering.plan, (0,), (3,), passes.DECODE)._replace(pages_used=pages)
        tasks, fresh = list(lowering.step(p)), list(Lowering(lowering.plan).step(p))
        known += [number] if any(task.like >= 0 for task in tasks) else []
        assert caches_read(tasks) == caches_read(fresh)
    assert known == [4, 5, 9, 10, 11]


def caches_read(tasks: list[Task]) -> set[Slot]:
    calls = [call.operands for task in tasks for call in task.calls]
    return {slot for each in calls if isinstance(each, ops.Attend) for slot in (each.keys, each.values)}


def test_kv_that_crosses_is_another_pass_at_each_position() -> None:
    plan = streamed()
    crossing = replace(plan, kv=tuple(replace(home, home="disk0") for home in plan.kv), guests=False)
    lowering = Lowering(crossing)
    for position in (3, 4, 5, 6, 7):
        tasks = list(lowering.step(passes.decode(crossing, (0,), (position,), passes.DECODE)))
        assert all(task.like < 0 for task in tasks)


@pytest.mark.parametrize(
    ("even", "count", "begin"), [(True, 8, [0, 40]), (False, 8, [0, 70]), (True, 7, [0]), (True, 15, [0, 50, 100])]
)
def test_rounds_of_a_ring(even: bool, count: int, begin: list[int]) -> None:
    """Eight pieces in a ring with room for seven are two rounds of four, or one of seven and one of one."""
    ring = Ring("host.ring", 79, even)
    pieces = [((i, 0, 1), 10, 0) for i in range(count)]
    ring.begin(pieces, [])
    starts = []
    for i in range(count):
        while ring.admit(0, lambda _: True):
            pass
        slot = ring.take((i, 0, 1))
        starts += [10 * i] if slot.lo == 0 else []
        ring.release((i, 0, 1))
    assert starts == begin and slot == Slot("host.ring", slot.lo, slot.lo + 10)
