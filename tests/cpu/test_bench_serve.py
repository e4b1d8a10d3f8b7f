"""The server's bench tells what it measured, whatever fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.clients import medians
from bench.report import Report, Stopped
from bench.serve import __main__ as bench
from bench.serve.models import Figures, in_turns, over
from bench.serve.soak import _left


def part(*yielded: Figures, then: BaseException | None = None) -> Callable[[], Iterator[Figures]]:
    def run() -> Iterator[Figures]:
        yield from yielded
        if then is not None:
            raise then

    return run


def test_a_part_that_fails_keeps_what_it_measured_and_those_after_it_run() -> None:
    found: dict[str, Figures] = {"streams": {}, "http": {}, "soak": {}}
    parts = {
        "streams": part({"streams_8_gain": 6.0}, then=SystemExit("a request failed: no")),
        "http": part(then=ValueError("nonsense")),
        "soak": part({"wrong_answers": 1}, {"wrong_answers": 0}),
    }
    report = Report()
    bench.run(parts, found, report)
    assert found == {"streams": {"streams_8_gain": 6.0}, "http": {}, "soak": {"wrong_answers": 0}}
    assert report.failed == {"streams": "SystemExit: a request failed: no", "http": "ValueError: nonsense"}


def test_what_stops_the_bench_stops_it() -> None:
    found: dict[str, Figures] = {"streams": {}, "soak": {}}
    with pytest.raises(Stopped):
        bench.run({"streams": part({"x": 1.0}, then=Stopped("SIGTERM")), "soak": part({"y": 1})}, found, Report())
    assert found == {"streams": {"x": 1.0}, "soak": {}}


def test_a_part_with_a_turn_that_failed_has_failed() -> None:
    found: dict[str, Figures] = {"http": {}}
    report = Report()
    rounds = [{"a": 1.0}, {"failed": {"a": "ValueError: no"}}]
    bench.run({"http": part({"a": 1.0, "by_round": rounds})}, found, report)
    assert found["http"]["a"] == 1.0 and "ValueError: no" in report.failed["http"]


def test_a_turn_that_fails_leaves_the_others_their_figures() -> None:
    def fails() -> float:
        raise SystemExit("the server ended")

    after = [{**figures} for figures in in_turns({"one": lambda: 2.0, "other": fails, "third": lambda: 3.0}, True)]
    figures = after[-1]
    assert after[0] == {"third": 3.0} and len(after) == 3
    assert figures == {"third": 3.0, "one": 2.0, "failed": {"other": "SystemExit: the server ended"}}
    assert over(figures, "third", "one") == 1.5 and over(figures, "one", "other") is None
    assert over(figures, "other", "one") is None


def test_a_turn_does_not_keep_a_bench_that_is_to_end() -> None:
    def stopped() -> float:
        raise Stopped("SIGTERM")

    with pytest.raises(Stopped):
        list(in_turns({"one": stopped, "other": lambda: 2.0}, False))


def test_medians_are_of_the_rounds_that_have_a_figure() -> None:
    rounds: list[Figures] = [{"a": 1.0, "b": None, "failed": {}}, {"a": 3.0, "b": None}, {"b": None}]
    assert medians(rounds) == {"a": 2.0, "b": None, "by_round": rounds}


@pytest.mark.parametrize("only", [["streams"], ["soak", "load"]])
def test_all_keys_come_where_there_is_no_model(
    only: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing.json")
    flags = ["--folder", str(tmp_path), "--large", missing, "--small", missing, "--only", *only]
    monkeypatch.setattr(sys, "argv", ["bench.serve", *flags])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert str(ended.value.code).startswith("failed: ")
    *_, whole, last = capsys.readouterr().out.splitlines()
    failed = json.loads(whole)["failed"]
    assert json.loads(last) == {**dict.fromkeys(bench.NAMES), "failed": failed}
    assert failed.keys() == set(only) < json.loads(whole).keys()
    assert all("missing.json" in str(why) for why in failed.values())


def test_pages_that_leak_are_counted_by_the_server() -> None:
    """Though every sequence was given back."""
    gauges = {"sequences_free": 8.0, "kv_pages_had": 3.0}
    server: Any = SimpleNamespace(gauge=gauges.__getitem__)
    assert _left(server, 8.0) == {"pages_leaked": 3, "sequences_leaked": 0}
    assert _left(server, 9.0)["sequences_leaked"] == 1
