"""The share of what disk and RAM allow, of a run's own minute: from 0 to 1, or not told."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StorageFailed
from penstock.runtime.reread import NOTHING, from_disk, from_ram
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.run_bound import share, share_of_bound
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.store.packed import open_packed
from tests.cpu.commands import MACHINE, Call
from tests.cpu.engines import load, make_model, streaming

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "llama", "float32")


def test_by_hand() -> None:
    assert share(0.08, 0.1, []) == pytest.approx(0.8)
    # Faster than what should have been possible: 1.81 of a figure that was none.
    assert share(0.181, 0.1, []) is None and share(0.181, 0.1, [0.1] * 31) is None
    # Half of the time it was: then the run's own fastest stretch is what was possible.
    assert share(0.181, 0.15, [0.2] * 16 + [0.1] * 16) == pytest.approx(0.1 / 0.15)
    assert share(0.12, 0.15, [0.2] * 16 + [0.1] * 16) == pytest.approx(0.1 / 0.15)
    # One pass whose bytes were there before it began is no stretch.
    assert share(0.12, 0.15, [0.151] * 31 + [0.001]) == pytest.approx(0.12 / 0.15)
    assert share(0.0, 0.1, []) is share(0.1, 0.0, []) is None


@given(st.floats(1e-9, 1e3), st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=80))
def test_never_above_one(least_s: float, passes_s: list[float]) -> None:
    found = share(least_s, sum(passes_s) / len(passes_s), passes_s)
    assert found is None or 0 < found <= 1


@pytest.mark.parametrize("keep", [("norms", "edges"), ("norms", "edges", "attn"), None])
def test_a_run_tells_it(keep: tuple[str, ...] | None, folder: Path) -> None:
    """With little in memory, or all. What rings lose is read again: the next answer is the same."""
    plan = None if keep is None else streaming(open_packed(folder), keep)
    with load(folder, plan) as engine:
        (first,) = engine.generate([PROMPT], LONG)
        for _ in range(2):
            found = share_of_bound(engine.session, first)
            assert found is None or 0 < found <= 1
        (again,) = engine.generate([PROMPT], LONG)
        assert again.token_ids == first.token_ids
        assert again.decode_disk_bytes == first.decode_disk_bytes and (again.decode_disk_bytes > 0) == bool(keep)
        assert first.decode_steps == 39


def test_what_is_read_again(folder: Path) -> None:
    """What a decode pass streams, through the ring; what stays, once; nothing where nothing streams."""
    with load(folder, streaming(open_packed(folder))) as engine:
        session = engine.session
        before = session.bytes_moved()["disk0"]
        streamed, resident = session.reread(0.0)
        assert session.bytes_moved()["disk0"] - before == streamed.bytes > 0
        assert streamed.seconds > 0 and streamed.bytes_per_s == streamed.bytes / streamed.seconds
        assert resident.bytes == next(arena.bytes for arena in engine.plan.arenas if arena.name == "host.weights")
        # The first load, which waits for the disk to begin, is left out.
        assert 0 < session.loading.bytes < session.loaded_bytes and session.loading.seconds > 0
    with load(folder) as engine:
        assert engine.session.reread(1.0)[0] == NOTHING
    assert NOTHING.bytes_per_s == 0 and from_ram(0, 0, 1) == NOTHING
    assert from_disk(engine.session.reader, [], np.zeros(0, np.uint8), 1.0) == NOTHING


def test_an_untied_embedding_is_not_read_again(tmp_path: Path) -> None:
    """Single rows of it are read, and the ring has no room for more; what is short streams with a head on the disk."""
    untied = make_model(tmp_path, "qwen3", "float32")
    with load(untied, streaming(open_packed(untied), ("norms", "edges", "attn", "ffn"))) as engine:
        (first,) = engine.generate([PROMPT], LONG)
        found = share_of_bound(engine.session, first)
        assert found is None or 0 < found <= 1
        assert first.decode_disk_bytes > 0


def test_not_told_where_nobody_measured(folder: Path) -> None:
    """No token was decoded; a device computed."""
    with load(folder) as engine:
        (one,) = engine.generate([PROMPT], SamplingParams(max_tokens=1, ignore_eos=True))
        assert share_of_bound(engine.session, one) is None
    ask = Ask(use_device=True, device_memory_bytes=64 << 20)
    with closing(Engine.load(folder, ask, Loading(machine=MACHINE, device="emulated"))) as engine:
        (first,) = engine.generate([PROMPT], LONG)
        assert engine.session.peak_device_bytes and share_of_bound(engine.session, first) is None


def test_a_disk_that_fails_after_the_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise StorageFailed("reading failed")

    with load(folder, streaming(open_packed(folder))) as engine:
        (first,) = engine.generate([PROMPT], LONG)
        monkeypatch.setattr(engine.session.reader, "start", fails)
        assert share_of_bound(engine.session, first) is None


def test_in_the_report(call: Call, model: Path) -> None:
    for flags in (("--resident", "0"), ("--resident", "300KiB"), ()):
        report = call("run", model, "ab", "--raw", "--max-tokens", "40", "--ignore-eos", *flags).report
        assert report["share_of_bound"] is None or 0 < report["share_of_bound"] <= 1
    report = call("run", model, "ab", "--raw", "--max-tokens", "1", "--ignore-eos").report
    assert report["share_of_bound"] is None
