"""Has Ctrl-C arrive: an interrupt that was lost is raised again, and none falls where a lock would stay held.

Python raises KeyboardInterrupt in the main thread, between any two instructions. In a finalizer, or in a callback from
native code, it is printed or cleared, and the command would go on to its end. Inside of `Condition.__enter__` it leaves
a lock behind that nobody holds, and a thread that wants it waits for ever.

Loops that ask between their steps whether to stop were the other way. Each loop would have to be told whom to ask, and
the next one would be forgotten.
"""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

_AGAIN_S = 0.25  # until an interrupt that nobody deals with counts as lost
_SOON_S, _MOST_TRIES = 0.002, 500  # until one that fell between locks is tried again, and how often
_IMPORTS = "<frozen importlib._bootstrap>"
# What takes or holds a lock there. `_get_module_lock` and `cb` hold the one of all imports, which no `with` gives back.
_LOCKS_OF_IMPORTS = ("acquire", "release", "_get_module_lock", "cb")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, as `Interrupts` raises it."""

    def __init__(self, by: Interrupts) -> None:
        super().__init__()
        self.by = by


class Interrupts:
    """Within this context SIGINT raises `Interrupted` in the main thread. After it a timer looks four times a second
    whether an exception is being dealt with there. If none is, the interrupt was lost, and is raised once more.
    `asked`: whether there was a SIGINT that nobody has taken.

    Nothing is done in other threads than the main one, nor where SIGINT is ignored, as in a shell's background jobs."""

    def __init__(self) -> None:
        self.asked = False
        self._tries = 0  # how often the last one was put off
        self._alarm_before: Any = None  # who had SIGALRM, where it is in use here

    def __enter__(self) -> Interrupts:
        ours = threading.current_thread() is threading.main_thread()
        if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if signal.getsignal(signal.SIGINT) == self._on_signal:
            self.take()
            if self._alarm_before is not None:
                signal.signal(signal.SIGALRM, self._alarm_before)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def take(self) -> None:
        """Says that the interrupt has been dealt with, and that the command goes on."""
        self.asked = False
        if self._alarm_before is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.asked, self._tries = True, 0
        elif not self.asked:
            return
        elif sys.exc_info()[0] is not None:  # something is being cleaned up: a second interrupt would break that off
            self._look_again(_AGAIN_S)
            return
        if _is_no_place(frame) and self._tries < _MOST_TRIES:
            self._tries += 1
            self._look_again(_SOON_S)
            return
        self._look_again(_AGAIN_S)
        raise Interrupted(self)

    def _look_again(self, after_s: float) -> None:
        if self._alarm_before is None:
            self._alarm_before = signal.signal(signal.SIGALRM, self._on_signal) or signal.SIG_DFL
        signal.setitimer(signal.ITIMER_REAL, after_s)


def taken(interrupt: KeyboardInterrupt) -> None:
    """Has to be called by whoever catches Ctrl-C and goes on."""
    if isinstance(interrupt, Interrupted):
        interrupt.by.take()


@contextmanager
def sigterm_ends(then: Callable[[], None]) -> Iterator[None]:
    """In this block SIGTERM breaks off what is done, as Ctrl-C does, and the block is left as if it had come to its
    end, after `then`. Whoever ends services takes any other code for a fault. By its own default the process would be
    killed, and leave files behind. Nothing is done in other threads than the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        if not callable(on_interrupt := signal.getsignal(signal.SIGINT)):  # Ctrl-C is ignored
            raise KeyboardInterrupt
        on_interrupt(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield
    except (Exception, KeyboardInterrupt):
        if not came:
            raise
        then()
    finally:
        signal.signal(signal.SIGTERM, before)
        by = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
        if came and isinstance(by, Interrupts):
            by.take()


def _is_no_place(frame: FrameType | None) -> bool:
    """Whether an interrupt would do harm here: a lock is taken or given back, or an object is finalized."""
    if frame is None:
        return False
    code = frame.f_code
    if code.co_name in ("__enter__", "__exit__"):
        return True
    above: FrameType | None = frame
    while above is not None and not (_finalizes(above.f_code) or _locks_imports(above.f_code)):
        above = above.f_back
    return above is not None


def _locks_imports(code: CodeType) -> bool:
    return code.co_filename == _IMPORTS and code.co_name in _LOCKS_OF_IMPORTS


def _finalizes(code: CodeType) -> bool:
    return code.co_name == "__del__" or (code.co_name == "__call__" and code.co_filename == weakref.__file__)
