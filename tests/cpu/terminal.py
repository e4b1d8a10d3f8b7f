"""A terminal in memory: as much of one as the live line uses, and a screen that tests can read."""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable

_CODES = re.compile(r"\x1b(?:\[([0-9;]*)([A-Za-z])|([78DM]))")


class Screen:
    """`scrolled`: rows that left it at the top. The cursor hangs behind the last column until the next character.
    `width`: (the character before, a character) → the columns that this one takes; one where nothing is given."""

    def __init__(self, rows: int, columns: int, width: Callable[[str, str], int] = lambda before, character: 1) -> None:
        self.rows, self.columns = rows, columns
        self._width, self._before = width, ""
        self.cells = [[" "] * columns for _ in range(rows)]
        self.scrolled: list[str] = []
        self.row = self.column = 0
        self._saved = (0, 0)

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            code = _CODES.match(text, at)
            if code is not None:
                self._do(code[1] or "", code[2] or code[3])
                at = code.end()
                continue
            assert text[at] != "\x1b", f"an unknown code: {text[at : at + 10]!r}"
            self._put(text[at])
            at += 1

    def lines(self) -> list[str]:
        """All that was ever written and not erased, without what is empty at the end."""
        found = [*self.scrolled, *("".join(row).rstrip() for row in self.cells)]
        while found and not found[-1]:
            found.pop()
        return found

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\b":
            assert self.column < self.columns, "back while the cursor hangs: terminals differ there"
            self.column = max(0, self.column - 1)
        elif character == "\n":
            self._down()
        else:
            width = self._width(self._before, character)
            if self.column + width > self.columns:
                self.column = 0
                self._down()
            if width:
                self.cells[self.row][self.column : self.column + width] = [character, *[""] * (width - 1)]
            else:
                assert self.column > 0, "a mark without a character"
                self.cells[self.row][self.column - 1] += character
            self.column += width
        self._before = character

    def _down(self) -> None:
        if self.row + 1 < self.rows:
            self.row += 1
            return
        self.scrolled.append("".join(self.cells.pop(0)).rstrip())
        self.cells.append([" "] * self.columns)

    def _do(self, number: str, letter: str) -> None:
        assert letter in "78DM" or number == "", (number, letter)
        assert letter == "K" or self.column < self.columns, "a code while the cursor hangs: terminals differ there"
        if letter == "7":
            self._saved = (self.row, self.column)
        elif letter == "8":
            self.row, self.column = self._saved
        elif letter == "D":
            self._down()
        elif letter == "M":
            assert self.row > 0
            self.row -= 1
        elif letter == "B":
            self.row = min(self.rows - 1, self.row + 1)
        elif letter in "JK":
            self.cells[self.row][self.column :] = [" "] * (self.columns - self.column)
            if letter == "J":
                for row in range(self.row + 1, self.rows):
                    self.cells[row] = [" "] * self.columns
        else:
            raise AssertionError(f"an unknown code: {number}{letter}")


def run_on_terminal(
    command: list[str], rows: int, columns: int, stdout_too: bool, look: Callable[[Screen], None]
) -> tuple[int, Screen, str]:
    """(exit code, the screen at the end, stdout where it is no terminal). `look` sees the screen whenever something is
    about to be erased or written over, however much came at once."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs if stdout_too else subprocess.PIPE, stderr=theirs, env=env
    )
    os.close(theirs)
    screen, out, until_s = Screen(rows, columns), b"", time.monotonic() + 600
    streams = [ours, *([child.stdout.fileno()] if child.stdout else [])]
    rest, decoder = "", codecs.getincrementaldecoder("utf-8")()
    while streams and time.monotonic() < until_s:
        for fd in select.select(streams, [], [], 1)[0]:
            try:
                data = os.read(fd, 1 << 16)
            except OSError:  # what a terminal says when nobody has it open any more
                data = b""
            if not data:
                streams.remove(fd)
            elif fd == ours:
                text = rest + decoder.decode(data)
                cut = text.rfind("\x1b") if re.search(r"\x1b(\[[0-9;]*)?$", text) else len(text)
                rest = text[cut:]
                for piece in re.split(r"(?=\x1b\[J|\r)", text[:cut]):
                    screen.feed(piece)
                    look(screen)
            else:
                out += data
    os.close(ours)
    code = child.wait(600)
    if child.stdout:
        child.stdout.close()
    return code, screen, out.decode()
