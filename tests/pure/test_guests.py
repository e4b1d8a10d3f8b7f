"""Units that stay in KV pages which nobody has: where they lie, when they are loaded, and who may not find them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, InternalError
from penstock.graph import ops, passes
from penstock.graph.arenas import Layout, with_arenas
from penstock.graph.batch import Batch
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.pages import check_tables
from penstock.graph.tasks import Pass, Task
from penstock.graph.verify import verify
from penstock.planner.guests import with_guests
from penstock.planner.predict import predict
from penstock.planner.shorten import staying
from penstock.planner.solve import solve
from penstock.serve.pages import Pages
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.parts import PAGE_BYTES, parts
from penstock.spec.plan import Plan, Unit
from penstock.units import MIB
from tests.plans import make_plan
from tests.pure.machine import LLAMA_1B, MACHINE, model

F32, INT4 = Format("float32"), parse_format("int4")
SPEC = model(layers=3, d=64, heads=2, kv_heads=2, neurons=320, vocab=128)
SEQS, PAGES = 4, 8  # of 64 tokens, two a sequence: pools of 128 KiB, and granules of 48 KiB


def streamed(guests: bool = True) -> Plan:
    """The FFNs stream granule by granule."""
    units = [
        Unit(part.key, lo, lo + 1, "disk0" if part.kind == "ffn" else "host", "host", "host")
        for part in parts(SPEC, F32)
        for lo in range(part.granules)
    ]
    ring = {"host": 3 * max(part.granule_bytes for part in parts(SPEC, F32))}
    return with_arenas(replace(make_plan(SPEC, F32, units, ring_bytes=ring, batch_seqs=SEQS), guests=guests))


def step(used: int | None, then: bool = True, rows: int = 1) -> Pass:
    """A decode pass of two sequences, in the first two pages."""
    batch = Batch(0, (0, 3), (5, 7), (rows, rows), (0, rows), (), ((0,), (1,)))
    purpose = "decode" if rows == 1 else "prefill"
    return Pass(purpose, (batch,), passes.DECODE if then else None, False, used)


def loaded(tasks: list[Task], arena: str) -> int:
    calls = [call for task in tasks for call in task.calls]
    return sum(isinstance(call.operands, ops.Load) and call.operands.target.arena == arena for call in calls)


def test_rooms_lie_at_the_end_of_pools_apart_from_each_other() -> None:
    plan = streamed()
    layout = Layout(plan)
    rooms = layout.guests
    assert len(rooms) == 3 * 2 * 2  # two of each of the six pools
    pools = list(layout.kv.pools_in_ram())
    for pool in pools:
        inside = sorted(room for room in rooms.values() if pool.slot.lo <= room.slot.lo < pool.slot.hi)
        assert len(inside) == 2 and inside[-1].slot.hi <= pool.slot.hi
        assert all(a.slot.hi <= b.slot.lo for a, b in pairwise(inside))
        for slot, first_page in inside:
            assert slot.lo % PAGE_BYTES == 0 and first_page >= 1
            assert (
                pool.slot.lo + first_page * pool.page_bytes
                <= slot.lo
                < pool.slot.lo + (first_page + 1) * pool.page_bytes
            )
    for u, room in rooms.items():
        assert room.slot.nbytes == plan.unit_bytes(plan.units[u])
    assert Layout(streamed(False)).guests == {} and streamed(False).arenas == plan.arenas


def test_a_guest_is_loaded_once_and_streams_again_when_its_pages_are_wanted() -> None:
    lowering = Lowering(streamed())
    each = [list(lowering.step(step(used))) for used in (2, 2, 2, 8, 8, None, 5, 5, 5)]
    verify([task for tasks in each for task in tasks], lowering.plan.arenas, lowering.plan.units)
    # One of the six that have room at last was loaded ahead, to the ring.
    assert [loaded(tasks, "host.kv") for tasks in each] == [12, 0, 0, 0, 0, 0, 5, 1, 0]
    streams = [loaded(tasks, "host.ring") for tasks in each]
    assert streams[1] == streams[2] == 15 - 12 and streams[8] == 15 - 6
    assert streams[4] == 15 and streams[3] + streams[4] + streams[5] >= 45


@given(each=st.lists(st.tuples(st.none() | st.integers(2, PAGES), st.booleans(), st.sampled_from([1, 3])), max_size=6))
def test_whatever_is_used_every_read_finds_its_unit(each: list[tuple[int | None, bool, int]]) -> None:
    lowering = Lowering(streamed())
    tasks = [task for one in each for task in lowering.step(step(*one))]
    verify(tasks, lowering.plan.arenas, lowering.plan.units)
    for task in tasks:
        for call in task.calls:
            if isinstance(call.operands, ops.Ffn) and call.operands.weights.arena == "host.kv":
                assert call.operands.weights == lowering.layout.guests[call.unit].slot


def test_units_that_were_not_loaded_are_found_out() -> None:
    lowering = Lowering(streamed())
    first, second = (list(lowering.step(step(2))) for _ in range(2))
    verify([*first, *second], lowering.plan.arenas, lowering.plan.units)
    lacking = [task for task in first if loaded([task], "host.kv") == 0]
    with pytest.raises(InternalError, match=r"has not got it|has not been handed out"):
        verify([*lacking, *second], lowering.plan.arenas, lowering.plan.units)
    with pytest.raises(InternalError, match="1 are used"):
        check_tables(lowering.layout, step(1))


def test_plans_that_cannot_have_guests_are_refused() -> None:
    check_plan(streamed(), SPEC, F32)
    made = streamed()
    flexgen = with_arenas(replace(made, order="flexgen"))
    spilled = with_arenas(replace(made, kv=(replace(made.kv[0], home="disk0"),)))
    for plan in (flexgen, spilled):
        with pytest.raises(BadRequest, match="KV pages that nobody has"):
            check_plan(plan, SPEC, F32)


def test_the_planner_cuts_what_streams_so_that_it_may_stay() -> None:
    ask = Ask(batch=8, context=512, host_memory_bytes=700 << 20)
    plan = solve(ask, LLAMA_1B, INT4, MACHINE).plan
    assert plan.guests and plan.tier_bytes()["host"] <= 700 << 20
    check_plan(plan, LLAMA_1B, INT4)
    for part in plan.parts.values():
        edges = [(unit.lo, unit.hi) for unit in plan.units if unit.part == part.key]
        assert edges[0][0] == 0 and edges[-1][1] == part.granules
        assert all(a[1] == b[0] for a, b in pairwise(edges))
    rooms = Layout(plan).guests
    assert len({room.first_page for room in rooms.values()}) >= 2  # they make room bit by bit
    whole = replace(ask, batch=1, prompt_tokens=300, output_tokens=212)  # as many tokens as the context
    alone = solve(whole, LLAMA_1B, INT4, MACHINE).plan
    assert not alone.guests and with_guests(alone, whole) is alone


def test_one_sequence_leaves_pages_that_it_has_not_reached() -> None:
    """The more of its context a sequence will have, the more is promised to stream."""
    machine, context = MACHINE, 4096
    asks = [
        Ask(prompt_tokens=64, output_tokens=output, context=context, host_memory_bytes=700 << 20)
        for output in (64, 1000, 3000, context - 64)
    ]
    solved = [solve(ask, LLAMA_1B, INT4, machine) for ask in asks]
    assert [each.plan.guests for each in solved] == [True, True, True, False]
    read = [each.prediction.disk_bytes_per_token for each in solved]
    assert read == sorted(read) and read[0] < 0.75 * read[-1]
    plan = solved[0].plan
    streams = sum(plan.unit_bytes(unit) for unit in plan.units if unit.home == "disk0")
    there = staying(plan, asks[0])
    assert read[0] == streams - sum(plan.unit_bytes(plan.units[u]) for u in there)
    assert predict(plan, asks[0], machine).disk_bytes_per_token == read[0]  # whole, without short plans
    (step,) = {passes.decode(plan, (0,), (position,), None).pages_used for position in (0, plan.page_tokens - 1)}
    assert step == 1
    ends = [-(-end // plan.page_tokens) for end in (512, 1000)]
    assert [p.pages_used for p in passes.prompts(plan, (0,), (1000,), None)] == ends
    assert "more of them slow it down" in " ".join(solved[0].reasons)


def test_kept_pages_are_worth_their_room_for_some_passes_only() -> None:
    def ids(start: int, count: int) -> object:
        import numpy as np

        return np.arange(start, start + count, dtype=np.int32)

    pages = Pages(6, 4, most_kept=3)
    prompt = ids(0, 8)
    table = pages.begin(pages.digests("", prompt), prompt, 0)  # type: ignore[arg-type]
    assert table is not None and table.pages == [0, 1] and pages.top == 2
    pages.wrote(table, 8, ids)  # type: ignore[arg-type]
    pages.end(table, ids)  # type: ignore[arg-type]
    assert pages.kept == 2 and pages.top == 2
    other = pages.begin(pages.digests("b", prompt), prompt, 0)  # type: ignore[arg-type]
    assert other is not None and other.pages == [2, 3]  # what was kept just now stays
    for _ in range(4):
        pages.tick()
    assert pages.extend(other) and other.pages[-1] in (0, 1) and pages.top == 4  # no page beyond all others
    pages.drop(other)
    pages.tick()
    assert pages.kept == 0 and pages.top == 0 and pages.had == 0


def test_a_single_sequence_has_short_pages_where_long_ones_leave_no_room_for_a_unit() -> None:
    """LLAMA_1B's pools have 1 MiB for 1,024 tokens, and a unit takes 0.84 MiB: beside a page of 256 it has no room."""
    asked = Ask(prompt_tokens=16, output_tokens=32, host_memory_bytes=500 * MIB, context=1024)
    short = solve(asked, LLAMA_1B, INT4, MACHINE).plan
    assert short.guests and short.page_tokens == 64
    assert Layout(short).guests and staying(short, asked)
    longer = solve(replace(asked, prompt_tokens=600), LLAMA_1B, INT4, MACHINE).plan
    assert not longer.guests and longer.page_tokens == 256
    long = solve(replace(asked, context=4096), LLAMA_1B, INT4, MACHINE).plan
    assert long.guests and long.page_tokens == 256
    together = solve(replace(asked, batch=2), LLAMA_1B, INT4, MACHINE).plan
    assert together.page_tokens == 256
