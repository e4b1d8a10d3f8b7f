"""The simulator against a brute-force clock, and predictions that move the right way."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.graph.tasks import Call, Slot, Task
from penstock.planner.cost import Cost
from penstock.planner.predict import predict
from penstock.planner.simulate import simulate
from penstock.planner.solve import solve
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import MachineSpec, Rate
from tests.pure.machine import LLAMA_1B, MACHINE

LANES = ("host", "disk0", "h2d0", "gpu0")


@st.composite
def task_lists(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    for i in range(draw(st.integers(1, 25))):
        lanes = tuple(draw(st.lists(st.sampled_from(LANES), min_size=1, max_size=2, unique=True)))
        after = tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else ()
        nbytes = draw(st.integers(0, 10**9))
        call = Call("copy", -1, None, (Slot("a", 0, 1), Slot("a", 1, 2)), (), "*", nbytes, 0)
        tasks.append(Task(i, lanes, (call,), (), (), nbytes, 0, after))
    return tasks


def brute_force(tasks: list[Task], cost: Cost) -> dict[int, float]:
    """Steps a clock from event to event; starts whatever heads all of its lanes and has its inputs."""
    queues = {lane: [t.id for t in tasks if lane in t.lanes] for lane in LANES}
    by_id, running, ends, now = {t.id: t for t in tasks}, {}, {}, 0.0
    while len(ends) < len(tasks):
        for task in tasks:
            ready = task.id not in running and task.id not in ends and all(o in ends for o in task.after)
            if ready and all(queues[lane][0] == task.id for lane in task.lanes):
                running[task.id] = now + cost.seconds(task)
        now = min(running.values())
        for task_id in [i for i, end in running.items() if end <= now]:
            ends[task_id] = running.pop(task_id)
            for lane in by_id[task_id].lanes:
                queues[lane].remove(task_id)
    return ends


@given(task_lists())
def test_simulate_equals_brute_force(tasks: list[Task]) -> None:
    cost = Cost(MACHINE)
    timeline = simulate(tasks, cost)
    expected = brute_force(tasks, cost)
    assert {s.task: round(s.end_s, 9) for s in timeline.spans} == {i: round(e, 9) for i, e in expected.items()}


def slower(machine: MachineSpec, lane: str) -> MachineSpec:
    rates = [replace(r, s_per_byte=2 * r.s_per_byte) if r.lane == lane else r for r in machine.rates]
    return replace(machine, rates=tuple(rates))


def test_a_slower_disk_slows_a_streaming_plan() -> None:
    ask = Ask(host_memory_bytes=1500 << 20, context=512)
    solved = solve(ask, LLAMA_1B, Format("bfloat16"), MACHINE)
    assert solved.prediction.bound_by == "disk0"
    halved = predict(solved.plan, replace(ask, context=512), slower(MACHINE, "disk0"))
    ratio = solved.prediction.decode_tokens_per_s / halved.decode_tokens_per_s
    assert 1.9 < ratio < 2.1
    same = predict(solved.plan, ask, slower(MACHINE, "gpu0"))
    assert same == solved.prediction


def test_the_bound_is_met() -> None:
    """Streaming decode on paper runs at the disk's rate, within the cost of its tasks."""
    ask = Ask(host_memory_bytes=1500 << 20, context=512)
    solved = solve(ask, LLAMA_1B, Format("bfloat16"), MACHINE)
    disk = next(r for r in MACHINE.rates if r.lane == "disk0")
    assert isinstance(disk, Rate)
    bound = 1 / (solved.prediction.disk_bytes_per_token * disk.s_per_byte)
    assert 0.97 < solved.prediction.decode_tokens_per_s / bound <= 1.0
