"""The live line: it comes, it tells, and it never changes a character of the answer."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli import live
from penstock.cli.streaming import _CONTROLS
from penstock.cli.wrapping import Wrapping
from penstock.graph import passes
from penstock.graph.timeline import Timeline
from penstock.spec.format import Format
from tests.cpu.commands import here
from tests.cpu.terminal import Screen, run_on_terminal
from tests.plans import resident_plan
from tests.pure.machine import model as spec

PLAN = resident_plan(spec(), Format("float32"), chunk_rows=8)
ROWS, COLUMNS = 7, 60
FLAGS = ("--raw", "--ignore-eos", "--max-tokens", "150", "--resident", "0", "--context", "256")

# The command as it is, with a line from the first moment on.
IMPATIENT = (
    "import sys, penstock.cli.live as live; from penstock.cli.main import main; "
    "live._FIRST_S = live._EVERY_S = 0.002; sys.exit(main(sys.argv[1:]))"
)
# Words as a model streams them, some ending at the margin, more lines than the screen has.
STREAM = """
import sys, time
from types import SimpleNamespace
import penstock.cli.live as live
live._FIRST_S = live._EVERY_S = 0.001
session = SimpleNamespace(reader=SimpleNamespace(bytes_read=5), watchers=[])
engine = SimpleNamespace(session=session)
text = sys.argv[1]
with live.live(engine, lambda: (3, 0.0), streams=True) as shown:
    while not shown._on_screen:
        time.sleep(0.001)
    for at in range(0, len(text), 3):
        shown.write(text[at : at + 3])
        time.sleep(0.002)
print(flush=True)
print("the end", file=sys.stderr)
"""


def laid_out(text: str, rows: int = ROWS, columns: int = COLUMNS) -> list[str]:
    """What a terminal shows of an answer."""
    screen = Screen(rows, columns)
    screen.feed(Wrapping().push(text, columns).replace("\n", "\r\n"))
    return screen.lines()


class Seen:
    """Lines that stood below the cursor at some time."""

    def __init__(self) -> None:
        self.lines: set[str] = set()

    def __call__(self, screen: Screen) -> None:
        self.lines |= {"".join(row).rstrip() for row in screen.cells[screen.row :]}


TEXTS = {
    "words": "once upon a time there was a pump " * 20,
    "a full line": "x" * COLUMNS * 4 + "\n" + "y" * (COLUMNS - 1) + "\n\n\n" + "z" * COLUMNS + "\n" + "end",
    "lines": "\n".join("line " * (i % 13) for i in range(40)),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_the_text_stays_as_it_is(text: str) -> None:
    seen = Seen()
    code, screen, _ = run_on_terminal([sys.executable, "-c", STREAM, text], ROWS, COLUMNS, True, seen)
    assert code == 0
    assert screen.lines() == laid_out(f"{text}\nthe end\n")
    shown = "".join(f"{line} " for line in screen.lines()).split()
    assert text.startswith("x") or shown == f"{text}\nthe end".split()  # no word is broken
    assert any("reading the prompt: 0 of 3 tokens, 0%" in line for line in seen.lines)


def arguments(model: Path, cache: Path, *more: object) -> list[str]:
    args = map(str, ("run", model, "ab" * 40, "--cache", cache, *FLAGS, *more))
    return [sys.executable, "-c", IMPATIENT, *args]


def plain_text(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return here(capsys, "run", model, "ab" * 40, "--cache", cache, *FLAGS).out


def test_a_run_on_a_terminal(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = Seen()
    code, screen, _ = run_on_terminal(arguments(model, cache), ROWS, COLUMNS, True, seen)
    found = screen.lines()
    assert code == 0
    at = next(i for i, line in enumerate(found) if "tok/s (promised" in line)
    shown = plain_text(model, cache, capsys)
    assert found[:at] == laid_out(shown.translate(_CONTROLS))
    assert any("tokens, " in line and "tok/s, disk" in line for line in seen.lines), seen.lines


def test_only_stderr_is_a_terminal(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line has its own place, and the text is what it is without one."""
    seen = Seen()
    code, screen, out = run_on_terminal(arguments(model, cache), ROWS, 100, False, seen)
    assert code == 0 and out == plain_text(model, cache, capsys)
    assert any(line.endswith("GB/s") and " tokens, " in line for line in seen.lines), seen.lines
    assert screen.lines()[0].startswith("penstock: ")


def test_a_batch_shows_it_all_the_time(model: Path, cache: Path) -> None:
    seen = Seen()
    code, screen, _ = run_on_terminal(arguments(model, cache, "--batch", "3"), 40, 100, True, seen)
    assert code == 0
    assert any(" tokens, " in line for line in seen.lines), seen.lines
    assert not any(line.startswith(("reading the prompt", "1 tokens")) for line in screen.lines())


def test_json_has_none(model: Path, cache: Path) -> None:
    code, screen, out = run_on_terminal(arguments(model, cache, "--json"), ROWS, 100, False, lambda _: None)
    assert code == 0 and out.startswith("{") and screen.lines() == []


