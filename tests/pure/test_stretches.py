"""What lies between the experts of two layers is lowered once and comes again: the same calls, at other positions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.graph import passes
from penstock.graph.arenas import with_arenas
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass, Task
from penstock.graph.verify import verify
from penstock.planner.cost import Cost
from penstock.planner.simulate import Simulator, lowered_pass
from penstock.spec.machine import Rate
from penstock.spec.places import CPU, DISK
from penstock.spec.plan import Plan
from tests.pure.expert_caches import Said, cached_plan, drawn, one, worst
from tests.pure.machine import MACHINE

LAST = 9  # passes


def decoded(plan: Plan) -> list[Pass]:
    """Passes of all sequences, then of fewer, then of all again, each at its own position."""
    seqs = plan.batch_seqs
    counts = [seqs] * 4 + [max(1, seqs - 1)] * 2 + [seqs] * (LAST - 6)
    return [
        passes.decode(plan, range(n), [5 + 3 * step + seq for seq in range(n)], passes.DECODE)
        for step, n in enumerate(counts)
    ]


def lowered(plan: Plan, answer: Said, stretches: bool) -> list[list[Task]]:
    lowering = Lowering(plan)
    lowering._stretches._may = lowering._stretches._may and stretches
    return [list(lowering.step(p, answer)) for p in decoded(plan)]


@pytest.mark.parametrize(("seqs", "guesses"), [(1, 0), (3, 0), (1, 3)])
@pytest.mark.parametrize("slots", [1, 4, 9])
@pytest.mark.parametrize("of", [worst, one, drawn])
def test_known_stretches_are_the_calls_that_would_be_lowered(of: object, slots: int, seqs: int, guesses: int) -> None:
    plan = cached_plan(slots, "lfu", guesses, batch_seqs=seqs)
    found, expected = (lowered(plan, of(plan), stretches) for stretches in (True, False))  # type: ignore[operator]
    for with_stretches, without in zip(found, expected, strict=True):
        for lane in ("host", "disk0"):
            calls, others = (
                [c for t in tasks if t.lanes == (lane,) for c in t.calls] for tasks in (with_stretches, without)
            )
            assert calls == others
    tasks = [task for of_pass in found for task in of_pass]
    verify(tasks, plan.arenas, plan.units)
    assert len({task.id for task in tasks}) == len(tasks)
    layers = len(plan.target.spec.layers)
    known = [[task for task in of_pass if task.like >= 0 and not isinstance(task.calls, tuple)] for of_pass in found]
    news = (0,) if seqs == 1 else (0, 4)  # passes of a shape that is new
    assert [len(each) for each in known] == [0 if i in news else layers for i in range(LAST)]
    assert all(task.bytes == sum(c.bytes for c in task.calls) for each in known for task in each)
    assert all(task.flops == sum(c.flops for c in task.calls) for each in known for task in each)


def test_passes_whose_weights_stream_have_none() -> None:
    plan = cached_plan(4)
    units = tuple(replace(u, home="disk0") if u.part.endswith(".attn") else u for u in plan.units)
    assert not any(t.like >= 0 and not isinstance(t.calls, tuple)
                   for of_pass in lowered(with_arenas(replace(plan, units=units)), one(plan), True)
                   for t in of_pass)  # fmt: skip


@pytest.mark.parametrize(("slots", "open_from"), [(9, 1), (1, None)])
def test_a_native_program_has_no_tasks_to_hand_out(slots: int, open_from: int | None) -> None:
    """A pass whose shape was seen is done in one piece, if its cache has room for what a token wants: predictions
    charge it no overheads. Whoever wants more than that does it task by task."""
    plan = cached_plan(slots, "lfu", 0, batch_seqs=1)
    alphas_s = {(CPU, "*"): 1e-6, (CPU, "task"): 1e-3, (CPU, "call"): 1e-4, (DISK.reads, "*"): 1e-6}
    rates = tuple(Rate(lane, op, "*", alpha_s, 0.0) for (lane, op), alpha_s in alphas_s.items())
    lowering, simulator = Lowering(plan), Simulator(Cost(replace(MACHINE, rates=rates)))
    answer = drawn(plan)
    seconds = []
    for p in decoded(plan)[:4]:
        start_s = simulator.now_s
        simulator.busy_s(*lowered_pass(lowering, p, answer))
        seconds.append(simulator.now_s - start_s)
    layers = len(plan.target.spec.layers)
    for nth, took_s in enumerate(seconds):
        in_one_piece = open_from is not None and nth >= open_from
        assert (took_s < 1e-3) == in_one_piece and (in_one_piece or took_s > layers * 1e-3)
