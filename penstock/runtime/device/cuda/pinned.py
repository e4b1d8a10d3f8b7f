"""Pins the host's arenas, piece by piece where they lie, so that the link reads them directly.

Windows and WSL2 pin a part of RAM only, and any system may refuse. Pieces that could not be pinned are copied through
the driver's own staging: slower, and right all the same. A copy must not cross from one pinned piece into another.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from penstock.units import GIB, format_bytes

PIECE_BYTES = GIB


class Pinned:
    """The pieces of each arena. On the processor nothing is pinned, and copies may have any length."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: dict[str, list[tuple[int, int]]] = {}
        self._registered: list[int] = []  # addresses
        self._refused_bytes = self._bytes = 0

    def register(self, arena: str, address: int, nbytes: int) -> None:
        """Pins an arena of `nbytes` at `address`, as far as the system allows."""
        self._bytes += nbytes
        self._pieces[arena] = []
        for lo in range(0, nbytes, PIECE_BYTES):
            hi = min(lo + PIECE_BYTES, nbytes)
            self._pieces[arena].append((lo, hi))
            if self._refused_bytes or not self._pin(address + lo, hi - lo):
                self._refused_bytes += hi - lo  # the next ones would fare no better

    @property
    def note(self) -> str:
        """One line about memory that could not be pinned, or ""."""
        if not self._refused_bytes:
            return ""
        return (
            f"only {format_bytes(self._bytes - self._refused_bytes)} of {format_bytes(self._bytes)} of RAM could be "
            "pinned: the rest crosses the link more slowly"
        )

    def cut(self, arena: str, lo: int, hi: int) -> list[tuple[int, int]]:
        """Bytes lo..hi of an arena, cut into ranges (lo, hi) that lie within one piece each."""
        pieces = self._pieces.get(arena, [(0, hi)])
        return [(max(lo, a), min(hi, b)) for a, b in pieces if a < hi and lo < b]

    def close(self) -> None:
        """Unpins all arenas, which must still be mapped."""
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()

    def _pin(self, address: int, nbytes: int) -> bool:
        if self._device.type != "cuda":
            return bool(self._device.type == "cpu")
        if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)):
            # The refusal is also the driver's last error, which the next launch raises: here, and not in a task.
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device).add_(1)
            return False
        self._registered.append(address)
        return True
