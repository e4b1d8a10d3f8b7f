"""The native extension: memory, direct reads, what the processor can do. Kernels have test files of their own."""

import errno
import gc
import os
import platform
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import _native as native
from penstock.kernels.cpu import available
from tests.cpu.random_file import RandomFile, random_file

MIB = 1 << 20
HUGE = 2 * MIB
PAGE = 4096


def view(memory: native.Memory) -> np.ndarray:
    return np.frombuffer(memory, np.uint8)


# --- processor -----------------------------------------------------------------------------------------------------

# Our name → the kernel's, where they differ.
KERNEL_NAMES = {"avxvnni": "avx_vnni", "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}
X86 = (
    "avx2 fma f16c avxvnni avx512f avx512bw avx512vl avx512dq avx512vnni avx512bf16 avx512vbmi "
    "amx_tile amx_int8 amx_bf16"
).split()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")
def test_features_are_those_the_kernel_reports() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split())
    assert native.cpu_features() == [name for name in X86 if KERNEL_NAMES.get(name, name) in flags]


def test_kernels_need_only_features_that_are_there() -> None:
    avx = {"avx2", "fma", "f16c"}
    needs = {"portable": set(), "avx2": avx, "avxvnni": avx | {"avxvnni"}}
    needs["avx512"] = avx | {"avx512bw", "avx512vl", "avx512dq", "avx512vnni"}
    needs |= {"neon": {"neon"}, "dotprod": {"dotprod"}, "i8mm": {"dotprod", "i8mm"}}
    features = set(native.cpu_features())
    assert set(available()) == {isa for isa, names in needs.items() if names <= features}


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, PAGE, HUGE - 1, HUGE, 3 * HUGE + 5])
@pytest.mark.parametrize("huge", [True, False])
def test_memory_is_aligned_zeroed_and_writable_to_its_last_byte(nbytes: int, huge: bool) -> None:
    memory = native.Memory(nbytes, huge=huge)
    assert memory.nbytes == nbytes
    assert memory.address % HUGE == 0
    assert huge or not memory.huge
    array = view(memory)
    assert array.ctypes.data == memory.address and array.size == nbytes and array.flags.writeable
    assert not array.any()
    array[:] = 7
    assert array.min() == 7


def test_huge_pages_are_accepted_and_arrive() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this kernel grants no transparent huge pages")
    memory = native.Memory(8 * HUGE)
    assert memory.huge
    memory.populate()
    smaps = Path("/proc/self/smaps").read_text()
    flags = smaps[smaps.index(f"{memory.address:x}-") :].split("VmFlags:", 1)[1].split("\n", 1)[0]
    assert "hg" in flags.split()  # advised; how many were granted depends on how fragmented memory is


def test_populate_makes_pages_present_and_keeps_contents() -> None:
    memory = native.Memory(64 * MIB, huge=False)
    view(memory)[5] = 9
    before = resident_bytes()
    memory.populate()
    assert resident_bytes() > before + 60 * MIB
    assert view(memory)[5] == 9 and view(memory).sum() == 9


def test_populate_takes_a_range() -> None:
    memory = native.Memory(64 * MIB, huge=False)
    before = resident_bytes()
    memory.populate(2, 16 * MIB, 32 * MIB)
    assert before + 15 * MIB < resident_bytes() < before + 20 * MIB
    memory.populate(2, 63 * MIB, 1 << 60)  # beyond the end there is nothing to take
    for lo in (1, 65 * MIB):
        with pytest.raises(ValueError, match="4096"):
            memory.populate(1, lo)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_views_keep_memory_alive_and_forbid_close() -> None:
    memory = native.Memory(HUGE)
    array = view(memory)
    with pytest.raises(BufferError, match="in use"):
        memory.close()
    tail = array[-10:]
    del memory, array
    gc.collect()
    tail[:] = 1  # would fault had the mapping gone
    assert tail.sum() == 10


def test_close_frees_once_and_for_all() -> None:
    memory = native.Memory(HUGE)
    with memoryview(memory) as bytes_view:
        assert bytes_view.nbytes == HUGE and not bytes_view.readonly and bytes_view.format == "B"
    memory.close()
    memory.close()
    assert memory.nbytes == HUGE
    for use in (lambda: memory.address, memory.populate):
        with pytest.raises(ValueError, match="closed"):
            use()
    with pytest.raises(BufferError, match="closed"):
        memoryview(memory)


def test_dropping_memory_unmaps_it() -> None:
    memory = native.Memory(64 * MIB)
    memory.populate()
    before = resident_bytes()
    del memory
    assert resident_bytes() < before - 60 * MIB


def test_impossible_sizes() -> None:
    with pytest.raises(MemoryError, match=str(1 << 60)):
        native.Memory(1 << 60)
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            native.Memory(nbytes)


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file() -> Iterator[RandomFile]:
    with random_file(5 * MIB + 1234) as opened:
        yield opened


