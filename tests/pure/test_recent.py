"""Slots for records of neurons, beside a model that looks at every neuron in every pass."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InternalError
from penstock.graph import ops
from penstock.graph.recent import HALF_LIFE, RecentRecords, pairs
from penstock.graph.tasks import Call, Slot, Task
from penstock.graph.verify import verify
from penstock.spec.plan import Arena


@given(st.data())
def test_the_most_used_neurons_stay(data: st.DataObject) -> None:
    lo, count = data.draw(st.integers(0, 200)), data.draw(st.integers(1, 40))
    slots = data.draw(st.integers(1, count))
    recent = RecentRecords(slots, lo, lo + count)
    uses, held = dict.fromkeys(range(lo, lo + count), 0.0), dict[int, int]()
    asked = data.draw(st.lists(st.sets(st.integers(lo, lo + count - 1)), max_size=12))
    for passes, wanted in enumerate(asked, 1):
        live = sorted(wanted)
        for neuron in live:
            uses[neuron] += 2 ** (passes / HALF_LIFE)
        placed, missing = recent.ask(live)
        assert pairs(placed) == [(n, held[n]) for n in live if n in held]
        assert missing == [n for n in live if n not in held]
        kept = pairs(recent.admit(live, missing))
        assert {n for n, _ in kept} <= set(missing)
        before = dict(held)
        for neuron, slot in kept:
            for old in [n for n, at in held.items() if at == slot]:
                assert old not in wanted and uses[old] < uses[neuron] * (1 + 1e-5)
                del held[old]
            held[neuron] = slot
        assert sorted(held.values()) == list(range(len(held))) and len(held) <= slots
        assert set(recent.held) == set(held)
        # Nobody who was used more than one that stays is left out, of those that this pass read or that left.
        out = {n for n in {*missing, *before} if n not in held}
        may_leave = [uses[n] for n in held if n not in wanted]
        assert not out or len(held) == slots
        for neuron in out & set(missing):
            assert all(uses[neuron] <= each * (1 + 1e-5) for each in may_leave)


def test_many_passes_overflow_nothing() -> None:
    recent = RecentRecords(2, 0, 4)
    for i in range(20_000):
        live = [0, 1] if i % 2 else [0, 2 + i // 2 % 2]
        recent.admit(live, recent.ask(live)[1])
    assert recent.held == (0, 1) or set(recent.held) == {0, 1}


def test_warm_slots_hold_what_fires_most() -> None:
    recent = RecentRecords(3, 10, 16)
    recent.warm(array("f", [0.1, 0.5, 0.2, 0.5, 0.0, 0.3]))
    assert set(recent.held) == {11, 13, 15}
    placed, missing = recent.ask([10, 11, 14])
    assert [n for n, _ in pairs(placed)] == [11] and missing == [10, 14]
    assert recent.admit([10, 11, 14], missing) == b""  # what came once pushes nobody out
    for _ in range(100):
        recent.admit([14], recent.ask([14])[1])
    assert 14 in recent.held


def test_verify_knows_what_slots_hold() -> None:
    arenas = (Arena("host.asked", "host", 4096), Arena("host.recent", "host", 4096))
    picked, slots = Slot("host.asked", 0, 4096), Slot("host.recent", 0, 4096)

    def packed(of: tuple[tuple[int, int], ...]) -> bytes:
        return array("I", [number for pair in of for number in pair]).tobytes()

    def task(number: int, held: tuple[tuple[int, int], ...], kept: tuple[tuple[int, int], ...]) -> Task:
        call = Call(ops.Recall(picked, slots, packed(held), packed(kept)), 0, None, "int4", 1, 0)
        return Task(number, ("host",), (call,), (), (picked, slots), 1, 0, ())

    assert verify([task(0, (), ((5, 0), (6, 1))), task(1, ((5, 0),), ((7, 1),)), task(2, ((7, 1),), ())], arenas) == 3
    for held in (((6, 1),), ((5, 2),)):
        with pytest.raises(InternalError, match="from slot"):
            verify([task(0, (), ((5, 0), (6, 1))), task(1, (), ((7, 1),)), task(2, held, ())], arenas)
