"""Writes the packed copy of a model that was loaded without one, in a thread, while the model answers.

The thread has no lower priority than others. It takes Python's lock like them, and a thread of idle priority would hold
that lock while it waits for a processor. Instead it copies weights between passes (`runtime.made.between_passes`).
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.runtime.host import Progress


class _BrokenOff(Exception):
    """Ends the writing from within."""


class CopyWriting:
    """The thread that writes a copy; it begins at once. A program that ends waits for it.

    `write`: writes the copy, and tells its progress, which `tell` gets. `failed`: gets why the copy could not be
    written. It is not called where the writing was broken off."""

    def __init__(
        self, write: Callable[[Progress], None], failed: Callable[[str], None], tell: Progress | None = None
    ) -> None:
        self._write, self._failed, self._tell = write, failed, tell
        self._breaks_off = self._ended = False
        self._then: Callable[[], None] | None = None
        self._guard = threading.RLock()  # of the last two. Garbage may be collected, and call `then`, in any thread
        self._thread = threading.Thread(target=self._work, name="penstock-copy")
        # Ctrl-C ends the interpreter's own wait for this thread. What comes back from a kernel after that aborts.
        atexit.register(self.break_off)
        try:
            self._thread.start()
        except BaseException:
            atexit.unregister(self.break_off)
            raise

    @property
    def goes_on(self) -> bool:
        """Whether the copy is still being written."""
        return self._thread.is_alive()

    def wait(self, within_s: float | None = None) -> None:
        """Waits until the copy is written, at most so many seconds."""
        self._thread.join(within_s)

    def break_off(self) -> None:
        """Ends the writing, when the pieces at hand are written. Whole shards stay, and packing goes on from there."""
        self._breaks_off = True
        self._thread.join()

    def then(self, call: Callable[[], None]) -> None:
        """Has the thread call this when the copy is written, or calls it now if that has come. Does not wait."""
        with self._guard:
            if not self._ended:
                self._then = call
                return
        call()

    def _hear(self, text: str, done: int, total: int) -> None:
        if self._breaks_off:
            raise _BrokenOff
        if self._tell is not None:
            self._tell(text, done, total)

    def _work(self) -> None:
        try:
            self._write(self._hear)
        except _BrokenOff:
            pass
        except Exception as error:  # nobody else would hear of it
            self._failed(why_not_written(error))
        finally:
            atexit.unregister(self.break_off)
            with self._guard:
                self._ended = True
            if self._then is not None:
                self._then()


def why_not_written(error: Exception) -> str:
    """Says that a copy could not be written, and what comes of it."""
    why = error.message if isinstance(error, PenstockError) else str(error) or type(error).__name__
    return f"the packed copy was not written, so the next run begins as this one did, or packs what is missing: {why}"
