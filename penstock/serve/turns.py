"""Lets a loaded model answer one call, or one open stream, at a time.

A model has one KV cache and one ring of weights, so two answers that step it by turns would read each other's tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from penstock.errors import BadRequest

T = TypeVar("T")


class Turns:
    """The turns of a model. A thread that wants the model while another thread has it waits.

    A thread that has the model already, since it left a stream open, would wait for itself for ever. It gets
    BadRequest. A stream keeps its turn from its first piece until it ends, is closed or is collected as garbage.
    """

    def __init__(self) -> None:
        # A plain lock and no condition: garbage collection may end a stream in any thread, in the middle of any line
        # here, and only `release` is safe then.
        self._free = threading.Lock()
        # The thread that has the turn; where a stream has it, the thread that last read from that stream.
        self._holder: int | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the model for a block. Raises as `require_none`."""
        self.require_none()
        with self._free:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    def require_none(self) -> None:
        """Raises BadRequest where this thread holds the model already."""
        if self._holder == threading.get_ident():
            raise BadRequest(
                "this model is in the middle of an answer that this thread has begun: "
                "read that stream to its end, or close it, before you ask for another"
            )

    def stream(self, pieces: Iterator[T]) -> Iterator[T]:
        """Yields the same pieces, all in one turn, which begins when the first piece is asked for. Raises as `turn`."""
        with self.turn():
            for piece in pieces:
                yield piece
                self._holder = threading.get_ident()  # a stream may be handed from thread to thread
