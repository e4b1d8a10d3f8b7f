"""The probe's choice of block, depth and engine: on made-up disks, and once on this one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock import _native
from penstock.runtime import probe_reads
from penstock.runtime.probe_disk import ProbeFile
from penstock.runtime.probe_reads import Way, best_reads, choose
from penstock.units import MIB

Speed = Callable[[Way], float]  # bytes per second


def made_up(speed: Speed, swing: float = 0.0) -> probe_reads.LoadsS:
    """A disk of this speed, which swings by up to so much of it from one run of loads to the next."""
    rng = np.random.default_rng(3)

    def loads_s(reader: _native.Reader, nbytes: int, count: int) -> float:
        way = Way(reader.engine, reader.depth, reader.block_bytes)
        return float(nbytes / speed(way) * (1 + swing * rng.uniform(-1, 1)))

    return loads_s


def nvme(way: Way) -> float:
    """As fast as it gets from 4 blocks of 1 MiB in flight on."""
    return 3e9 * min(1.0, way.depth * way.block_bytes / (4 * MIB))


def test_the_fewest_and_largest_blocks_among_equals() -> None:
    ways = {Way("threads", 4, MIB): 1.0, Way("threads", 2, MIB): 1.02, Way("threads", 2, 4 * MIB): 1.025}
    assert choose(ways) == Way("threads", 2, 4 * MIB)
    assert choose({**ways, Way("threads", 1, 16 * MIB): 0.9}) == Way("threads", 2, 4 * MIB)


@pytest.mark.parametrize("swing", [0.0, 0.02])
def test_a_disk_that_wants_much_in_flight(swing: float) -> None:
    small, large = best_reads(made_up(nvme, swing))
    assert (large.depth, large.engine, large.most_bytes) == (2, "threads", 0)
    assert large.block_bytes >= 2 * MIB and large.bytes_per_s == pytest.approx(3e9, rel=0.03)
    assert (small.depth, small.most_bytes) == (4, MIB)
    assert "not surely" in large.reason or "refuses" in large.reason


@pytest.mark.parametrize(("gain", "engine"), [(1.03, "threads"), (1.2, "io_uring")])
def test_an_io_uring_has_to_be_clearly_faster(gain: float, engine: str) -> None:
    try:
        _native.Reader("io_uring", 1, MIB)
    except OSError:
        pytest.skip("this system refuses io_uring")
    for reads in best_reads(made_up(lambda way: nvme(way) * (gain if way.engine == "io_uring" else 1.0), 0.01)):
        assert reads.engine == engine
        assert "io_uring took" in reads.reason


def test_where_the_kernel_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    true_reader = _native.Reader

    def refuse(engine: str, depth: int, block: int) -> _native.Reader:
        if engine == "io_uring":
            raise PermissionError(1, "Operation not permitted")
        return true_reader(engine, depth, block)

    monkeypatch.setattr(_native, "Reader", refuse)
    for reads in best_reads(made_up(nvme)):
        assert reads.engine == "threads"
        assert "refuses io_uring (Operation not permitted)" in reads.reason


def test_on_this_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few, so that it takes a moment; what comes out is whatever the disk is."""
    monkeypatch.setattr(probe_reads, "BLOCKS", (MIB, 8 * MIB))
    monkeypatch.setattr(probe_reads, "DEPTHS", (1, 2))
    (tmp_path / "file").write_bytes(bytes(20 * MIB))
    fd, _ = _native.open_direct(str(tmp_path / "file"))
    try:
        found = best_reads(ProbeFile(tmp_path / "file", fd).loads_s)
    finally:
        os.close(fd)
    assert [reads.most_bytes for reads in found] == [MIB, 0]
    assert all(reads.bytes_per_s > 0 and reads.reason.startswith("measured: blocks of ") for reads in found)
