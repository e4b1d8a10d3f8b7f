"""`penstock batch` of a checkpoint that has no packed copy: answers come first, and OUT is gone on with in any case."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StorageFailed
from penstock.serve import cached
from penstock.serve.batch.journal import Journal
from penstock.serve.engine import Engine
from penstock.store.pack import pack
from penstock.store.packing import Packing
from penstock.store.verify import verify
from tests.cpu.commands import Call, Outcome, here, machine_cache, refused, start
from tests.cpu.engines import load
from tests.cpu.test_batch import TALE, alone, answers, request, requests, texts, write
from tests.cpu.test_copy_beside import is_what_pack_writes

LINES = requests(30, seed=8)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(TALE, tmp_path / "tale-llama")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    target = tmp_path_factory.mktemp("alone") / "tale-llama"
    pack(TALE, target)
    with load(target, prompt_tokens=200, context=512) as engine:
        yield engine


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> Call:
    cache = machine_cache(tmp_path / "cache")
    write(tmp_path / "in", LINES)

    def batch(out: str, *more: object) -> Outcome:
        flags = ("--model", checkpoint, "--cache", cache, "--json", *more)
        return here(capsys, "batch", tmp_path / "in", tmp_path / out, *flags)

    return batch


def copies_of(tmp_path: Path) -> list[Path]:
    return [*(tmp_path / "cache/models").iterdir()] if (tmp_path / "cache/models").exists() else []


def never_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "pack", lambda *_, **__: pytest.fail("it is packed"))


def test_answers_come_before_the_copy(
    call: Call, checkpoint: Path, single: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_packs(monkeypatch)
    first = call("out")
    assert first.code == 0 and first.report["prompts"] == 30, first.err
    assert "when it is loaded" in first.err
    assert texts(tmp_path / "out") == {line["custom_id"]: alone(single, line) for line in LINES}
    is_what_pack_writes(checkpoint, tmp_path / "cache", tmp_path)
    again, new = call("out"), call("new")
    assert (again.report["resumed"], again.report["prompts"]) == (30, 0), again.err
    assert new.report["prompts"] == 30 and "when it is loaded" not in new.err
    assert texts(tmp_path / "new") == texts(tmp_path / "out")
    assert {each["id"] for each in answers(tmp_path / "new")} != {each["id"] for each in answers(tmp_path / "out")}


def test_the_end_waits_for_the_copy(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_it, end_it, waits = cached.Cached.write, Engine.end_copy, threading.Event()

    def slow(*arguments: Any) -> Path:
        assert waits.wait(60)
        return write_it(*arguments)

    def end(engine: Engine) -> None:
        waits.set()
        end_it(engine)

    monkeypatch.setattr(cached.Cached, "write", slow)
    monkeypatch.setattr(Engine, "end_copy", lambda engine, within_s=None: end(engine) if within_s is None else None)
    done = call("out")
    assert done.code == 0 and "what is left of the packed copy is being written" in done.err
    (copy,) = copies_of(tmp_path)
    verify(copy)


def test_a_first_use_that_was_ended_goes_on(
    call: Call, single: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice before there is a copy. All is as if it had not been ended."""
    never_packs(monkeypatch)
    add, write_it = Journal.add, Packing.write

    def full_at(most: int) -> None:
        def one(journal: Journal, *arguments: Any, **named: Any) -> None:
            if len(journal.done) >= most:
                raise StorageFailed("the disk is full")
            add(journal, *arguments, **named)

        monkeypatch.setattr(Journal, "add", one)

    monkeypatch.setattr(Packing, "write", fails)
    for most, before in ((7, 0), (19, 7)):
        full_at(most)
        assert call("out").report["error"] == {"type": "StorageFailed", "message": "the disk is full"}
        assert before < len(answers(tmp_path / "out")) == most and not copies_of(tmp_path)
    monkeypatch.setattr(Journal, "add", add)
    monkeypatch.setattr(Packing, "write", write_it)
    done = call("out")
    assert done.code == 0 and (done.report["resumed"], done.report["prompts"]) == (19, 11), done.err
    assert texts(tmp_path / "out") == {line["custom_id"]: alone(single, line) for line in LINES}
    (copy,) = copies_of(tmp_path)
    verify(copy)
    assert call("out").report["resumed"] == 30


def fails(*_: object, **__: object) -> None:
    raise OSError("no more of this disk")


def test_a_disk_without_room_for_a_copy(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never_packs(monkeypatch)
    monkeypatch.setattr(cached, "free_bytes", lambda _: 1000)
    first = call("out")
    assert first.code == 0 and "keeps no packed copy" in first.err and not copies_of(tmp_path)
    assert call("out").report["resumed"] == 30
    monkeypatch.undo()
    assert call("new").report["prompts"] == 30 and copies_of(tmp_path)
    assert call("out").report["resumed"] == 30  # the copy knows what it was made from


def test_answers_of_a_copy_that_is_gone(call: Call, checkpoint: Path, tmp_path: Path) -> None:
    """The checkpoint is packed again, and is then known to be the same, or another one."""
    assert call("before").code == call("out").code == 0  # the second one by the packed copy
    shutil.rmtree(tmp_path / "cache/models")
    gone = call("out")
    assert gone.code == 0 and gone.report["resumed"] == 30 and copies_of(tmp_path), gone.err
    shutil.rmtree(tmp_path / "cache/models")
    os.utime(checkpoint / "config.json")
    assert call("out").report["resumed"] == 30
    refused(call("before"), "no answer to a line")  # a first use's, of files that are others now for all that is known
    refused(call("out", "--kv", "int8"), "no answer to a line")


def test_weights_that_stream_are_packed_first(call: Call, single: Engine, tmp_path: Path) -> None:
    done = call("out", "--resident", "2MiB", "--batch", "5")
    assert done.code == 0 and "packs the checkpoint first" in done.err and done.report["bytes_moved"]["disk0"] > 0
    assert texts(tmp_path / "out") == {line["custom_id"]: alone(single, line) for line in LINES}
    assert call("out").report["resumed"] == 30


def test_a_copy_that_cannot_be_written_leaves_the_answers(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Packing, "write", fails)
    done = call("out")
    assert done.code == 0 and done.report["prompts"] == 30
    assert "the packed copy was not written" in done.err and "is being written" not in done.err


def test_ctrl_c_breaks_the_copy_off_too(checkpoint: Path, tmp_path: Path) -> None:
    write(tmp_path / "in", [request(i, prompt="a king", max_tokens=200, ignore_eos=True) for i in range(300)])
    flags = ("--model", checkpoint, "--cache", machine_cache(tmp_path / "cache"), "--batch", "2")
    process, out = start("batch", tmp_path / "in", tmp_path / "out", *flags), tmp_path / "out"
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s and not (out.exists() and out.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "of 300 lines are left" in err.decode()
    for copy in copies_of(tmp_path):
        if not copy.name.endswith(".partial"):
            verify(copy)
