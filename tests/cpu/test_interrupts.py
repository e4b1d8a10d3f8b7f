"""Ctrl-C that Python would lose, or that would leave a lock behind."""

from __future__ import annotations

import _imp
import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.cli.interrupts import Interrupts, taken
from tests.cpu.commands import ROOT

LONG_S = 600.0  # by then a test would have failed


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Whatever a test does, signals are handled afterwards as they were."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)] == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def go_on() -> None:
    until_s = time.monotonic() + LONG_S
    while time.monotonic() < until_s:
        time.sleep(0.01)


def test_an_interrupt_is_raised_at_once() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            press()
        assert interrupts.asked
    assert not interrupts.asked


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_a_callback_loses_is_raised_again() -> None:
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        ctypes.CFUNCTYPE(None)(press)()
        assert interrupts.asked
        go_on()


def test_one_that_is_caught_and_forgotten_is_raised_again() -> None:
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        with suppress(BaseException):
            press()
        go_on()


def test_what_is_cleaned_up_is_not_broken_off() -> None:
    cleaned = False
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        try:
            press()
        finally:
            time.sleep(0.8)
            cleaned = True
    assert cleaned


def test_a_second_one_breaks_off_what_is_cleaned_up() -> None:
    cleaned = False
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        try:
            press()
        finally:
            press()
            cleaned = True
    assert not cleaned


def test_one_that_is_taken_does_not_come_back() -> None:
    with Interrupts() as interrupts:
        try:
            press()
        except KeyboardInterrupt as interrupt:
            taken(interrupt)
        time.sleep(0.6)
        assert not interrupts.asked


def test_a_lock_is_not_left_behind() -> None:
    """As `threading.Condition` takes its lock: after an interrupt right there nobody would give it back."""

    class Held:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            self.lock.acquire()
            os.kill(os.getpid(), signal.SIGINT)

        def __exit__(self, *_: object) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            self.lock.release()

    held = Held()
    with Interrupts(), pytest.raises(KeyboardInterrupt), held:
        go_on()
    assert held.lock.acquire(blocking=False)


def test_none_falls_between_all_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `importlib` takes the lock of all imports: a thread that imports ahead would wait for it for ever, and so
    would the end of the command."""

    class Pressing:
        def __getattr__(self, name: str) -> Any:
            return getattr(_imp, name)

        def acquire_lock(self) -> None:
            _imp.acquire_lock()
            press()

    bootstrap = importlib._bootstrap  # type: ignore[attr-defined]
    with monkeypatch.context() as patched, Interrupts(), pytest.raises(KeyboardInterrupt):
        patched.setattr(bootstrap, "_imp", Pressing())
        bootstrap._get_module_lock("no such module")
        patched.undo()
        go_on()
    left_behind = _imp.lock_held()
    while _imp.lock_held():
        _imp.release_lock()
    assert not left_behind


def test_none_falls_into_a_finalizer() -> None:
    class Last:
        def __del__(self) -> None:
            press()
            ended.append(True)

    ended: list[bool] = []
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        Last()
        gc.collect()
        go_on()
    assert ended == [True]


def test_none_falls_into_what_ends_a_child() -> None:
    """As `serve.confined` ends its process, when the last one who could ask it is gone."""

    class Last:
        pass

    def end() -> None:
        press()
        ended.append(True)

    ended: list[bool] = []
    last = Last()
    weakref.finalize(last, end)
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        del last
        gc.collect()
        go_on()
    assert ended == [True]


def test_a_command_that_has_stopped_is_not_stopped_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "_run", lambda *_: press())
    with Interrupts() as interrupts:
        assert main.main([], interrupts) == 130
        assert not interrupts.asked and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert capsys.readouterr().err == "penstock: stopped\n"


def test_who_ignores_it_goes_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            press()
            assert not interrupts.asked
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_nothing() -> None:
    def enter() -> None:
        with Interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers: list[object] = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


# A command whose third pass loses the interrupt: what raises in this callback is printed and forgotten.
LOSES = """
import ctypes, os, signal, sys
from penstock.cli.entry import main
from penstock.serve.session import Session

step, passes = Session.step, []

def losing(self, *args):
    passes.append(None)
    if len(passes) == {nth}:
        ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGINT))()
    return step(self, *args)

Session.step = losing
sys.unraisablehook = lambda _: None
code = main()
print(len(passes), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(("nth", "tokens"), [(3, 250), (8, 8)])
def test_a_command_ends_though_the_interrupt_was_lost(nth: int, tokens: int, cache: Path, model: Path) -> None:
    """In the middle, and in the very last pass: the exit code says that it was stopped, either way."""
    flags = ["--ignore-eos", "--max-tokens", str(tokens), "--cache", str(cache), "--batch", "40"]
    args = [sys.executable, "-c", LOSES.format(nth=nth), "run", str(model), "abc", *flags]
    done = subprocess.run(
        args, cwd=ROOT, capture_output=True, text=True, timeout=LONG_S,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    *_, said, passes = done.stderr.splitlines()
    assert (done.returncode, said) == (130, "penstock: stopped")
    assert nth <= int(passes) <= tokens
    assert "Traceback" not in done.stderr
