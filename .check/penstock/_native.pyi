"""The native extension: what Python cannot do fast, or at all. Built from csrc/.

Addresses and byte counts are plain integers; whoever passes an address keeps its memory alive until the call is over.
Everything that takes longer than microseconds releases the GIL.
"""

import os
from typing import final

from typing_extensions import Buffer

def cpu_features() -> list[str]:
    """What the processor has and the operating system lets us use: "avx2", "avx512vnni", "amx_int8", "neon" …"""

def isa() -> str:
    """The family of kernels to use here: "avx512", "avx2", "neon" or "portable"."""

@final
class Memory(Buffer):
    """Anonymous memory, zeroed, starting on a 2 MiB boundary; freed with its last view, or by `close`.

    A writable buffer of bytes: `numpy.frombuffer(memory, numpy.uint8)` looks at it without a copy and keeps it alive.
    """

    def __init__(self, nbytes: int, huge: bool = True) -> None:
        """MemoryError, with the number of bytes, if there is no address space for it."""

    @property
    def address(self) -> int:
        """ValueError once closed."""

    @property
    def nbytes(self) -> int: ...
    @property
    def huge(self) -> bool:
        """Whether the kernel accepted the advice to use huge pages."""

    def populate(self) -> None:
        """Makes every page present, so that no later access faults; contents stay."""

    def close(self) -> None:
        """Gives the memory back now. BufferError while a view of it exists; a second call does nothing."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

def read_into(fd: int, offset: int, address: int, nbytes: int, block_bytes: int) -> int:
    """Reads up to `nbytes` from `offset` to `address` in blocks of at most `block_bytes`; returns the bytes read.

    Fewer than asked for means the end of the file. A direct file wants offset, address, nbytes and block_bytes in
    multiples of its disk's sector; 4 KiB always does.
    """

def open_direct(path: str | os.PathLike[str]) -> tuple[int, bool]:
    """A read-only descriptor, and whether it bypasses the page cache (False: the file system knows no O_DIRECT)."""

def drop_cached(fd: int, offset: int, nbytes: int) -> None:
    """Tells the kernel that the page cache need not keep this range."""

def ram_read_s(address: int, nbytes: int, threads: int, repeats: int) -> float:
    """Median seconds that `threads` pinned threads take to read `nbytes` once. ValueError if there are fewer CPUs."""
