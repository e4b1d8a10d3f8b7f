"""Several reads in flight: whatever the block, the depth and the engine, the bytes are those of plain reads."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import _native as native
from penstock.runtime import movers
from penstock.units import MIB

PAGE = 4096


def refuses_io_uring() -> bool:
    try:
        native.Reader("io_uring", 1, PAGE)
    except OSError:
        return True
    return False


ENGINES = ["threads"] if refuses_io_uring() else ["threads", "io_uring"]
all_engines = pytest.mark.parametrize("engine", ENGINES)


class File:
    """Random bytes, not a whole number of pages, open for direct reads."""

    def __init__(self, path: Path) -> None:
        self.content = np.random.default_rng(2).integers(0, 256, 3 * MIB + 1234, dtype=np.uint8)
        path.write_bytes(self.content.tobytes())
        self.fd, self.direct = native.open_direct(str(path))


@pytest.fixture(scope="module")
def file() -> Iterator[File]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # /tmp may have no disk
        opened = File(Path(folder) / "random")
        yield opened
        os.close(opened.fd)


@pytest.fixture(scope="module")
def memory() -> native.Memory:
    return native.Memory(8 * MIB)


LOADS = st.lists(st.tuples(st.integers(0, 767), st.integers(0, 400), st.integers(0, 1600)), max_size=12)


@settings(deadline=None)
@given(
    loads=LOADS,
    block=st.sampled_from([PAGE, 3 * PAGE, 64 * 1024, MIB, 64 * MIB]),
    depth=st.sampled_from([1, 2, 3, 8]),
    engine=st.sampled_from(ENGINES),
    most=st.sampled_from([0, PAGE, 5 * PAGE]),
)
def test_loads_give_the_bytes_of_the_file(
    file: File, memory: native.Memory, loads: list[tuple[int, int, int]], block: int, depth: int, engine: str, most: int
) -> None:
    """Loads (first page, pages, page of memory) may write where others do: the later one wins. `most`: what a read
    returns at a time; 0: all."""
    reader = native.Reader(engine, depth, block)
    if most:
        reader.inject(1, 0, most)
    seen = np.frombuffer(memory, np.uint8)
    seen[:] = 0xEE
    wanted = seen.copy()
    begun = []
    for first, pages, into in loads:
        pages = min(pages, 768 - first)
        data = file.content[first * PAGE : (first + pages) * PAGE]
        wanted[into * PAGE : into * PAGE + data.size] = data
        begun.append((reader.start(file.fd, first * PAGE, memory.address + into * PAGE, pages * PAGE), data.size))
    assert [load.wait() for load, _ in begun] == [nbytes for _, nbytes in begun]
    assert np.array_equal(seen, wanted)
    assert reader.bytes_read == sum(nbytes for _, nbytes in begun)
    assert all(load.done and load.arrived == nbytes for load, nbytes in begun)
    reader.close()


@all_engines
@pytest.mark.parametrize("block", [PAGE, 64 * 1024, 16 * MIB])
@pytest.mark.parametrize("depth", [1, 4])
def test_the_end_of_the_file(engine: str, depth: int, block: int, file: File, memory: native.Memory) -> None:
    reader = native.Reader(engine, depth, block)
    rest = file.content[700 * PAGE :]
    assert reader.start(file.fd, 700 * PAGE, memory.address, 2 * MIB).wait() == rest.size
    assert np.array_equal(np.frombuffer(memory, np.uint8)[: rest.size], rest)
    assert reader.start(file.fd, 4 * MIB, memory.address, MIB).wait() == 0
    assert reader.read(file.fd, 700 * PAGE, memory.address, 2 * MIB) == rest.size
    reader.close()


@all_engines
@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_an_error_says_how_far_it_came(engine: str, at: int, file: File, memory: native.Memory) -> None:
    reader = native.Reader(engine, 1, 16 * PAGE)
    reader.inject(at, errno.EIO, forever=False)
    load = reader.start(file.fd, 0, memory.address, 128 * PAGE)
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            load.wait()
        assert caught.value.errno == errno.EIO
    assert load.arrived == (at - 1) * 16 * PAGE == reader.bytes_read
    assert reader.start(file.fd, 0, memory.address, 128 * PAGE).wait() == 128 * PAGE
    reader.close()


@all_engines
def test_a_true_error_has_its_number(engine: str, file: File, memory: native.Memory) -> None:
    reader = native.Reader(engine, 2, MIB)
    closed = os.dup(file.fd)
    os.close(closed)
    for fd, address, code in [(closed, memory.address, errno.EBADF), (file.fd, PAGE, errno.EFAULT)]:
        for read in (lambda fd, to: reader.start(fd, 0, to, PAGE).wait(), lambda fd, to: reader.read(fd, 0, to, PAGE)):
            with pytest.raises(OSError) as caught:
                read(fd, address)
            assert caught.value.errno == code
    for offset, nbytes in ((-1, 1), (0, -1)):
        with pytest.raises(ValueError):
            reader.start(file.fd, offset, memory.address, nbytes)
    reader.close()


@all_engines
def test_closing_leaves_nothing_under_way(engine: str, file: File, memory: native.Memory) -> None:
    """What was begun arrives or fails, and soon; nobody waits for ever."""
    for _ in range(20):
        reader = native.Reader(engine, 2, PAGE)
        loads = [reader.start(file.fd, 0, memory.address + i * MIB, MIB) for i in range(4)]
        reader.close()
        reader.close()
        assert all(load.done for load in loads)
        for load in loads:
            try:
                assert load.wait() == MIB
            except OSError as error:
                assert error.errno == errno.ECANCELED
        with pytest.raises(ValueError, match="closed"):
            reader.start(file.fd, 0, memory.address, PAGE)


@all_engines
def test_spans_are_on_the_clock_of_perf_counter(engine: str, file: File, memory: native.Memory) -> None:
    reader = native.Reader(engine, 2, 64 * 1024)
    before_s = time.perf_counter()
    load = reader.start(file.fd, 0, memory.address, MIB)
    load.wait()
    start_s, end_s = load.span_s
    assert before_s <= start_s <= end_s <= time.perf_counter()
    reader.close()


def test_wrong_arguments_and_a_kernel_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (("aio", 1, PAGE), ("threads", 0, PAGE), ("threads", 257, PAGE), ("threads", 1, 0)):
        with pytest.raises(ValueError):
            native.Reader(*wrong)
    true_reader = native.Reader

    def refuse(engine: str, *how: Any) -> Any:
        if engine == "io_uring":
            raise PermissionError(errno.EPERM, "not here")
        return true_reader(engine, *how)

    monkeypatch.setattr(native, "Reader", refuse)
    assert movers.new_reader("io_uring", 2, PAGE).engine == "threads"
