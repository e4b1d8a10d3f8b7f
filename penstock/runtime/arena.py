"""Allocates the memory of a plan's arenas, once and before the first pass. `graph.arenas` computed the sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import _native
from penstock.errors import InternalError, StorageFailed
from penstock.graph.tasks import Slot
from penstock.runtime import host
from penstock.spec.places import GPU, is_disk
from penstock.spec.plan import Plan
from penstock.units import format_bytes


class Arenas:
    """The bytes of every arena that the host can see, by the arena's name.

    Memory of the host is in huge pages where the system grants them. `on_device(name, nbytes)` takes memory of the
    device for an arena; it returns the bytes if the host can see them, else None. Raises StorageFailed where the
    system refuses memory, and what `on_device` raises."""

    def __init__(self, plan: Plan, on_device: Callable[[str, int], memoryview | None] | None = None) -> None:
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
                # All pages are taken now, and not at the first long prompt: now the plan can still be refused.
                memory.populate(host.usable_threads(None))
            except MemoryError:
                raise StorageFailed(
                    f"the system refused {format_bytes(arena.bytes)} of memory for {arena.name}"
                ) from None
            self._memory[arena.name] = memory
            self._bytes[arena.name] = np.frombuffer(memoryview(memory), dtype=np.uint8)
        # Kept, for `ctypes.data` takes 1 µs a time.
        self._addresses = {name: array.ctypes.data for name, array in self._bytes.items()}

    @property
    def nbytes(self) -> int:
        """Bytes that were allocated of the host's memory."""
        return sum(len(self._bytes[name]) for name in self._memory)

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
        """The first bytes of the slot as an array of this dtype and shape."""
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
        self._bytes.clear()
        self._memory.clear()
