"""Allocates the memory of a plan's arenas, once and before the first pass. `graph.arenas` computed the sizes."""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import _native
from penstock.errors import InternalError, StorageFailed
from penstock.graph.tasks import Slot
from penstock.runtime import host
from penstock.spec.places import GPU, is_disk
from penstock.spec.plan import Plan
from penstock.units import MIB, format_bytes

_TURN_BYTES = 256 * MIB  # so many bytes of pages are taken before the thread looks again whether to stop
_AT_ONCE_BYTES = 64 * MIB  # the pages of smaller arenas take some 10 ms, for which no thread is started


class Arenas:
    """The bytes of every arena that the host can see, by the arena's name.

    Memory of the host is in huge pages where the system grants them. `on_device(name, nbytes)` takes memory of the
    device for an arena; it returns the bytes if the host can see them, else None. All pages are taken before the first
    pass, and not at the first long prompt. `ahead`: a thread takes them while the caller goes on, in the order of the
    plan's arenas, which begin with the weights; `settle` waits for that thread. `written`: arenas whose pages are not
    taken, since the processor writes each byte of them before the first pass. While a thread takes pages, others wait
    longer for memory of the system, for example whoever reads a checkpoint.

    Raises StorageFailed if the system refuses memory, and what `on_device` raises."""

    def __init__(
        self,
        plan: Plan,
        on_device: Callable[[str, int], memoryview | None] | None = None,
        ahead: bool = False,
        written: Collection[str] = (),
    ) -> None:
        self._memory: dict[str, _native.Memory] = {}
        self._bytes: dict[str, NDArray[np.uint8]] = {}
        for arena in plan.arenas:
            if is_disk(arena.tier):
                continue  # a file: `KvFile` or `DiskReader` holds it
            if arena.tier == GPU.executor:
                if on_device is None:
                    raise InternalError(f"{arena.name} lies on a device, but there is none")
                if (visible_bytes := on_device(arena.name, arena.bytes)) is not None:
                    self._bytes[arena.name] = np.frombuffer(visible_bytes, dtype=np.uint8)
                continue
            try:
                memory = _native.Memory(arena.bytes, True)
            except MemoryError:
                raise StorageFailed(
                    f"the system refused {format_bytes(arena.bytes)} of memory for {arena.name}"
                ) from None
            self._memory[arena.name] = memory
            self._bytes[arena.name] = np.frombuffer(memoryview(memory), dtype=np.uint8)
        # Kept, for `ctypes.data` takes 1 µs a time.
        self._addresses = {name: array.ctypes.data for name, array in self._bytes.items()}
        self._pages = _Pages(tuple(memory for name, memory in self._memory.items() if name not in written))
        if ahead and self.nbytes > _AT_ONCE_BYTES:
            self._pages.begin()
        else:
            self._pages.take()

    @property
    def nbytes(self) -> int:
        """Bytes that were allocated of the host's memory."""
        return sum(len(self._bytes[name]) for name in self._memory)

    @property
    def taking_s(self) -> float | None:
        """Seconds that it took to take all pages. None while that is under way."""
        return self._pages.taking_s

    def settle(self) -> None:
        """Returns when all pages are taken."""
        self._pages.wait()

    def sees(self, arena: str) -> bool:
        """Whether the host sees the bytes of an arena."""
        return arena in self._bytes

    def view(self, slot: Slot) -> NDArray[np.uint8]:
        """The slot's bytes, uint8 [nbytes]."""
        return self._bytes[slot.arena][slot.lo : slot.hi]

    def whole(self, arena: str) -> NDArray[np.uint8]:
        """All bytes of an arena, uint8 [arena's bytes]."""
        return self._bytes[arena]

    def array(self, slot: Slot, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """The first bytes of the slot as an array of this dtype, [*shape]. A view."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        assert nbytes <= slot.nbytes, f"{slot} holds less than {shape} of {dtype}"
        view: NDArray[Any] = self._bytes[slot.arena][slot.lo : slot.lo + nbytes].view(dtype).reshape(shape)
        return view

    def address(self, slot: Slot) -> int:
        """The memory address of the slot's first byte."""
        return self._addresses[slot.arena] + slot.lo

    def start(self, arena: str) -> int:
        """The memory address of an arena's first byte."""
        return self._addresses[arena]

    def close(self) -> None:
        """Lets the memory go. It is freed when the last view of it is gone."""
        self._pages.stop()
        self._bytes.clear()
        self._memory.clear()


class _Pages:
    """Makes the pages of memories present, one memory after the other, with all threads. If something is read into a
    page that is not present yet, the read waits until the system has made the page."""

    def __init__(self, memories: Sequence[_native.Memory]) -> None:
        self._memories, self._stopped = memories, threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.taking_s: float | None = None

    def begin(self) -> None:
        thread = threading.Thread(target=self._take_here, name="penstock-pages", daemon=True)
        # Where the interpreter ends while a thread is in a kernel, coming back from there aborts the process.
        atexit.register(self.stop)
        try:
            thread.start()
        except RuntimeError:  # no more threads may be started: then this one does it
            atexit.unregister(self.stop)
            self.take()
        else:
            self._thread = thread

    def _take_here(self) -> None:
        try:
            self.take()
        except BaseException as failure:
            self._failure = failure
        finally:
            atexit.unregister(self.stop)

    def take(self) -> None:
        threads, start_s = host.usable_threads(None), time.perf_counter()
        for memory in self._memories:
            for lo in range(0, memory.nbytes, _TURN_BYTES):
                if self._stopped.is_set():
                    return
                memory.populate(threads, lo, min(lo + _TURN_BYTES, memory.nbytes))
        self.taking_s = time.perf_counter() - start_s

    def wait(self) -> None:
        """Waits until all pages are taken. Raises the error of the thread that took them."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Returns when no page is being taken any more."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._memories = ()