BLOCKS = [PAGE, 3 * PAGE, 256 * 1024, 5 * 4 * 1024 * 17, MIB, 64 * MIB]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(first=st.integers(0, 1300), pages=st.integers(0, 1300), into=st.integers(0, 8), block=st.sampled_from(BLOCKS))
def test_direct_reads_give_the_bytes_of_the_file(
    file: RandomFile, first: int, pages: int, into: int, block: int
) -> None:
    offset, nbytes, start = first * PAGE, pages * PAGE, into * PAGE
    memory = native.Memory(start + max(nbytes, 1) + PAGE)
    array = view(memory)
    array[:] = 0xFF
    got = native.read_into(file.fd, offset, memory.address + start, nbytes, block)
    wanted = file.content[offset : offset + nbytes]
    assert got == wanted.size  # fewer than nbytes at the end of the file
    assert np.array_equal(array[start : start + got], wanted)
    assert (array[:start] == 0xFF).all() and (array[start + nbytes :] == 0xFF).all()


@pytest.mark.parametrize("block", [1, 777, 10 * MIB])
def test_buffered_reads_need_no_alignment(file: RandomFile, block: int) -> None:
    memory = native.Memory(PAGE)
    with open(file.path, "rb") as buffered:
        assert native.read_into(buffered.fileno(), 33, memory.address + 1, 4001, block) == 4001
        native.drop_cached(buffered.fileno(), 0, file.content.size)
        end = file.content.size
        assert native.read_into(buffered.fileno(), end - 10, memory.address, 4001, block) == 10
        assert native.read_into(buffered.fileno(), end + 10, memory.address, 4001, block) == 0
    assert np.array_equal(view(memory)[10:4002], file.content[42:4034])


def test_direct_reads_leave_no_copy_in_the_page_cache(file: RandomFile) -> None:
    if not file.direct or os.major(file.path.stat().st_dev) == 0:
        pytest.skip("no O_DIRECT here, or no disk of its own behind this file system")
    nbytes = file.content.size // PAGE * PAGE
    os.sync()
    native.drop_cached(file.fd, 0, 0)  # 0: to the end
    memory = native.Memory(nbytes)
    before = blocks_read()
    for _ in range(2):  # from the cache the second time would cost no disk
        native.read_into(file.fd, 0, memory.address, nbytes, MIB)
    assert blocks_read() - before >= 2 * nbytes


def blocks_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def test_errors_carry_errno(file: RandomFile, tmp_path: Path) -> None:
    memory = native.Memory(PAGE)
    reader, writer = os.pipe()
    closed = os.dup(file.fd)
    os.close(closed)
    try:
        for call, code in [
            (lambda: native.read_into(closed, 0, memory.address, PAGE, PAGE), errno.EBADF),
            (lambda: native.read_into(file.fd, 0, PAGE, PAGE, PAGE), errno.EFAULT),
            (lambda: native.read_into(file.fd, -PAGE, memory.address, PAGE, PAGE), errno.EINVAL),
            (lambda: native.drop_cached(closed, 0, PAGE), errno.EBADF),
            (lambda: native.drop_cached(reader, 0, PAGE), errno.ESPIPE),
        ]:
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.errno == code
    finally:
        os.close(reader)
        os.close(writer)
    with pytest.raises(FileNotFoundError, match="no such") as missing:
        native.open_direct(tmp_path / "no such")
    assert missing.value.filename == tmp_path / "no such"
    for nbytes, block in [(-1, PAGE), (PAGE, 0)]:
        with pytest.raises(ValueError):
            native.read_into(file.fd, 0, memory.address, nbytes, block)


def test_open_direct_is_read_only_and_not_inherited(file: RandomFile) -> None:
    assert not os.get_inheritable(file.fd)
    with pytest.raises(OSError):
        os.write(file.fd, b"x")


def test_open_direct_falls_back_where_there_is_no_direct_io() -> None:
    fd, direct = native.open_direct("/proc/self/cmdline")  # procfs refuses O_DIRECT
    memory = native.Memory(PAGE)
    try:
        assert not direct
        assert native.read_into(fd, 0, memory.address, PAGE, 10) > 0  # a block at a time
    finally:
        os.close(fd)


def test_reading_releases_the_gil_and_survives_signals() -> None:
    """Another Python thread counts, and a timer interrupts, while 256 MiB of zeros are read: about 50 ms."""
    memory = native.Memory(256 * MIB)
    view(memory)[:] = 1
    counted, alarms = 0, 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1

    def alarm(*_: object) -> None:
        nonlocal alarms
        alarms += 1

    thread = threading.Thread(target=count)
    usual = signal.signal(signal.SIGALRM, alarm)
    thread.start()
    try:
        with open("/dev/zero", "rb") as zero:
            signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
            before = counted
            got = native.read_into(zero.fileno(), 0, memory.address, memory.nbytes, 64 * MIB)
            during = counted - before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
        stop.set()
        thread.join()
    assert got == memory.nbytes and not view(memory).any()
    assert during > 1000 and alarms > 0


# --- probe ---------------------------------------------------------------------------------------------------------


def test_ram_read_is_timed_and_leaves_this_thread_where_it_was() -> None:
    cpus = os.sched_getaffinity(0)
    memory = native.Memory(32 * MIB + 7)
    memory.populate()
    seconds = native.ram_read_s(memory.address, memory.nbytes, threads=len(cpus), repeats=4)
    assert 1e-6 < seconds < 10  # 33 GB/s would be 0.001
    assert os.sched_getaffinity(0) == cpus
    for threads, repeats in [(0, 1), (len(cpus) + 1, 1), (1, 0)]:
        with pytest.raises(ValueError):
            native.ram_read_s(memory.address, memory.nbytes, threads, repeats)
