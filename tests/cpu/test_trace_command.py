"""`--trace`: every task and byte of a run is in it, and no half of it is ever left on disk."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadRequest
from penstock.graph.tasks import Pass, Task
from penstock.graph.timeline import Timeline
from penstock.graph.trace import BEGINS
from penstock.serve.trace_file import TraceFile
from penstock.store.packed import open_packed
from tests.cpu.commands import Call, here, refused, standing, start
from tests.cpu.engines import GREEDY, load, streaming
from tests.traces import read_trace, spans, tracks

FLAGS = ("--raw", "--ignore-eos", "--max-tokens", "6", "--resident", "0")
OLDER = BEGINS + "]}"
ROWS_APART = [0, 64, 128, 192, 256]  # embedding rows of different granules, so that none shares a read


@pytest.mark.parametrize("ring", [3, 40])
def test_nothing_is_lost_between_passes(model: Path, tmp_path: Path, ring: int) -> None:
    """Loads that end after their pass are in the next timeline or in the last, however far ahead they run."""
    plan = streaming(open_packed(model), ring=ring)
    with load(model, plan) as engine:
        lowered: list[Task] = []
        told: list[tuple[Timeline, Pass | None]] = []
        step = engine.session.lowering.step

        def noting(p: Pass, *answer: Any) -> Any:
            for task in step(p, *answer):
                lowered.append(task)
                yield task

        engine.session.lowering.step = noting  # type: ignore[method-assign]
        engine.session.watchers.append(lambda timeline, p: told.append((timeline, p)))
        read_bytes = engine.session.reader.bytes_read
        with TraceFile(tmp_path / "trace.json", "a run") as trace:
            engine.session.watchers.append(trace.add)
            for _ in range(2):
                engine.generate([ROWS_APART], GREEDY)
        read_bytes = engine.session.reader.bytes_read - read_bytes
    ended = [span for timeline, _ in told for span in timeline.spans]
    assert sorted(span.task for span in ended) == [task.id for task in sorted(lowered)]
    assert sum(span.bytes for span in ended if span.kind == "weight load") == read_bytes > 0
    events = read_trace(tmp_path / "trace.json")
    shown = spans(events)
    assert len(shown) == len(lowered)
    assert sum(event["args"]["bytes"] for event in shown if event["cat"] == "weight load") == read_bytes
    for timeline, p in told:  # what computes is in its own pass
        for span in timeline.spans:
            if p is not None and span.kind == "compute":
                assert timeline.start_s <= span.start_s <= span.end_s <= timeline.end_s


def test_a_run_with_a_trace(model: Path, tmp_path: Path, call: Call) -> None:
    file = tmp_path / "run.json"
    file.write_text(OLDER)
    plain = call("run", model, "a", *FLAGS)
    traced = call("run", model, "a", *FLAGS, "--trace", file)
    assert traced.code == 0 and traced.report["token_ids"] == plain.report["token_ids"]
    events = read_trace(file)
    assert set(tracks(events).values()) == {"passes", "host", "disk0"}
    loads = [event for event in spans(events) if event["cat"] == "weight load"]
    assert sum(event["args"]["bytes"] for event in loads) == traced.report["bytes_moved"]["disk0"]
    assert any(event["name"].startswith("load 1.ffn[") for event in loads)
    assert any(event["name"].startswith("compute 0.attn[") for event in spans(events))
    assert len([event for event in events if event.get("cat") == "pass"]) == 6
    assert list(tmp_path.iterdir()) == [file]


def test_a_plan_with_a_trace(model: Path, tmp_path: Path, call: Call) -> None:
    done = call("plan", model, "--resident", "0", "--output-tokens", "4", "--trace", tmp_path / "plan.json")
    assert done.code == 0 and done.report["predicted"]
    events = read_trace(tmp_path / "plan.json")
    assert [e["name"] for e in events if e.get("cat") == "pass"] == ["prefill 1", "decode 2", "decode 3", "decode 4"]


@pytest.mark.parametrize("command", ["run", "plan", "bench"])
def test_traces_that_cannot_be_written(command: str, tmp_path: Path, call: Call) -> None:
    """Said before anything else: the model is not even looked for."""
    (tmp_path / "file").write_text("")
    text = ("x",) if command == "run" else ()
    for name, says in [
        (tmp_path, "is not a file"),
        (tmp_path / "none" / "x.json", "No such file"),
        (tmp_path / "file" / "x.json", "Not a directory"),
        ("", "is not a file"),
        ("/dev/null", "is not a file"),
    ]:
        refused(call(command, tmp_path / "no-model", *text, "--trace", name), says, "BadRequest")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failure_leaves_the_older_trace(model: Path, tmp_path: Path, call: Call) -> None:
    file = tmp_path / "run.json"
    file.write_text(OLDER)
    refused(call("run", model, "ab", "--host-memory", "1MiB", "--trace", file), kind="DoesNotFit")
    assert file.read_text() == OLDER and list(tmp_path.iterdir()) == [file]


def test_ctrl_c_leaves_what_was_done(
    model: Path, tmp_path: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    args = ("run", model, "ab", "--raw", "--ignore-eos", "--max-tokens", "200", "--cache", cache, "--resident", "0")
    script = standing(tmp_path_factory.mktemp("script"), "passes == 100")
    child = start(*args, "--trace", tmp_path / "trace.json", script=script)
    assert child.stdout is not None and child.stdout.read(3)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=600)
    assert (child.returncode, err.splitlines()[-1]) == (130, b"penstock: stopped")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert [e["name"] for e in read_trace(tmp_path / "trace.json") if e.get("cat") == "pass"][:2] == [
        "prefill 1", "decode 2",
    ]  # fmt: skip


def test_ctrl_c_before_the_first_pass_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(OLDER)
    with pytest.raises(KeyboardInterrupt), TraceFile(tmp_path / "t.json", "t"):
        raise KeyboardInterrupt
    assert (tmp_path / "t.json").read_text() == OLDER and len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_fills_up_does_not_stop_the_answer(
    model: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: TraceFile, text: str) -> None:
        self._failed = OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TraceFile, "_write", full)
    done = here(capsys, "run", model, "a", *FLAGS, "--cache", cache, "--trace", tmp_path / "t.json")
    assert done.code == 2 and done.out
    assert done.err.splitlines()[-1].endswith("t.json cannot be written: No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(BadRequest, match="No such file"), TraceFile(folder / "t.json", "t"):
        next(folder.iterdir()).unlink()
        folder.rmdir()