def test_what_it_says() -> None:
    clock, reads = [0.0], [100]
    progress = live.Progress(20, lambda: reads[0], lambda: clock[0])
    assert progress.line()[1:] == " reading the prompt: 0 of 20 tokens, 0%"
    for p in passes.prefill(PLAN, 0, 20, passes.DECODE):
        clock[0] += 1.0
        reads[0] += 10**9
        progress.watch(Timeline(()), p)
        if clock[0] < 3:
            done = 8 * int(clock[0])
            line = progress.line()[1:]
            assert line.startswith(f" reading the prompt: {done} of 20 tokens, {done / 20:.0%}, 8.00 tok/s, ")
            assert line.endswith(" left, disk 1.00 GB/s")
    assert progress.line() == "0 tokens, disk 1.00 GB/s"
    for i in range(4):
        clock[0] += 0.05
        progress.watch(Timeline(()), passes.decode(PLAN, (0,), (20 + i,), None))
    assert progress.line().startswith("4 tokens, 20.0 tok/s, disk ")
    progress.watch(Timeline(()), None)
    clock[0] += 60
    progress.line()
    clock[0] += 1
    assert progress.line() == "4 tokens, 0.07 tok/s"


def test_between_passes_the_count_goes_on() -> None:
    """By what was foretold, then by what was measured, and never to the end."""
    clock = [0.0]
    progress = live.Progress(20, lambda: 0, lambda: clock[0], foretold_s=10.0)
    clock[0] = 5.0
    assert " reading the prompt: 10 of 20 tokens, 50%, 2.00 tok/s, " in progress.line()
    clock[0] = 50.0
    assert " 19 of 20 tokens, 95%" in progress.line()
    progress.watch(Timeline(()), next(iter(passes.prefill(PLAN, 0, 20, passes.DECODE))))
    assert " 8 of 20 tokens, 40%, 0.16 tok/s" in progress.line()
    assert progress.line()[0] != progress.line()[0]  # it turns


def test_columns() -> None:
    ten, eleven = "a" * 10, "a" * 11
    for text, column in [("abc", 3), ("a\n", 0), ("\t", 8), (ten, 10), (eleven, 1), ("日本", 4), ("e\u0301", 1)]:
        wrapping = Wrapping()
        assert wrapping.push(text, 10).replace("\n", "") == text.replace("\n", "") and wrapping.column == column
    assert Wrapping().push("ab cdef ghijk", 10) == "ab cdef g\b\033[K\nghijk"
    assert Wrapping().push("ab cdef  ghijk", 9) == "ab cdef \nghijk"
    assert Wrapping().push("日本 日本語", 10) == "日本 日本\b\b\b\b\033[K\n日本語"


# What terminals make of characters: some give U+FE0F's heart a second column, join families and skin tones to one
# picture, and draw vowel signs into the letter before; others do nothing of it.
def plainly(before: str, character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def with_pictures(before: str, character: str) -> int:
    if before == "\u200d" or "\U0001f3fb" <= character <= "\U0001f3ff" or unicodedata.category(character) == "Mc":
        return 0
    return 1 if character == "\ufe0f" else plainly(before, character)


MARKED = {
    "hearts": "Great idea, and well done \u2764\ufe0f\u2764\ufe0f\u2764\ufe0f\u2764\ufe0f\u2764\ufe0f! We loved it. ",
    "Hindi": "हिन्दी में लिखी हुई कहानियाँ ",
    "Thai": "ที่นี่ มีปุ่ม อยู่ที่นั่น ",
    "a family": "They are \U0001f468\u200d\U0001f469\u200d\U0001f467 and \U0001f44d\U0001f3fd of course. Thank you! ",
    "accents": "une e\u0301te\u0301 tre\u0300s agre\u0301able, déjà vue ",
}  # fmt: skip


@pytest.mark.parametrize("width", [plainly, with_pictures])
@pytest.mark.parametrize("text", MARKED.values(), ids=MARKED.keys())
def test_marks_and_joiners_erase_nothing(text: str, width: Callable[[str, str], int]) -> None:
    text *= 4
    for columns in range(20, 62):
        screen, wrapping = Screen(40, columns, width), Wrapping()
        for at in range(0, len(text), 3):
            screen.feed(wrapping.push(text[at : at + 3], columns).replace("\n", "\r\n"))
        assert "".join("".join(screen.lines()).split()) == "".join(text.split()), columns


def test_a_word_is_kept_no_longer_than_it_may_be_erased() -> None:
    """Else each character of a text without spaces takes as long as the text is."""
    wrapping = Wrapping()
    for text in ("\u65e5" * 5000, "e" + "\u0301" * 5000):
        wrapping.push(f"\n{text}", 40)
        assert wrapping._word is None
    wrapping.push(" and", 40)
    assert wrapping._word == "and"
    assert "\b" not in wrapping.push("\n" + "x" * 25, 40) + wrapping.push("x" * 80, 100)  # a window that is widened


def test_nothing_where_nobody_looks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine: Any = SimpleNamespace()  # not even looked at
    with live.live(engine, lambda: (1, 0.0), streams=True) as shown:
        shown.write("text")
    assert capsys.readouterr() == ("text", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    with live.live(engine, lambda: (1, 0.0), streams=True) as shown:
        shown.write("text")
    assert capsys.readouterr() == ("text", "")
