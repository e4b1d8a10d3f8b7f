"""The simulator against a brute-force clock, and predictions that move the right way."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.graph.tasks import Call, Task
from penstock.planner.cost import Cost
from penstock.planner.predict import predict
from penstock.planner.simulate import simulate
from penstock.planner.solve import solve
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import KV_IN_FLIGHT, MachineSpec, Rate, Sharing
from tests.calls import operands
from tests.pure.machine import LLAMA_1B, MACHINE, model

FOUR_LAYERS = model(4, 2048, 32, 8, 8192, dtype="bfloat16", vocab=128256, max_positions=131072)
LANES = ("host", "disk0", "h2d0", "gpu0")


@st.composite
def task_lists(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    for i in range(draw(st.integers(1, 25))):
        lanes = tuple(draw(st.lists(st.sampled_from(LANES), min_size=1, max_size=2, unique=True)))
        after = tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else ()
        nbytes = draw(st.integers(0, 10**9))
        call = Call(operands("norm"), -1, None, "*", nbytes, 0)
        tasks.append(Task(i, lanes, (call,), (), (), nbytes, 0, after))
    return tasks


def brute_force(tasks: list[Task], cost: Cost) -> dict[int, float]:
    """Steps a clock from event to event; starts whatever heads all of its lanes and has its inputs. Everything is
    worked out anew at every event: which lanes are busy, how fast each task then goes, which is done first."""
    queues = {lane: [t.id for t in tasks if lane in t.lanes] for lane in LANES}
    left: dict[int, float] = {}  # share of a task that is still to do
    ends: dict[int, float] = {}
    now = 0.0
    while len(ends) < len(tasks):
        for task in tasks:
            ready = task.id not in left and task.id not in ends and all(o in ends for o in task.after)
            if ready and all(queues[lane][0] == task.id for lane in task.lanes):
                left[task.id] = 1.0
        pace = {}
        for task in tasks:
            if task.id in left:
                others = {lane for t in tasks if t.id in left for lane in t.lanes} - set(task.lanes)
                slow = [
                    math.prod(s.factor for s in cost.machine.sharing if s.lane == lane and s.beside in others)
                    for lane in task.lanes
                ]
                pace[task.id] = 1 / (cost.seconds(task) * max(slow))
        passed = min(left[i] / pace[i] for i in left)
        now += passed
        for task in tasks:
            if task.id in left:
                left[task.id] -= passed * pace[task.id]
                if left[task.id] < 1e-9:
                    del left[task.id]
                    ends[task.id] = now
                    for lane in task.lanes:
                        queues[lane].remove(task.id)
    return ends


SHARINGS = st.lists(
    st.builds(Sharing, st.sampled_from(LANES), st.sampled_from(LANES), st.sampled_from([1.0, 1.25, 2.0])), max_size=4
)


@given(task_lists(), SHARINGS)
def test_simulate_equals_brute_force(tasks: list[Task], sharing: list[Sharing]) -> None:
    cost = Cost(replace(MACHINE, sharing=tuple(sharing)))
    timeline = simulate(tasks, cost)
    expected = brute_force(tasks, cost)
    found = {span.task: span.end_s for span in timeline.spans}
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[i], expected[i], rel_tol=1e-6, abs_tol=1e-9) for i in expected)


def test_lanes_that_share_slow_each_other_only_while_both_are_busy() -> None:
    """10 s of computing beside 4 s of reading, each half as fast beside the other: 8 s together do 4 s of each."""
    work = Call(operands("norm"), -1, None, "*", 0, 0)
    tasks = [
        Task(0, ("host",), (work._replace(bytes=400 * 10**9),), (), (), 0, 0, ()),
        Task(1, ("disk0",), (work._replace(bytes=4 * 29 * 10**8),), (), (), 0, 0, ()),
    ]
    shared = (Sharing("host", "disk0", 2.0), Sharing("disk0", "host", 2.0))
    ends = {span.task: span.end_s for span in simulate(tasks, Cost(replace(MACHINE, sharing=shared))).spans}
    assert math.isclose(ends[1], 8, rel_tol=1e-3) and math.isclose(ends[0], 14, rel_tol=1e-3)


def test_a_pass_costs_what_lies_beside_its_ops() -> None:
    """Scheduling of tasks, of calls that nobody has prepared, and of passes is in the prediction."""
    ask = Ask(context=512)
    plain = solve(ask, LLAMA_1B, Format("bfloat16"), MACHINE)
    for what, least_s in (("pass", 1e-3), ("task", 1e-3)):
        loaded = replace(MACHINE, rates=(*MACHINE.rates, Rate("host", what, "*", 1e-3, 0.0)))
        found = predict(plain.plan, ask, loaded)
        gap_s = 1 / found.decode_tokens_per_s - 1 / plain.prediction.decode_tokens_per_s
        assert math.isclose(gap_s, least_s, rel_tol=1e-6)
    anew = replace(MACHINE, rates=(*MACHINE.rates, Rate("host", "call", "*", 1e-3, 0.0)))
    assert predict(plain.plan, ask, anew).decode_tokens_per_s == plain.prediction.decode_tokens_per_s  # prepared
    assert predict(plain.plan, ask, anew).ttft_s > plain.prediction.ttft_s


def test_kv_of_many_sequences_begins_many_times() -> None:
    """Of a disk so many at once, else one move after the other."""
    lanes = ("disk0", "h2d0")
    machine = replace(MACHINE, rates=(*MACHINE.rates, *(Rate(lane, "kv_load", "*", 1e-3, 0.0) for lane in lanes)))

    def seconds(lane: str, ranges: int) -> float:
        call = Call(operands("kv_load", ranges=ranges), -1, None, "float16", 0, 0)
        return Cost(machine).seconds(Task(0, (lane,), (call,), (), (), 0, 0, ()))

    assert math.isclose(seconds("disk0", 2 * KV_IN_FLIGHT + 2), 3e-3)
    assert math.isclose(seconds("h2d0", 18), 18e-3)


@given(st.integers(1, 600))
def test_rates_for_few_rows_are_taken_for_few_rows(rows: int) -> None:
    rates = [Rate("host", "ffn", "int4", 1e-6 * n, 1e-10, rows=n) for n in (1, 2, 4, 8)]
    machine = replace(MACHINE, rates=(*MACHINE.rates, *rates, Rate("host", "ffn", "int4", 1e-3, 1e-10)))
    found = machine.rate("host", "ffn", "int4", rows)
    assert found.rows == min((n for n in (1, 2, 4, 8) if n >= rows), default=0)
    assert machine.rate("host", "ffn", "int8", rows) == MACHINE.rates[0]


SMALL_PROMPT = Ask(host_memory_bytes=1500 << 20, context=512, prompt_tokens=40, output_tokens=8)


@given(
    st.sampled_from(["host", "disk0"]),
    st.sampled_from(["s_per_byte", "s_per_flop", "alpha_s"]),
    st.floats(1.0, 8.0),
    st.sampled_from([None, 1500 << 20]),
)
@settings(max_examples=25)
def test_nothing_gets_faster_when_a_lane_gets_slower(lane: str, figure: str, factor: float, limit: int | None) -> None:
    ask = replace(SMALL_PROMPT, host_memory_bytes=limit)
    solved = solve(ask, FOUR_LAYERS, Format("bfloat16"), MACHINE)
    rates = [replace(r, **{figure: getattr(r, figure) * factor}) if r.lane == lane else r for r in MACHINE.rates]
    found = predict(solved.plan, ask, replace(MACHINE, rates=tuple(rates)))
    assert found.ttft_s >= solved.prediction.ttft_s * (1 - 1e-9)
    assert found.decode_tokens_per_s <= solved.prediction.decode_tokens_per_s * (1 + 1e-9)


@given(st.integers(600, 1200))
@settings(max_examples=10)
def test_twice_the_memory_is_never_slower(limit_mib: int) -> None:
    """A tier's bytes doubled: a plan at least as good (but for the 5 % within which reading less wins)."""
    small = replace(SMALL_PROMPT, host_memory_bytes=limit_mib << 20)
    large = replace(SMALL_PROMPT, host_memory_bytes=limit_mib << 21)
    speeds = [solve(ask, FOUR_LAYERS, Format("bfloat16"), MACHINE).prediction.total_s for ask in (small, large)]
    assert speeds[1] <= speeds[0] * 1.05


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
