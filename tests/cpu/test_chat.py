"""The chat of `penstock run`: turns, commands, Ctrl-C, and what leaves when the context is full."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli import chat as chats
from penstock.cli.chat import Chat, turns
from penstock.cli.options import Sampling
from penstock.errors import BadRequest
from tests.cpu.commands import ROOT, machine_cache, standing

ANSWER = {
    "text": "answer", "decode_tokens_per_s": 1.0, "ttft_s": 1.0, "batch_ttft_s": 1.0, "disk_bytes_per_token": 1e9,
    "batch": 1, "prompt_tokens": 3, "output_tokens": 2, "context_full": False, "cached_tokens": 0, "token_ids": [0] * 6,
}  # fmt: skip


class Stub:
    """An engine that answers with what it was asked. A message has as many ids as characters. A turn of `!` is refused,
    and Ctrl-C comes in the middle of the answer to `stop`."""

    prediction = SimpleNamespace(decode_tokens_per_s=2.0, ttft_s=0.5, bound_by="disk0")

    def __init__(self, has_template: bool = True, context: int = 1000) -> None:
        self.tokenizer = SimpleNamespace(
            has_chat_template=has_template, chat=self._chat, encode=self._encode,
            decode=lambda ids, **_: "", writing=None,
            thinks=False, marks={}, eos_ids=frozenset(),
        )  # fmt: skip
        self.last: Any = None
        self.plan = SimpleNamespace(context=context, chunk_rows=512)
        self.asked: list[list[dict[str, str]]] = []

    def renew(self) -> None:
        """Nothing is known of today."""

    def _chat(self, messages: list[dict[str, str]], tools: Any = None) -> str:
        self.messages = [dict(message) for message in messages]
        return "".join(message["content"] for message in messages)

    def _encode(self, text: str, add_special: bool = True) -> list[int]:
        return [0] * len(text)

    def holds(self, ids: list[int]) -> int:
        return len(ids) - 1

    def stream(self, ids: list[int], params: Any) -> Iterator[str]:
        if self.messages[-1]["content"] == "!":
            raise BadRequest("too long")
        self.asked.append(self.messages)
        self.params = params
        yield "an"
        if self.messages[-1]["content"] == "stop":
            raise KeyboardInterrupt
        yield "swer"
        self.last = SimpleNamespace(**ANSWER)


def said(engine: Stub, *lines: str, system: str | None = None, **sampling: Any) -> list[list[str]]:
    """What the model is asked, turn by turn, where the user types these lines."""
    Chat(engine, Sampling(**sampling).params({}), system).run(iter(lines))  # type: ignore[arg-type]
    return [[message["content"] for message in messages] for messages in engine.asked]


def test_it_remembers_and_forgets(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(Stub(), "one", "", "!", "two", "/new", "three") == [["one"], ["one", "answer", "two"], ["three"]]
    out, err = capsys.readouterr()
    assert out == "answer\n" * 3
    assert "too long" in err
    assert "1.00 tok/s (promised 2.00) · first word 1.00 s · disk 1.00 GB/s" in err


def test_without_a_template_it_stops_at_the_next_turn(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Stub(has_template=False)
    said(engine, "one", stop=["x"])
    assert engine.params.stop == ("x", "\nUser:")
    assert "no chat template" in capsys.readouterr().err


def test_what_it_is_told_before_stays(capsys: pytest.CaptureFixture[str]) -> None:
    asked = said(Stub(), "one", "/new", "two", "/system be brief", "three", "/system", "four", system="rhyme")
    assert asked == [["rhyme", "one"], ["rhyme", "two"], ["be brief", "three"], ["four"]]


def test_all_figures_of_the_last_answer(capsys: pytest.CaptureFixture[str]) -> None:
    said(Stub(), "/last", "one", "/last")
    err = capsys.readouterr().err.splitlines()
    assert "there is no answer yet" in err[0]
    assert [line.removeprefix("penstock: ") for line in err[2:]] == [
        "1.00 tok/s (promised 2.00)",
        "first word 1.00 s",
        "disk 1.00 GB/s",
        "3 tokens of prompt, of which 0 were there",
        "2 tokens of answer",
    ]


def test_retry_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Stub()
    wrong = ("/set nothing 1", "/set top_p x", "/set top_p 2", "/nope")
    asked = said(engine, "/retry", "one", "/set temperature 0.7", "/retry", *wrong, "/a/path is no command")
    assert asked == [["one"], ["one"], ["one", "answer", "/a/path is no command"]]
    assert engine.params.temperature == 0.7 and engine.params.top_p == 1.0
    err = capsys.readouterr().err
    expected = (
        "no answer yet",
        "there are max_tokens, temperature",
        "should be a number",
        "top_p is 2",
        "no /nope: /h",
    )
    for text in expected:
        assert text in err, text


def test_set_tells_what_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    said(Stub(), "/set temperature 0.7", "/set temperature", "/set seed", "/set logprobs 3", "/set")
    told = [line.removeprefix("penstock: ") for line in capsys.readouterr().err.splitlines()]
    assert told[:3] == ["temperature 0.7", "temperature 0.7", "seed is not set"]
    assert told[3].startswith("/set logprobs: there are max_tokens, ")
    assert "temperature 0.7" in told[4:] and "top_p 1.0" in told[4:]


def test_an_error_of_a_command_is_not_the_conversations(capsys: pytest.CaptureFixture[str]) -> None:
    said(Stub(), "/save", "/load", "/nope", "!")
    err = capsys.readouterr().err
    assert "/save wants a file: /save chat.json\n" in err and "/load wants a file: /load chat.json\n" in err
    assert "/help lists what there is\n" in err and "too long (/new starts over)\n" in err


def test_ctrl_c_ends_the_answer_and_not_the_chat(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(Stub(), "stop", "two") == [["stop"], ["stop", "an", "two"]]
    assert "the answer was ended" in capsys.readouterr().err


def test_bye_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(Stub(), "/help", "/bye", "one") == []
    err = capsys.readouterr().err
    for name in ("/help", "/bye", "/new", "/system", "/retry", "/set", "/save", "/load", "/plan", "/last"):
        assert f"penstock: {name}  " in err


def test_the_oldest_turns_leave_a_full_context(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 100 tokens 20 are wanted for an answer: a conversation of 83 is cut to at most 50, and what it was told
    before stays."""
    lines = ["a" * 16, "b" * 16, "c" * 16, "d" * 16]
    asked = said(Stub(context=100), *lines, system="s", max_tokens=20)
    assert asked[-2] == ["s", lines[0], "answer", lines[1], "answer", lines[2]]
    assert asked[-1] == ["s", lines[2], "answer", lines[3]]
    assert "the context of 100 tokens is full: the 2 oldest turns were left out" in capsys.readouterr().err


