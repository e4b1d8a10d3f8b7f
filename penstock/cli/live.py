"""Shows a line on the terminal while an answer comes: what is done, how fast, and the disk's speed.

Where text streams to the same terminal, the line is drawn under the text and erased before more text comes. Else it is
drawn on stderr alone. Nothing is drawn where stderr is no terminal, or in the first half second.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from penstock.cli.wrapping import Wrapping
from penstock.units import format_left, format_rate

if TYPE_CHECKING:
    from penstock.graph.tasks import Pass
    from penstock.graph.timeline import Timeline
    from penstock.serve.engine import Engine

_FIRST_S, _EVERY_S = 0.5, 0.25
_WINDOW_S = 2.0  # seconds over which the disk's speed is taken
_LEAST_ROWS, _LEAST_COLUMNS = 3, 20
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_MOST_SHOWN = 0.99  # the largest share of a prompt that is shown before all of it was read

# Index and reverse index (the codes of _ROOM) make room below and keep the column, also at the bottom of the screen.
_ROOM, _SAVE, _BELOW, _RESTORE = "\033D\033M", "\0337", "\033[B\r", "\0338"
_ERASE_BELOW, _ERASE_LINE = "\033[J", "\033[K"
DIM, _PLAIN = "\033[2m", "\033[0m"


class Progress:
    """Counts what passes have done so far. `watch`: a Session's Watch. `tokens`: of the prompts, that passes have to
    read. `read_bytes`: returns the bytes that were read from the disk so far. `foretold_s`: seconds that reading the
    prompts is predicted to take; 0 where nobody knows."""

    def __init__(
        self, tokens: int, read_bytes: Callable[[], int], clock: Callable[[], float], foretold_s: float = 0.0
    ) -> None:
        self._prompt, self._read_bytes, self._clock, self._foretold_s = tokens, read_bytes, clock, foretold_s
        self._rows = self._tokens = self._drawn = 0
        self._start_s = self._told_s = clock()
        self._reads = deque([(self._start_s, read_bytes())])

    def watch(self, timeline: Timeline, p: Pass | None) -> None:
        """Counts a pass."""
        if p is None:
            return
        count = p.total_rows
        if p.purpose != "prefill":
            self._rows, self._tokens = self._prompt, self._tokens + count
        elif self._rows < self._prompt:
            self._rows += count
            self._told_s = self._clock()
            if self._rows >= self._prompt:
                self._start_s = self._told_s  # from here on the count is of decoding

    def line(self) -> str:
        """'⠙ reading the prompt: 512 of 2048 tokens, 25 %, 31.2 tok/s, 49 s left, disk 2.85 GB/s', or
        '17 tokens, 3.21 tok/s, disk …'."""
        now_s = self._clock()
        if self._rows < self._prompt:
            parts = self._reading(now_s)
        else:
            parts = [f"{self._tokens} tokens"]
            if self._tokens:
                parts.append(_rate(self._tokens / max(1e-9, now_s - self._start_s)))
        if (rate := self._disk_rate(now_s)) > 0:
            parts.append(f"disk {format_rate(rate)}")
        return ", ".join(parts)

    def _reading(self, now_s: float) -> list[str]:
        """The line while prompts are read. Between two passes the count goes on at the speed so far, and before the
        first pass at the foretold speed."""
        self._drawn += 1
        spinner, prompt = _SPINNER[self._drawn % len(_SPINNER)], self._prompt
        spent_s = self._told_s - self._start_s if self._rows else self._foretold_s
        per_s = (self._rows or prompt) / spent_s if spent_s > 0 else 0.0
        done = min(int(self._rows + per_s * (now_s - self._told_s)), int(_MOST_SHOWN * prompt))
        parts = [f"{spinner} reading the prompt: {done} of {prompt} tokens", f"{done / prompt:.0%}"]
        return [*parts, _rate(per_s), f"{format_left((prompt - done) / per_s)} left"] if per_s else parts

    def _disk_rate(self, now_s: float) -> float:
        self._reads.append((now_s, self._read_bytes()))
        while len(self._reads) > 2 and self._reads[1][0] < now_s - _WINDOW_S:
            self._reads.popleft()
        (from_s, before), (_, after) = self._reads[0], self._reads[-1]
        return (after - before) / max(1e-9, now_s - from_s)


class Live:
    """Draws the line in a thread. Text has to go through `write`. `line`: returns the line's text. `below`: the line is
    drawn under the text, on the same terminal."""

    def __init__(self, line: Callable[[], str], below: bool) -> None:
        self._line, self._below = line, below
        self._wrapping = Wrapping()
        self._shown, self._on_screen = "", False
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="penstock-live", daemon=True)

    def __enter__(self) -> Live:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._emit(self._erased())

    def write(self, text: str, style: str = "") -> None:
        """Prints text of the answer to stdout at once. `style`: codes before it, which take no room."""
        if not self._below:
            print(_styled(text, style), end="", flush=True)
            return
        with self._lock:
            before, size = self._erased(), _size()
            shown = _styled(self._wrapping.push(text, size.columns), style)
            print(f"{before}{shown}{self._drawn(size)}", end="", flush=True)

    def _redraw(self) -> None:
        wait_s = _FIRST_S
        while not self._stop.wait(wait_s):
            wait_s = _EVERY_S
            with self._lock:
                self._shown = self._line()
                self._emit(self._drawn(_size()))

    def _drawn(self, size: os.terminal_size) -> str:
        if not self._shown or size.lines < _LEAST_ROWS or size.columns < _LEAST_COLUMNS:
            return ""
        if self._below and self._wrapping.column >= size.columns:
            return ""  # the cursor hangs behind the last column, where terminals treat these codes differently
        self._on_screen = True
        line = self._shown[: size.columns - 1]
        if not self._below:
            return f"\r{line}{_ERASE_LINE}"
        return f"{_ROOM}{_SAVE}{_BELOW}{line}{_ERASE_LINE}{_RESTORE}"

    def _erased(self) -> str:
        if not self._on_screen:
            return ""
        self._on_screen = False
        return _ERASE_BELOW if self._below else f"\r{_ERASE_LINE}"

    def _emit(self, codes: str) -> None:
        """Prints only codes. If the terminal is gone, this must not end the answer; printing its text will."""
        with suppress(OSError, ValueError):
            print(codes, end="", file=sys.stdout if self._below else sys.stderr, flush=True)


class Plain:
    """Stands in place of `Live`: prints text, and no line."""

    def write(self, text: str, style: str = "") -> None:
        print(_styled(text, style), end="", flush=True)


@contextmanager
def live(engine: Engine, ahead: Callable[[], tuple[int, float]], streams: bool) -> Iterator[Live | Plain]:
    """Yields an object whose `write` prints the answer. `ahead`: says how many tokens of prompts passes will read, and
    in how many seconds, as predicted; 0 where nobody knows. `streams`: whether text comes while the line is shown, from
    the first column on."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield Plain()
        return
    session = engine.session
    tokens, foretold_s = ahead()
    progress = Progress(tokens, lambda: session.reader.bytes_read, time.perf_counter, foretold_s)
    session.watchers.append(progress.watch)
    try:
        with Live(progress.line, streams and _one_terminal()) as shown:
            yield shown
    finally:
        session.watchers.remove(progress.watch)


def _styled(text: str, style: str) -> str:
    return f"{style}{text}{_PLAIN}" if style else text


def _rate(per_s: float) -> str:
    return f"{per_s:.{1 if per_s >= 10 else 2}f} tok/s"


def _one_terminal() -> bool:
    """Whether stdout and stderr are the same terminal."""
    if not sys.stdout.isatty():
        return False
    ours, other = os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())
    return (ours.st_dev, ours.st_rdev) == (other.st_dev, other.st_rdev)


def _size() -> os.terminal_size:
    """The size of the terminal behind stderr; 80 × 24 where it does not know."""
    with suppress(OSError):
        size = os.get_terminal_size(sys.stderr.fileno())
        if size.columns > 0 and size.lines > 0:
            return size
    return os.terminal_size((80, 24))
