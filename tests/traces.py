"""What every trace must be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

SLACK_US = 1e-3  # of rounding


def read_trace(file: Path) -> list[dict[str, Any]]:
    """The events of a trace that is whole and well-formed."""
    data = json.loads(file.read_text(encoding="utf-8"))
    assert set(data) == {"displayTimeUnit", "traceEvents", "otherData"}
    check_events(data["traceEvents"])
    tasks = {event["args"]["task"] for event in spans(data["traceEvents"])}
    assert (data["otherData"]["tasks"], data["otherData"]["tasks_left_out"]) == (len(tasks), 0)
    return data["traceEvents"]


def check_events(events: Sequence[dict[str, Any]]) -> None:
    """Tracks have names, and events of one track do not overlap."""
    names = tracks(events)
    assert len(set(names.values())) == len(names)
    assert {event["ph"] for event in events} <= {"M", "X", "C"}
    complete = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    for track in names:
        on_it = [event for event in complete if event["tid"] == track]
        assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in on_it)
        assert all(a["ts"] + a["dur"] <= b["ts"] + SLACK_US for a, b in pairwise(on_it))
    assert {event["tid"] for event in complete} <= set(names)


def spans(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of tasks, without the passes."""
    return [event for event in events if event["ph"] == "X" and event["cat"] != "pass"]


def tracks(events: Sequence[dict[str, Any]]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
