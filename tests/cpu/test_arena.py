"""Pages of arenas that are taken while weights are already read."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.runtime import arena
from penstock.runtime.arena import Arenas, _Pages
from penstock.serve.sampling import SamplingParams
from penstock.store.packed import open_packed
from tests.cpu.engines import load, make_model, streaming

MIB = 1 << 20


@pytest.mark.parametrize("at_once_bytes", [0, 1 << 40])
def test_weights_are_read_meanwhile(at_once_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path, "llama", "float32")
    plan = streaming(open_packed(folder), ("norms", "edges", "attn"))
    with load(folder, plan) as engine:
        expected = engine.session.loaded_bytes
    monkeypatch.setattr(arena, "_AT_ONCE_BYTES", at_once_bytes)
    with load(folder, plan) as engine:
        session = engine.session
        assert session.loaded_bytes == expected and 0 < session.pages_s <= session.ready_s
        timed = session.loading
        assert 0 <= timed.bytes <= expected and (timed.bytes > 0) == (timed.seconds > 0)
        # All of so small a model may be read before the last page is taken: then no load was timed.
        assert timed.bytes > 0 or not at_once_bytes
        assert len(engine.generate_ids([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))) == 4


class Slow:
    """A memory of 3 turns, each of which waits to be let through."""

    nbytes = 3 * 256 * MIB

    def __init__(self) -> None:
        self.begun, self.through, self.turns = threading.Event(), threading.Event(), list[tuple[int, int]]()

    def populate(self, threads: int, lo: int, hi: int) -> None:
        self.turns.append((lo, hi))
        self.begun.set()
        assert self.through.wait(600)


def test_stops_between_two_turns() -> None:
    memory: Any = Slow()
    pages = _Pages((memory,))
    pages.begin()
    assert memory.begun.wait(600) and pages.taking_s is None
    stopping = threading.Thread(target=pages.stop)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive()  # memory under way may not be given back
    pages._stopped.wait(600)
    memory.through.set()
    stopping.join(600)
    assert len(memory.turns) == 1 and pages.taking_s is None


def test_takes_all_in_order() -> None:
    memories: Any = (Slow(), Slow())
    for memory in memories:
        memory.through.set()
    pages = _Pages(memories)
    pages.begin()
    pages.wait()
    turn = 256 * MIB
    assert [m.turns for m in memories] == [[(0, turn), (turn, 2 * turn), (2 * turn, 3 * turn)]] * 2
    assert pages.taking_s is not None
    pages.stop()


def test_memory_stays_until_pages_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing at once, again and again, while a thread takes pages."""
    plan = streaming(open_packed(make_model(tmp_path, "llama", "float32")))
    monkeypatch.setattr(arena, "_AT_ONCE_BYTES", 0)
    for _ in range(20):
        arenas = Arenas(plan, ahead=True)
        assert not np.any(arenas.whole("host.ring"))
        arenas.close()


ENDS_AT_ONCE = """
from penstock import _native
from penstock.runtime.arena import _Pages

_Pages(tuple(_native.Memory(1 << 20, True) for _ in range(300))).begin()
"""


def test_a_process_that_ends_meanwhile_ends_in_peace() -> None:
    """Without waiting for the thread it aborted 3 times of 12."""
    for _ in range(4):
        ended = subprocess.run(
            [sys.executable, "-P", "-c", ENDS_AT_ONCE], capture_output=True, timeout=600, check=False
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
