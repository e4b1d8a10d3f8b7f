"""Reads and writes whole KV pages at their home, for whoever keeps them elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock import _native
from penstock.errors import BadRequest
from penstock.graph.kv_layout import KvLayout
from penstock.runtime.arena import Arenas
from penstock.runtime.kv_file import KvFile
from penstock.spec.places import is_disk
from penstock.units import MIB

_BUFFER_BYTES = MIB  # KV on a disk goes through a buffer of this size on its way from one file to another


class KvPages:
    """The pages of a loaded plan, by their group's number (`KvLayout.page_group`). Not to be used while a task that
    writes KV is under way. `page_bytes`: the bytes of a page in all layers together.

    `read` and `rooms` go through a page layer by layer, first K and then V, in parts of any size. A part is a view of
    memory, uint8 [n], which holds until the next part is asked for."""

    def __init__(self, layout: KvLayout, arenas: Arenas, kv_file: KvFile | None) -> None:
        self._layout, self._arenas, self._kv_file = layout, arenas, kv_file
        self.page_bytes = sum(slot.nbytes for slot in layout.page_slots(0))
        self._memory: _native.Memory | None = None

    def require_seen(self) -> None:
        """Raises BadRequest where KV lies in memory of a device that the host does not see."""
        arenas = {slot.arena for slot in self._layout.page_slots(0)}
        if not all(is_disk(arena) or self._arenas.sees(arena) for arena in arenas):
            raise BadRequest("KV in a GPU's memory cannot be kept yet: leave out --keep-kv, or give --device none")

    def read(self, page: int) -> Iterator[NDArray[np.uint8]]:
        """Yields the bytes of a page, part by part, uint8 [n]. Raises StorageFailed for KV on a disk."""
        for slot in self._layout.page_slots(page):
            if not is_disk(slot.arena):
                yield self._arenas.view(slot)
                continue
            for offset, part in self._parts(slot.lo, slot.hi):
                self._file.read([(offset, part.ctypes.data, part.nbytes)])
                yield part

    def rooms(self, page: int) -> Iterator[NDArray[np.uint8]]:
        """Yields the room for the bytes of a page, part by part, uint8 [n]. The caller fills each part before it asks
        for the next. Raises StorageFailed for KV on a disk."""
        for slot in self._layout.page_slots(page):
            if not is_disk(slot.arena):
                yield self._arenas.view(slot)
                continue
            for offset, part in self._parts(slot.lo, slot.hi):
                yield part
                self._file.write([(offset, part.data)])

    def copy(self, source: int, page: int) -> None:
        """Copies the bytes of a page in RAM, `source`, to another one (`KvLayout.copies`)."""
        for held, target in zip(self.read(source), self.rooms(page), strict=True):
            target[...] = held

    def _parts(self, lo: int, hi: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """(offset in the file of KV, so much of the buffer) for the bytes lo..hi there."""
        if self._memory is None:
            self._memory = _native.Memory(_BUFFER_BYTES, False)
        buffer = np.frombuffer(memoryview(self._memory), dtype=np.uint8)
        for offset in range(lo, hi, _BUFFER_BYTES):
            yield offset, buffer[: min(_BUFFER_BYTES, hi - offset)]

    @property
    def _file(self) -> KvFile:
        assert self._kv_file is not None, "the plan keeps KV on a disk, but no file was given"
        return self._kv_file
