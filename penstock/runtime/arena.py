"""The plan's arenas as memory: allocated once, of the sizes that `graph.arenas` computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import _native
from penstock.errors import InternalError, StorageFailed
from penstock.graph.tasks import Slot
from penstock.spec.places import GPU, is_disk
from penstock.spec.plan import Plan
from penstock.units import format_bytes


class Arenas:
    """Byte arrays by arena name, in huge pages where the system grants them; a device's where the host sees them.
    `on_device`: takes memory of the device for an arena of so many bytes."""

    def __init__(self, plan: Plan, on_device: Callable[[str, int], memoryview | None] | None = None) -> None:
        self._memory: dict[str, _native.Memory] = {}
        self._bytes: dict[str, NDArray[np.uint8]] = {}
        for arena in plan.arenas:
            if is_disk(arena.tier):
                continue  # a file, which whoever moves its bytes keeps
            if arena.tier == GPU.executor:
                if on_device is None:
                    raise InternalError(f"{arena.name} lies on a device, but there is none")
                if (seen := on_device(arena.name, arena.bytes)) is not None:
                    self._bytes[arena.name] = np.frombuffer(seen, dtype=np.uint8)
                continue
            try:
                memory = _native.Memory(arena.bytes, True)
                # Now, not at the first long prompt: what was promised to fit is taken while we can still say no.
                memory.populate()
            except MemoryError:
                raise StorageFailed(
                    f"the system refused {format_bytes(arena.bytes)} of memory for {arena.name}"
                ) from None
            self._memory[arena.name] = memory
            self._bytes[arena.name] = np.frombuffer(memoryview(memory), dtype=np.uint8)
        self._addresses = {name: each.ctypes.data for name, each in self._bytes.items()}  # which costs 1 µs a time

    @property
    def nbytes(self) -> int:
        """What was allocated of the host's memory."""
        return sum(len(self._bytes[name]) for name in self._memory)

    def view(self, slot: Slot) -> NDArray[np.uint8]:
        """The slot's bytes, uint8 [nbytes]."""
        return self._bytes[slot.arena][slot.lo : slot.hi]

    def whole(self, arena: str) -> NDArray[np.uint8]:
        """All bytes of an arena."""
        return self._bytes[arena]

    def array(self, slot: Slot, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """The beginning of the slot as an array."""
        count = math.prod(shape) * np.dtype(dtype).itemsize
        assert count <= slot.nbytes, f"{slot} holds less than {shape} of {dtype}"
        found: NDArray[Any] = self._bytes[slot.arena][slot.lo : slot.lo + count].view(dtype).reshape(shape)
        return found

    def address(self, slot: Slot) -> int:
        return self._addresses[slot.arena] + slot.lo

    def close(self) -> None:
        """Lets the memory go; it is freed with the last view of it."""
        self._bytes.clear()
        self._memory.clear()
