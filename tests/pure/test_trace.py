"""Traces and lanes' use, from timelines that the simulator made and from some made up."""

from __future__ import annotations

import json

import pytest

from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.occupancy import LaneUse, Occupancy
from penstock.graph.tasks import Call, Task, streamed_bytes
from penstock.graph.timeline import Span, Timeline, label, span
from penstock.graph.trace import Trace
from penstock.planner.solve import settle_context, solve
from penstock.planner.timelines import timelines
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.plan import Unit
from tests.calls import operands
from tests.pure.machine import LLAMA_1B, MACHINE
from tests.traces import check_events, spans, tracks

UNITS = (Unit("3.attn", 0, 4, "host", "host", "host"), Unit("7.ffn", 0, 12, "disk0", "host", "host"))


def task(*calls: tuple[str, int], lanes: tuple[str, ...] = ("host",), **others: int | str) -> Task:
    made = tuple(Call(operands(op, **others), unit, None, "*", 10, 5) for op, unit in calls)
    return Task(4, lanes, made, (), (), 10 * len(made), 5 * len(made), ())


@pytest.mark.parametrize(
    ("made", "name", "kind"),
    [
        (task(("load", 1), lanes=("disk0",)), "load 7.ffn[0:12]", "weight load"),
        (task(("fetch", -1), lanes=("disk0",)), "fetch", "weight load"),
        (task(("kv_load", -1), lanes=("disk0",), layer=5, ranges=2), "kv_load 5 2", "KV load"),
        (task(("kv_save", -1), lanes=("disk_write0",), layer=5, ranges=4), "kv_save 5 4", "KV save"),
        (task(("norm", -1), ("qkv", 0), ("attend", 0), ("out", 0)), "compute 3.attn[0:4]", "compute"),
        (task(("out", 0), ("merge", -1), ("ffn", 1)), "compute 3.attn[0:4] to 7.ffn[0:12]", "compute"),
        (task(("merge", -1), ("norm", -1)), "compute merge…norm", "compute"),
        (task(("predict", -1)), "compute predict", "compute"),
        (task(("copy", -1), lanes=("h2d0",), what="h"), "copy h", "activation copy"),
    ],
)
def test_names_and_kinds(made: Task, name: str, kind: str) -> None:
    found = span(made, UNITS, 1.0, 2.0)
    assert (found.label, found.kind, found.calls, found.bytes) == (name, kind, len(made.calls), made.bytes)
    assert "7" not in label(made) or name == "fetch"  # nothing is known of the units: numbers


def test_a_predicted_trace_has_every_task_and_byte() -> None:
    ask = settle_context(Ask(host_memory_bytes=1 << 30, context=256, prompt_tokens=40, output_tokens=5), LLAMA_1B)
    plan = solve(ask, LLAMA_1B, Format("bfloat16"), MACHINE).plan
    assert plan.ring_bytes
    trace = Trace("a title")
    events = list(trace.begin())
    for timeline, p in timelines(plan, ask, MACHINE, most_tokens=3):
        events += trace.add(timeline, p)
    assert json.loads(json.dumps(events)) == events
    check_events(events)
    assert set(tracks(events).values()) == {"passes", "host", "disk0"}
    assert [e["name"] for e in events if e.get("cat") == "pass"] == ["prefill 1", "decode 2", "decode 3", "decode 4"]
    lowering, tasks = Lowering(plan), []
    wanted = [*passes.prefill(plan, 0, 40, passes.DECODE)]
    for position in (40, 41, 42):
        wanted.append(passes.decode(plan, (0,), (position,), passes.DECODE if position < 42 else None))
    for p in wanted:
        tasks += lowering.step(p)
    shown = spans(events)
    assert sorted(event["args"]["task"] for event in shown) == sorted(each.id for each in tasks)
    loads = [event for event in shown if event["cat"] == "weight load"]
    assert sum(event["args"]["bytes"] for event in loads) == sum(streamed_bytes(task, plan.units) for task in tasks)
    assert all(event["name"].startswith("load ") for event in loads)
    assert trace.summary() == {"passes": 4, "tasks": len(tasks), "tasks_left_out": 0}


def made_up(start_s: float, end_s: float, lane: str = "disk0", kind: str = "weight load", number: int = 0) -> Span:
    return Span(number, (lane,), "a task", start_s, end_s, 100, kind)


def test_tasks_at_once_get_tracks_of_their_own() -> None:
    trace, events = Trace("t"), []
    events += trace.add(Timeline((made_up(0, 2), made_up(1, 3), made_up(2, 4), made_up(2.5, 4)), 0, 4), None)
    events += trace.add(Timeline((made_up(3.5, 6), made_up(4, 5)), 4, 6), None)
    events += trace.begin()
    check_events(events)
    names = tracks(events)
    assert set(names.values()) == {"passes", "disk0", "disk0 (2)", "disk0 (3)"}
    assert len(spans(events)) == 6
    rates = [event["args"]["GB/s"] for event in events if event["ph"] == "C"]
    assert len(rates) == 2


def test_a_trace_has_an_end() -> None:
    trace = Trace("t", most_spans=3)
    p = passes.decode(solve(Ask(), LLAMA_1B, Format("bfloat16"), MACHINE).plan, (0,), (5,), None)
    for i in range(3):
        list(trace.add(Timeline((made_up(i, i + 0.5), made_up(i + 0.5, i + 1)), i, i + 1), p))
    assert trace.summary() == {"passes": 3, "tasks": 3, "tasks_left_out": 3}
    assert not list(trace.add(Timeline((), 3, 4), p))


def test_what_lanes_did() -> None:
    found = Occupancy()
    spans = (made_up(0, 2), made_up(1, 4), made_up(6, 9), made_up(3, 5, "host", "compute"), made_up(8, 9, "x"))
    found.add(Timeline(spans[:2]))
    found.add(Timeline(spans[2:]))
    assert found.lanes(0, 10) == {"disk0": LaneUse(7, 300), "host": LaneUse(2, 100), "x": LaneUse(1, 100)}
    assert found.lanes(1, 7)["disk0"].busy_s == 4
    assert found.overlap_s(0, 10) == 1
    assert found.overlap_s(0, 3.5) == 0.5
    assert Occupancy().lanes(0, 1) == {} and Occupancy().overlap_s(0, 1) == 0
