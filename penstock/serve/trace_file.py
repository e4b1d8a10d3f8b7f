"""Writes a trace to disk while passes run. The file takes its name when it is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from penstock.errors import BadRequest
from penstock.graph.tasks import Pass
from penstock.graph.timeline import Timeline
from penstock.graph.trace import BEGINS, Event, Trace
from penstock.store.files import Kind, Output

TRACE = Kind("a trace", BEGINS.encode())


class TraceFile:
    """A file of --trace. `add` is a Session's Watch.

    A context manager: the file is written aside, and renamed at the end. After Ctrl-C it holds what was done until
    then. Where the work failed, or was ended before its first pass, no file is left, and one that was there before
    stays. A disk that fills up does not stop the work; the error comes at the end.

    Raises BadRequest where the file cannot be written, or holds something else than a trace: at once if that can be
    known, else at the end.
    """

    def __init__(self, file: Path, title: str) -> None:
        self._file, self._trace = file, Trace(title)
        self._failed: OSError | None = None
        self._between, self._passes = "", 0
        try:
            self._output = Output(file, TRACE)
        except OSError as error:
            raise self._refused(error) from None
        self._write(BEGINS)
        self._events(list(self._trace.begin()))

    @property
    def left_out(self) -> int:
        """How many tasks are left out of the file, which would be too long with them."""
        return self._trace.left_out

    def add(self, timeline: Timeline, p: Pass | None) -> None:
        """Writes the tasks of a timeline. `p`: the pass that they belong to."""
        if self._failed is None:
            self._events(list(self._trace.add(timeline, p)))
            self._passes += p is not None

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        whole = kind is None or (issubclass(kind, KeyboardInterrupt) and self._passes > 0)
        with self._output:
            if whole:
                self._write(f'\n],"otherData":{json.dumps(self._trace.summary())}}}\n')
                self._unless_failed(self._output.commit)
        if kind is None and self._failed is not None:
            raise self._refused(self._failed)

    def _events(self, events: list[Event]) -> None:
        for event in events:
            self._write(f"{self._between}\n{json.dumps(event, separators=(',', ':'))}")
            self._between = ","

    def _write(self, text: str) -> None:
        self._unless_failed(lambda: self._output.stream.write(text.encode()))

    def _unless_failed(self, act: Callable[[], object]) -> None:
        if self._failed is None:
            try:
                act()
            except OSError as error:
                self._failed = error

    def _refused(self, error: OSError) -> BadRequest:
        return BadRequest(f"--trace {self._file} cannot be written: {error.strerror}")
