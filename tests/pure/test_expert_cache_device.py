"""Caches for experts beside a device: in its memory, over RAM or a disk, and lifts out of slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.errors import InternalError
from penstock.graph import ops, passes
from penstock.graph.arenas import Layout, with_arenas
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.verify import verify
from penstock.planner.predict import predict
from penstock.planner.routing import RouterTrace
from penstock.spec.ask import Ask
from penstock.spec.plan import Plan
from tests.pure.expert_caches import FORMAT, SPEC, Said, device_plan, drawn, lowered, one, worst
from tests.pure.machine import WITH_DEVICE


@pytest.mark.parametrize("seqs", [1, 4])
@pytest.mark.parametrize("lifted_rows", [1, 2, 9])
@pytest.mark.parametrize("slots", [1, 4, 9])
@pytest.mark.parametrize("of", [worst, drawn])
def test_any_answers_beside_a_device(of: Callable[[Plan], Said], slots: int, lifted_rows: int, seqs: int) -> None:
    plan = device_plan(slots, lifted_rows, batch_seqs=seqs)
    check_plan(plan, SPEC, FORMAT)
    tasks = lowered(plan, of(plan), 3)
    assert verify(tasks, plan.arenas, plan.units) == len(tasks)
    assert tasks == lowered(plan, of(plan), 3)
    by_cpu = [t for t in tasks if t.lanes == ("host",) and any(isinstance(c.operands, ops.Experts) for c in t.calls)]
    lifts = [t for t in tasks if isinstance(t.calls[0].operands, ops.Lift)]
    assert all(lift.lanes == ("h2d0",) for lift in lifts) and lifts[0].after  # after the router that asked
    assert bool(by_cpu)  # of long prompts at least, which it computes at home


@pytest.mark.parametrize("seqs", [1, 4])
@pytest.mark.parametrize("lifted_rows", [1, 2])
@pytest.mark.parametrize(("slots", "beneath"), [(1, 1), (1, 4), (3, 3), (9, 1)])
@pytest.mark.parametrize("of", [worst, one, drawn])
def test_any_answers_beside_a_device_over_a_disk(
    of: Callable[[Plan], Said], slots: int, beneath: int, lifted_rows: int, seqs: int
) -> None:
    """What the device's cache misses comes out of the cache in RAM, and what that misses too is read first."""
    plan = device_plan(slots, lifted_rows, beneath, batch_seqs=seqs)
    check_plan(plan, SPEC, FORMAT)
    tasks = lowered(plan, of(plan), 3)
    assert verify(tasks, plan.arenas, plan.units) == len(tasks)
    assert tasks == lowered(plan, of(plan), 3)
    lifts = [c.operands for t in tasks for c in t.calls if isinstance(c.operands, ops.Lift)]
    assert {lift.source.arena for lift in lifts} == {"host.cache"}
    read = [c for t in tasks for c in t.calls if isinstance(c.operands, ops.Load)]
    if of is one and slots >= 3 and beneath >= 3:  # each is read once, and lifted once
        assert len([c for c in read if c.operands.target.arena == "host.cache"]) == 3 * len(SPEC.layers)
        assert len(lifts) == 3 * len(SPEC.layers)


@pytest.mark.parametrize("lifted_rows", [1, 2])
def test_what_ram_has_is_not_read_again(lifted_rows: int) -> None:
    """Twelve passes ask for six experts by turns: the device holds three of them, and RAM the others."""
    plan = device_plan(3, lifted_rows, 6)
    lowering, turns = Lowering(plan), ((0, 1, 2), (3, 4, 5))
    for position in range(12):
        p = passes.decode(plan, (0,), (position,), passes.DECODE)
        tasks = list(lowering.step(p, lambda _, position=position: [turns[position % 2]]))  # type: ignore[misc]
        calls = [call.operands for task in tasks for call in task.calls]
        assert len([op for op in calls if isinstance(op, ops.Load)]) == (3 * len(SPEC.layers) if position < 2 else 0)
        assert len([op for op in calls if isinstance(op, ops.Lift)]) == 3 * len(SPEC.layers)


