"""What a call takes on free cores, told from what it took by the clock."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.kernels import cpu
from penstock.runtime.bind_native import native
from penstock.runtime.own_time import ThreadClocks, is_free, undisturbed
from penstock.runtime.probe_ops import Layers
from penstock.spec.format import DEFAULT_GROUP, Format

ALONE = [(1.00, 1.01), (1.05, 1.02), (0.99, 1.00)]
BROKEN = [(4.0, 1.2), (9.0, 1.3), (2.0, 1.1), (7.0, 1.4), (3.0, 1.2), (6.0, 1.25)]


def test_calls_that_had_their_cores_are_taken_by_the_clock() -> None:
    assert undisturbed(ALONE) == [1.00, 1.05, 0.99]
    assert undisturbed([*ALONE, *BROKEN]) == [1.00, 1.05, 0.99]


def test_where_too_few_had_them_the_processor_time_counts() -> None:
    assert undisturbed(BROKEN) == [1.2, 1.3, 1.1, 1.4, 1.2, 1.25]
    assert undisturbed([ALONE[0], *BROKEN]) == [1.00, 1.2, 1.3, 1.1, 1.4, 1.2, 1.25]


def test_where_nobody_tells_all_is_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: str) -> list[str]:
        raise FileNotFoundError

    monkeypatch.setattr(os, "listdir", nothing)
    clocks = ThreadClocks()
    taken = 1.0, clocks.busiest_s(clocks.now_s())
    assert is_free(taken) and undisturbed([taken]) == [1.0]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are not told here")
def test_waiting_does_not_count_and_computing_does() -> None:
    clocks = ThreadClocks()
    before_s, own_s = clocks.now_s(), time.thread_time()
    while time.thread_time() - own_s < 0.05:
        pass
    assert clocks.busiest_s(before_s) >= 0.05
    before_s, start_s = clocks.now_s(), time.perf_counter()
    time.sleep(0.2)
    assert clocks.busiest_s(before_s) < time.perf_counter() - start_s


def test_calls_that_were_disturbed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = native(cpu.best_isa()[0], 1, exact=False)
    layers = Layers(Format("int4", DEFAULT_GROUP), Format("float16"), kernels, 1 << 20)
    try:
        monkeypatch.setattr(ThreadClocks, "busiest_s", lambda *_: 0.0)
        timed = layers.time(1, 0, ("ffn",), repeats=1)
        assert 0 < layers.disturbed == layers.timed and {each.seconds for each in timed} == {0.0}
        assert all(each.seconds > 0 for each in layers.time(1, 0, ("ffn",), repeats=1, by_clock=True))
        monkeypatch.setattr(ThreadClocks, "busiest_s", lambda *_: float("inf"))
        before = layers.disturbed
        assert all(each.seconds > 0 for each in layers.time(1, 0, ("ffn",), repeats=1))
        assert layers.disturbed == before
    finally:
        layers.close()
