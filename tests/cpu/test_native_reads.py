"""Several reads in flight: whatever the block, the depth and the engine, the bytes are those of plain reads."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import _native as native
from penstock.runtime import movers
from penstock.units import MIB
from tests.cpu.random_file import RandomFile, random_file

PAGE = 4096


def refuses_io_uring() -> bool:
    try:
        native.Reader("io_uring", 1, PAGE)
    except OSError:
        return True
    return False


ENGINES = ["threads"] if refuses_io_uring() else ["threads", "io_uring"]
all_engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(scope="module")
def file() -> Iterator[RandomFile]:
    with random_file(3 * MIB + 1234) as opened:
        yield opened


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
    file: RandomFile,
    memory: native.Memory,
    loads: list[tuple[int, int, int]],
    block: int,
    depth: int,
    engine: str,
    most: int,
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
def test_the_end_of_the_file(engine: str, depth: int, block: int, file: RandomFile, memory: native.Memory) -> None:
    reader = native.Reader(engine, depth, block)
    rest = file.content[700 * PAGE :]
    assert reader.start(file.fd, 700 * PAGE, memory.address, 2 * MIB).wait() == rest.size
    assert np.array_equal(np.frombuffer(memory, np.uint8)[: rest.size], rest)
    assert reader.start(file.fd, 4 * MIB, memory.address, MIB).wait() == 0
    assert reader.read(file.fd, 700 * PAGE, memory.address, 2 * MIB) == rest.size
    reader.close()


def checksums(file: RandomFile, stride: int, wrong: Iterable[int] = ()) -> native.Sums:
    """Of all whole granules of the file; those of `wrong` do not fit."""
    count = file.content.size // stride
    found = np.frombuffer(native.granule_sums(file.content.ctypes.data, count, stride), np.uint64).copy()
    found[list(wrong)] ^= 1
    return native.Sums(found.tobytes())


@settings(deadline=None)
@given(
    stride=st.integers(1, 40),
    loads=st.lists(
        st.tuples(st.integers(0, 700), st.integers(0, 400), st.integers(0, 100), st.booleans()), max_size=12
    ),
    wrong=st.sets(st.integers(0, 700), max_size=3),
    block=st.sampled_from([PAGE, 3 * PAGE, 64 * 1024, MIB, 64 * MIB]),
    depth=st.sampled_from([1, 2, 3, 8]),
    engine=st.sampled_from(ENGINES),
    most=st.sampled_from([0, PAGE, 5 * PAGE]),
)
def test_each_granule_is_compared_until_it_was_right(
    file: RandomFile, memory: native.Memory, stride: int, loads: list[tuple[int, int, int, bool]], wrong: set[int],
    block: int, depth: int, engine: str, most: int,
) -> None:  # fmt: skip
    """Loads (first granule, granules, page of memory, whether it is read by the calling thread), whatever the blocks: a
    load says which of its granules is the first wrong one, and keeps what comes before it."""
    count = 768 // stride
    wrong = {g % count for g in wrong}
    sums = checksums(file, stride * PAGE, wrong)
    reader = native.Reader(engine, depth, block)
    if most:
        reader.inject(1, most_bytes=most)
    seen: set[int] = set()
    begun = []
    for first, granules, into, here in loads:
        lo = first % count
        hi = min(lo + granules % 50, count)
        where = (file.fd, lo * stride * PAGE, memory.address + into * PAGE, (hi - lo) * stride * PAGE)
        expected = next((g for g in range(lo, hi) if g in wrong), None)
        if not here:
            begun.append((reader.start(*where, sums, lo, stride * PAGE), lo, hi, expected))
            continue
        for load, *_ in begun:  # or they might write over it
            with suppress(native.Damaged):
                load.wait()
        if expected is None:
            assert reader.read(*where, sums, lo, stride * PAGE) == where[3]
        else:
            with pytest.raises(native.Damaged) as caught:
                reader.read(*where, sums, lo, stride * PAGE)
            assert caught.value.args == (expected - lo,)
        got = np.frombuffer(memory, np.uint8)[into * PAGE :][: where[3]]
        assert np.array_equal(got, file.content[where[1] :][: where[3]])
        seen |= set(range(lo, hi if expected is None else expected))
    for load, lo, hi, expected in begun:
        nbytes = (hi if expected is None else expected) * stride * PAGE - lo * stride * PAGE
        for _ in range(2):
            if expected is None:
                assert load.wait() == nbytes
            else:
                with pytest.raises(native.Damaged) as caught:
                    load.wait()
                assert caught.value.args == (expected - lo,)
        assert load.done and load.arrived == nbytes
        seen |= set(range(lo, hi if expected is None else expected))
    assert all(sums.checked(g, 1) for g in seen) and not any(sums.checked(g, 1) for g in wrong)
    reader.close()


@all_engines
@pytest.mark.parametrize("block", [PAGE, 3 * PAGE, MIB])
def test_what_was_right_once_is_not_compared_again(
    engine: str, block: int, file: RandomFile, memory: native.Memory, tmp_path: Path
) -> None:
    sums, other = checksums(file, 2 * PAGE), tmp_path / "other"
    other.write_bytes(bytes(MIB))
    reader = native.Reader(engine, 2, block)
    assert reader.start(file.fd, 0, memory.address, 16 * PAGE, sums, 0, 2 * PAGE).wait() == 16 * PAGE
    assert reader.read(file.fd, 16 * PAGE, memory.address, 2 * PAGE, sums, 8, 2 * PAGE) == 2 * PAGE
    assert sums.checked(0, 9) and not sums.checked(9, 1)
    with other.open("rb") as zeros:
        assert reader.start(zeros.fileno(), 0, memory.address, 18 * PAGE, sums, 0, 2 * PAGE).wait() == 18 * PAGE
        load = reader.start(zeros.fileno(), 0, memory.address, 20 * PAGE, sums, 0, 2 * PAGE)
        with pytest.raises(native.Damaged) as caught:
            load.wait()
        assert caught.value.args == (9,) and load.arrived == 18 * PAGE
        with pytest.raises(native.Damaged):
            reader.read(zeros.fileno(), 0, memory.address, 2 * PAGE, sums, 9, 2 * PAGE)
    reader.close()


@all_engines
@pytest.mark.parametrize(("at", "wrong"), [(3, 2), (2, 5), (4, 30)])
def test_of_an_error_and_a_wrong_granule_the_first_is_told(
    engine: str, at: int, wrong: int, file: RandomFile, memory: native.Memory
) -> None:
    """Blocks of 4 pages; the read of block `at` fails. Granules of 2 pages."""
    sums = checksums(file, 2 * PAGE, [wrong])
    reader = native.Reader(engine, 1, 4 * PAGE)
    reader.inject(at, errno.EIO, forever=False)
    load = reader.start(file.fd, 0, memory.address, 64 * PAGE, sums, 0, 2 * PAGE)
    damaged_first = 2 * wrong < 4 * (at - 1)
    with pytest.raises(native.Damaged if damaged_first else OSError):
        load.wait()
    assert load.arrived == (2 * wrong if damaged_first else 4 * (at - 1)) * PAGE
    reader.inject(0)
    again = reader.start(file.fd, 0, memory.address, 64 * PAGE, sums, 0, 2 * PAGE)
    with pytest.raises(native.Damaged):
        again.wait()
    reader.close()


@all_engines
def test_closing_waits_for_what_is_being_compared(engine: str, file: RandomFile, memory: native.Memory) -> None:
    for _ in range(20):
        reader = native.Reader(engine, 2, 8 * PAGE)
        sums = checksums(file, 4 * PAGE)
        loads = [reader.start(file.fd, 0, memory.address + i * MIB, MIB, sums, 0, 4 * PAGE) for i in range(4)]
        reader.close()
        for load in loads:
            assert load.done
            try:
                assert load.wait() == MIB
            except OSError as error:
                assert error.errno == errno.ECANCELED


@all_engines
def test_closing_beside_threads_that_wait(engine: str, file: RandomFile, memory: native.Memory) -> None:
    """Whoever waits for a load takes results too. Not those of a reader that closes: its thread has to hear the bell,
    and a closed one has none."""
    for _ in range(200):
        reader = native.Reader(engine, 2, PAGE)
        loads = [reader.start(file.fd, 0, memory.address + i * MIB, 4 * PAGE) for i in range(8)]

        def wait(loads: list[native.Begun] = loads) -> None:
            for load in reversed(loads):
                with suppress(OSError):
                    load.wait()

        waiting = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
        for thread in waiting:
            thread.start()
        reader.close()
        for thread in waiting:
            thread.join(600)
        assert all(load.done for load in loads) and not any(thread.is_alive() for thread in waiting)


def test_wrong_checksums_are_refused(file: RandomFile, memory: native.Memory) -> None:
    reader, sums = native.Reader("threads", 1, PAGE), checksums(file, PAGE)
    for nbytes, first, stride in (
        (PAGE, 0, 0),
        (PAGE, 0, 240),
        (3 * PAGE, 0, 2 * PAGE),
        (PAGE, 768, PAGE),
        (PAGE, -1, PAGE),
    ):
        for read in (reader.start, reader.read):
            with pytest.raises(ValueError):
                read(file.fd, 0, memory.address, nbytes, sums, first, stride)
    reader.close()


@all_engines
@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_an_error_says_how_far_it_came(engine: str, at: int, file: RandomFile, memory: native.Memory) -> None:
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
def test_a_true_error_has_its_number(engine: str, file: RandomFile, memory: native.Memory) -> None:
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
def test_closing_leaves_nothing_under_way(engine: str, file: RandomFile, memory: native.Memory) -> None:
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
def test_spans_are_on_the_clock_of_perf_counter(engine: str, file: RandomFile, memory: native.Memory) -> None:
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