@pytest.mark.parametrize("slots", [1, 4, 9])
def test_a_long_prompt_lifts_what_no_cache_holds(slots: int) -> None:
    """Out of the middle of a unit in RAM too."""
    plan = device_plan(slots)
    units = [replace(u, prefill="gpu0") if u.part.endswith("experts") else u for u in plan.units]  # type: ignore[arg-type]
    ring = plan.parts["0.experts"].nbytes
    plan = with_arenas(replace(plan, units=tuple(units), ring_bytes={"gpu0": ring}))  # type: ignore[dict-item]
    check_plan(plan, SPEC, FORMAT)
    lowering, answer = Lowering(plan), drawn(plan)
    tasks = [task for at in range(12) for task in lowering.step(passes.decode(plan, (0,), (at,), None), answer)]
    (p,) = passes.prompts(plan, (0,), (30,), None)
    prompt = list(lowering.step(p, answer))
    assert verify([*tasks, *prompt], plan.arenas, plan.units)
    lifted = [call.operands for task in prompt for call in task.calls if isinstance(call.operands, ops.Lift)]
    part = plan.parts["0.experts"]
    assert sum(lift.target.nbytes for lift in lifted) == len(SPEC.layers) * (9 - slots) * part.least_bytes
    start = Layout(plan).weights[[u.part for u in plan.units].index("0.experts")].lo
    sources = sorted(
        (lift.source.lo - start) // part.least_bytes + i
        for lift in lifted
        for i in range(lift.source.nbytes // part.least_bytes)
        if start <= lift.source.lo < start + part.nbytes
    )
    held = lowering._demand._own(0).held
    assert sources == [expert for expert in range(9) if expert not in held]


def test_a_lift_out_of_a_slot_that_holds_another_expert_is_found() -> None:
    plan = device_plan(3, 1, 4)
    tasks = lowered(plan, worst(plan), 2)
    number, task = [(i, t) for i, t in enumerate(tasks) if isinstance(t.calls[0].operands, ops.Lift)][-1]
    lift = task.calls[0].operands
    assert isinstance(lift, ops.Lift)
    nbytes = lift.source.nbytes
    other = lift.source._replace(lo=lift.source.lo - nbytes, hi=lift.source.lo)
    tasks[number] = task._replace(calls=(task.calls[0]._replace(operands=lift._replace(source=other)),))
    with pytest.raises(InternalError, match=r"from host.cache.*, which holds"):
        verify(tasks, plan.arenas, plan.units)


def test_a_prediction_counts_what_each_cache_holds() -> None:
    """Two tokens in turns that share no expert. The device has slots for one of them, RAM for both, or for one."""
    layers = len(SPEC.layers)
    trace = RouterTrace((((0, 1, 2), (3, 4, 5)),) * layers, "made up")
    ask = Ask(prompt_tokens=4, output_tokens=4, context=64)
    for lifted_rows, beneath, absent in ((1, 6, 0), (2, 6, 0), (1, 1, 3)):  # lifted, or computed by the CPU
        plan = device_plan(3, lifted_rows, beneath)
        use = predict(plan, ask, WITH_DEVICE, trace=trace).experts
        assert use is not None and (use.wanted, use.missed, use.absent) == (3 * layers, 3 * layers, absent * layers)
        assert use.loaded_bytes == absent * layers * plan.parts["0.experts"].least_bytes
        assert (use.hit_rate, use.hit_rate_beneath) == (0, 1 - absent / 3)
    use = predict(device_plan(6, 1, 1), ask, WITH_DEVICE, trace=trace).experts
    assert use is not None and (use.missed, use.hit_rate_beneath) == (0, 1)
    alone = predict(device_plan(3, 1), ask, WITH_DEVICE, trace=trace).experts
    assert alone is not None and (alone.absent, alone.hit_rate_beneath, alone.missed) == (None, None, 3 * layers)


def test_a_lift_of_another_expert_is_found() -> None:
    plan = device_plan(3, 1)
    tasks = lowered(plan, worst(plan), 2)
    number, task = next((i, t) for i, t in enumerate(tasks) if isinstance(t.calls[0].operands, ops.Lift))
    lift = task.calls[0].operands
    assert isinstance(lift, ops.Lift)
    wrong = task.calls[0]._replace(operands=lift._replace(expert=(lift.expert + 1) % 9))
    tasks[number] = task._replace(calls=(wrong,))
    with pytest.raises(InternalError, match="which holds"):
        verify(tasks, plan.arenas, plan.units)
