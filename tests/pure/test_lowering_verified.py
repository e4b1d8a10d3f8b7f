"""Tasks of random plans pass the verifier, and the verifier finds what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InternalError
from penstock.graph import ops, passes
from penstock.graph.arenas import Layout
from penstock.graph.batch import Batch
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Call, Pass, Slot, Stream, Task
from penstock.graph.verify import verify
from penstock.spec.parts import parts
from penstock.spec.plan import Arena, Unit
from tests.plans import device_plans, make_plan, random_plans, resident_plan
from tests.pure.machine import model
from tests.pure.test_lowering import F32, SMALL, lowered, stay


@given(st.data())
def test_random_plans_beside_a_device_pass_the_verifier(data: st.DataObject) -> None:
    """Also over passes that come again, which are views of the first."""
    spec = model(layers=2, d=64, heads=4, kv_heads=4, neurons=200, vocab=300, tied=data.draw(st.booleans()))
    plan = data.draw(device_plans(spec, F32, batch_seqs=2, batches_per_pass=2))
    check_plan(plan, spec, F32)
    steps = list(passes.prefill(plan, 0, data.draw(st.integers(1, 70)), passes.DECODE))
    for at in range(70, 74):
        guess = data.draw(st.sampled_from([None, passes.DECODE, Stream("prefill", False)]))
        steps.append(passes.decode(plan, tuple(range(data.draw(st.integers(1, 4)))), (at,) * 4, guess))
    tasks = lowered(plan, *steps)
    verify(tasks, plan.arenas)
    lifts = sum(t.bytes for t in tasks if t.calls[0].op == "lift")
    wanted = sum(
        plan.unit_bytes(u)
        for p in steps
        for u in plan.units
        if Layout(plan).streams(u, p.stream) and u.executor(p.purpose) == "gpu0"
        if p.stream.logits or u.part not in ("head", "embed")
    )
    room = plan.ring_bytes.get("gpu0", 0)
    assert wanted <= lifts <= wanted + len(steps) * room


def test_a_pass_that_comes_again_waits_for_the_pass_before() -> None:
    """Which may have been a new one: the embedding is gathered in RAM, where the device may still copy the last one."""
    spec = model(layers=2, d=64, heads=2, kv_heads=2, neurons=192, vocab=128, tied=False)
    units = [
        Unit(part.key, 0, part.granules, "host" if part.key == "embed" else "gpu0", "gpu0", "gpu0")
        for part in parts(spec, F32)
    ]
    stage = max(part.granule_bytes for part in parts(spec, F32))
    plan = make_plan(spec, F32, units, ring_bytes={}, stage_bytes=stage, main="gpu0", kv_homes=[("gpu0", "gpu0")] * 2)
    check_plan(plan, spec, F32)
    one, other = (passes.decode(plan, (0,), (at,), passes.DECODE) for at in (8, 9))
    prompt = list(passes.prefill(plan, 0, 7, passes.DECODE))
    tasks = lowered(plan, *prompt, one, other, *prompt, *prompt, one)
    assert sum(task.like >= 0 and task.lanes == ("host",) for task in tasks) == 4
    verify(tasks, plan.arenas)


def test_another_shape_after_passes_that_came_again() -> None:
    """Its tasks wait for each other, not only for the pass before: two sequences after one, a layer on the device."""
    spec = model(layers=2, d=64, heads=2, kv_heads=2, neurons=192, vocab=128)
    by_key = {p.key: p for p in parts(spec, F32)}
    units = [replace(stay(key, by_key), decode="gpu0", prefill="gpu0", home="gpu0") if key == "1.attn"
             else stay(key, by_key) for key in by_key]  # fmt: skip
    homes = [("host", "host"), ("gpu0", "gpu0")]
    plan = make_plan(spec, F32, units, ring_bytes={}, batch_seqs=2, kv_homes=homes)
    steps = [passes.decode(plan, (0,), (at,), passes.DECODE) for at in (7, 8, 9)]
    tasks = lowered(plan, *steps, passes.decode(plan, (0, 1), (10, 10), passes.DECODE))
    assert any(task.like >= 0 for task in tasks)
    verify(tasks, plan.arenas)


@given(st.data())
def test_random_plans_pass_the_verifier(data: st.DataObject) -> None:
    spec = model(layers=2, d=64, heads=4, kv_heads=4, neurons=200, vocab=300, tied=data.draw(st.booleans()))
    plan = data.draw(random_plans(spec, F32, batch_seqs=2, batches_per_pass=2))
    steps = list(
        passes.prefill(plan, 0, data.draw(st.integers(1, 70)), data.draw(st.sampled_from([None, passes.DECODE])))
    )
    for at in range(70, 73):
        guess = data.draw(st.sampled_from([None, passes.DECODE, Stream("prefill", False)]))
        steps.append(passes.decode(plan, tuple(range(data.draw(st.integers(1, 4)))), (at,) * 4, guess))
    tasks = lowered(plan, *steps)
    verify(tasks, plan.arenas)
    streamed = sum(plan.unit_bytes(u) for u in plan.units if Layout(plan).streams(u, passes.DECODE))
    ring = plan.ring_bytes.get("host", 0)
    loads = [t for t in tasks if t.calls[0].op == "load"]
    with_head = sum(1 for s in steps if s.stream.logits)
    # Every pass loads each streamed unit once; a wrong guess of what follows costs at most a ring of reads.
    head = sum(
        plan.unit_bytes(u) for u in plan.units if Layout(plan).streams(u, passes.DECODE) and u.part in ("head", "embed")
    )
    needed = streamed * len(steps) - head * (len(steps) - with_head)
    assert needed <= sum(t.bytes for t in loads) <= needed + ring * len(steps)


def test_verify_finds_what_is_wrong() -> None:
    plan = make_plan(
        SMALL, F32,
        [Unit(p.key, 0, p.granules, "disk0" if p.kind == "ffn" else "host", "host", "host") for p in parts(SMALL, F32)],
        ring_bytes={"host": 1 << 20},
    )  # fmt: skip
    tasks = lowered(plan, *(passes.decode(plan, (0,), (at,), passes.DECODE) for at in (0, 1)))
    verify(tasks, plan.arenas)
    user = next(t for t in tasks if t.after and t.lanes == ("host",))
    without_edge = [t._replace(after=()) if t.id == user.id else t for t in tasks]
    with pytest.raises(InternalError, match="in no order"):
        verify(without_edge, plan.arenas)
    load = next(t for t in tasks if t.calls[0].op == "load")
    with pytest.raises(InternalError, match=r"never written|has not been handed out"):
        verify([t for t in tasks if t.id != load.id], plan.arenas)
    with pytest.raises(InternalError, match="outside the arena"):
        verify(tasks, [replace(a, bytes=4096) if a.name == "host.ring" else a for a in plan.arenas])
    with pytest.raises(InternalError, match="twice"):
        verify([tasks[0], tasks[0]], plan.arenas)


def test_verify_walks_calls_in_order() -> None:
    """What a task reads is its own only after it has written that."""
    x, y = Slot("host.act", 0, 64), Slot("host.act", 64, 128)
    write, read = (Call(ops.Copy(a, b, what="x"), -1, None, "*", 64, 0) for a, b in ((y, x), (x, y)))
    arenas = (Arena("host.act", "host", 128),)
    first = Task(0, ("host",), (Call(ops.Copy(x, y, what="tokens"), -1, None, "*", 64, 0),), (x,), (y,), 64, 0, ())
    task = Task(1, ("host",), (write, read), (y, x), (x, y), 128, 0, ())
    assert verify([first, task], arenas) == 2
    with pytest.raises(InternalError, match="were never written"):
        verify([first._replace(calls=()), task._replace(calls=(read, write))], arenas)


def test_a_unit_larger_than_the_ring_is_our_fault() -> None:
    plan = resident_plan(SMALL, F32)
    units = [replace(u, home="disk0") if u.part == "0.ffn" else u for u in plan.units]
    plan = make_plan(SMALL, F32, units, ring_bytes={"host": 4096})
    with pytest.raises(InternalError, match=r"larger than host\.ring"):
        lowered(plan, passes.decode(plan, (0,), (0,), None))


def test_prefill_chunks_ask_for_the_head_once() -> None:
    plan = resident_plan(SMALL, F32, chunk_rows=16)
    steps = list(passes.prefill(plan, 0, 40, passes.DECODE))
    assert [s.batches[0].rows for s in steps] == [(16,), (16,), (8,)]
    assert [bool(s.batches[0].logits) for s in steps] == [False, False, True]
    assert [s.then for s in steps] == [Stream("prefill", False), Stream("prefill", True), passes.DECODE]
    assert isinstance(steps[0].batches[0], Batch)


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 12)), min_size=1, max_size=5), st.booleans())
def test_a_pass_that_comes_again_is_lowered_as_if_it_were_new(steps: list[tuple[int, int]], decode: bool) -> None:
    """All but the task's id, and `like`, which names the first of its shape."""
    plan = resident_plan(model(layers=3), F32, batch_seqs=2, context=128)
    kept, first = Lowering(plan), dict[int, int]()
    for start, rows in steps:
        if decode:
            p = passes.decode(plan, (0, 1), (start, start + rows), None)
        else:
            p = Pass("prefill", (Batch(0, (0,), (start,), (rows,), (rows - 1,)),), None)
        (found,), (fresh,) = kept.step(p), Lowering(plan).step(p)
        assert found._replace(id=0, like=-1, calls=tuple(found.calls)) == fresh._replace(id=0)
        shape = 0 if decode else rows
        assert found.like == first.get(shape, -1)
        first.setdefault(shape, found.id)
        if len(first) > 4:
            break  # only so many shapes are kept