def test_saved_and_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "talk.json"
    said(Stub(), "one", f"/save {file}", f"/save {file}")
    assert said(Stub(), f"/load {file}", "two") == [["one", "answer", "two"]]
    other = tmp_path / "notes"
    other.write_text("mine")
    said(Stub(), "one", f"/save {other}", f"/save {tmp_path}", f"/save {tmp_path}/no/such", "/save")
    assert other.read_text() == "mine" and "holds something else" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    bad = [[], {"messages": 1}, {"messages": [1]}, {"messages": [{"role": "tool", "content": "a"}]},
           {"messages": [{"role": "user", "content": 1}]}, {"messages": [{"role": "user"}]}]  # fmt: skip
    for content in bad:
        other.write_text(json.dumps(content))
        assert said(Stub(), f"/load {other}", "one") == [["one"]], content
    assert said(Stub(), f"/load {tmp_path}/pipe", "/load /nowhere", "/load", "one") == [["one"]]


def test_several_lines_between_quotes_are_one_turn() -> None:
    lines = ['"""one', "", "two", 'three"""', "four", '"""five"""', '"""', "six", '"""', '"""never', "ended"]
    assert list(turns(iter(lines))) == ["one\n\ntwo\nthree", "four", "five", "six"]


def read_until(terminal: int, wanted: bytes, seconds: float = 600.0) -> bytes:
    """What comes from a terminal, up to some text."""
    found, until_s = b"", time.monotonic() + seconds
    while wanted not in found:
        assert time.monotonic() < until_s, found
        with suppress(OSError):
            found += os.read(terminal, 65536)
    return found


def test_a_whole_chat_at_a_terminal(tmp_path: Path) -> None:
    """A turn, Ctrl-C in an answer, a command, and the end; what was typed is there in the next chat."""
    cache = machine_cache(tmp_path / "cache")
    script, model = standing(tmp_path, "passes == 100"), ROOT / "penstock/assets/tale-llama"
    args = (script, "run", model, "--cache", cache, "--max-tokens", "100000", "--ignore-eos")
    for _ in range(2):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [*map(str, args)], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            close_fds=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        os.close(theirs)
        try:
            read_until(ours, b"> ")
            os.write(ours, b"Once upon a time\n")
            read_until(ours, b"tokens,")  # the line beneath an answer that has come for half a second
            process.send_signal(signal.SIGINT)
            read_until(ours, b"the answer was ended")
            os.write(ours, b"/plan\n")
            read_until(ours, b"predicted:")
            os.write(ours, b"/bye\n")
            assert process.wait(600) == 0
        finally:
            process.kill()
            os.close(ours)
    kept = cache / "chat_history"
    assert kept.read_text().count("Once upon a time") >= 2 and kept.stat().st_mode & 0o077 == 0
    assert chats._HISTORY_LINES >= 100
