"""A whole chat at a terminal, driven as by hands: a paste, Ctrl-C, /save and /load, a narrow window, a full context.

What the screen showed is kept in golden/chat_terminal.txt. Answers stand there as "…", for they may differ from one
processor to another, and figures as "#". `update=True` in `check_golden` writes the file.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cpu.commands import ROOT, apart, machine_cache, standing

pexpect = pytest.importorskip("pexpect", reason="pexpect drives a terminal")
pyte = pytest.importorskip("pyte", reason="pyte reads a terminal's codes")

GOLDEN = Path(__file__).parent / "golden" / "chat_terminal.txt"
MODEL = ROOT / "penstock/assets/tale-llama"
ROWS, COLUMNS, NARROW = 40, 80, 40
FLAGS = ("--temperature", "0", "--ignore-eos", "--context", "512", "--max-tokens", "20")
TURNS = ("Who are you?", "line one", "line two", "Go on.", "And then?")


class Chatting:
    """`penstock run` on a terminal of its own. `sections`: titles, and what the screen showed."""

    def __init__(self, folder: Path, cache: Path) -> None:
        # In the third answer, of 400 tokens, where it has not been ended before. 20 are the first two of.
        script = standing(cache, f"passes == 200 and not Path({str(cache / 'ended')!r}).exists()")
        arguments = ["run", str(MODEL), *FLAGS, "--cache", str(cache)]
        env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
        env["INPUTRC"] = "/dev/null"
        self.process = pexpect.spawn(
            str(script), arguments, dimensions=(ROWS, COLUMNS), env=env, cwd=str(folder), timeout=600
        )
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self._folder = str(folder)
        self.sections: list[str] = []

    def lines(self) -> list[str]:
        found = [line.rstrip() for line in self.screen.display]
        while found and not found[-1]:
            found.pop()
        return found

    def until(self, seen: Callable[[list[str]], bool], what: str) -> None:
        """Reads the terminal until its lines are as wanted."""
        end_s = time.monotonic() + 600
        while not seen(self.lines()):
            assert time.monotonic() < end_s, f"no {what}:\n" + "\n".join(self.lines())
            try:
                self._stream.feed(self.process.read_nonblocking(1 << 16, 0.1))
            except pexpect.TIMEOUT:
                continue

    def ready(self, note: str) -> None:
        """Waits for a note, and for the prompt below it."""
        self.until(lambda lines: bool(lines) and lines[-1] == ">" and note in flowing(lines), note)

    def say(self, text: str, note: str) -> None:
        """Types a line on an empty screen."""
        self.clear()
        self.process.send(f"{text}\r")
        self.ready(note)

    def clear(self) -> None:
        self.screen.reset()
        self._stream.feed(b"> ")  # which readline believes to stand there

    def keep(self, title: str) -> None:
        self.sections.append("\n".join([f"=== {title}", *masked(self.lines(), self._folder)]))


def flowing(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)


def as_typed(line: str) -> str:
    """A line of the screen without the column by which what is typed before readline has drawn its prompt is off."""
    return re.sub(r"^> +", "> ", line)


def masked(lines: list[str], folder: str) -> list[str]:
    """A screen as the golden has it: what the user and penstock said, figures masked, answers as one line."""
    kept, ours = list[str](), False
    for line in lines:
        line = as_typed(line)
        if line.startswith(("> ", "penstock: ")) or line == ">" or line in TURNS:
            ours = line.startswith("penstock: ")
        elif not (ours and line.startswith("  ")):  # which a note goes on with
            ours = False
            if kept and kept[-1] != "…":
                kept.append("…")
            continue
        line = line.replace(folder, "FOLDER")
        figures = r"\d[\d.]*( µs| ms| s)?" if "tok/s" in line or "word" in line else r"(?<![\w/])\d+"
        kept.append(re.sub(figures, "#", line) if line.startswith(("penstock", "  ")) else line)
    return kept


@pytest.fixture
def folder() -> Iterator[Path]:
    """Its name is always as long, so that lines with it break at the same place."""
    with tempfile.TemporaryDirectory(prefix="chat-", dir="/tmp") as name:
        yield Path(name)


def test_a_whole_session(folder: Path, tmp_path: Path) -> None:
    cache = machine_cache(tmp_path / "cache")
    done = apart("run", MODEL, "once", "--max-tokens", "1", "--cache", cache)  # which packs it
    assert done.code == 0, done
    chat = Chatting(folder, cache)
    try:
        chat.ready("has no chat template")
        chat.keep("it begins")
        chat.say(TURNS[0], "tok/s")
        chat.keep("a turn")

        chat.clear()
        chat.process.send("\033[200~line one\nline two\033[201~")
        chat.until(lambda lines: "line two" in lines[-1], "paste")
        chat.process.send("\r")
        chat.ready("tok/s")
        chat.keep("two lines that are pasted are one turn")

        chat.say("/set max_tokens 400", "/set")
        chat.process.send("Go on.\r")
        chat.until(lambda lines: len(lines) > 3, "answer")
        chat.process.sendintr()
        chat.ready("the answer was ended")
        (cache / "ended").touch()
        chat.keep("Ctrl-C ends an answer")

        chat.clear()
        chat.process.send("half a line")
        chat.until(lambda lines: as_typed(lines[-1]) == "> half a line", "half a line")
        chat.process.sendintr()
        chat.ready("half a line")  # it is left, and the chat goes on

        chat.say("/set max_tokens 20", "/set")
        chat.say("And then?", "tok/s")
        chat.say("/last", "tokens of answer")
        read = re.search(r"(\d+) tokens of prompt, of which (\d+) were there", flowing(chat.lines()))
        assert read is not None and int(read[1]) - int(read[2]) < 20, chat.lines()  # nothing is read again
        chat.keep("the figures of the last answer")

        chat.say("/save chat.json", "messages are")
        chat.keep("a conversation is saved")
        said = json.loads((folder / "chat.json").read_text())["messages"]
        assert [m["content"] for m in said[::2]] == [TURNS[0], "line one\nline two", "Go on.", "And then?"]

        chat.screen.resize(ROWS, NARROW)
        chat.process.setwinsize(ROWS, NARROW)
        chat.say("/help", "stands")
        assert max(map(len, chat.lines())) <= NARROW
        chat.keep("a narrow window")
        chat.say("/new", "/new")
        chat.say("/load chat.json", "goes on with")
        chat.say("And then?", "tok/s")
        chat.keep("it goes on with what was loaded")
        chat.say("/set max_tokens 60", "/set")
        fill(chat)
        chat.process.send("/bye\r")
        chat.process.expect(pexpect.EOF)
        chat.process.close()
        assert chat.process.exitstatus == 0
    finally:
        chat.process.close(force=True)
    check_golden("\n\n".join(chat.sections) + "\n")


def fill(chat: Chatting) -> None:
    """Turns until the context is full: then the oldest leave, down to half at once, so that the next turn is told
    nothing."""
    for _ in range(12):
        chat.say("And then?", "tok/s")
        if "is full" in flowing(chat.lines()):
            break
    chat.keep("the context is full")
    chat.say("And then?", "tok/s")
    chat.keep("the turn after that")


def check_golden(text: str, update: bool = False) -> None:
    if update:
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
