"""Stores a service's KV pages, brings them back and copies them, as its scheduler says."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence

from penstock.errors import StorageFailed
from penstock.serve.kv_store import KvStore
from penstock.serve.pages import Copied, Move, Restore, Save
from penstock.serve.session import Session


class Keeper:
    """`store`: where pages are kept; None for nowhere. `pause_s`: after the store failed, no page is stored for so
    long. Its disk may have room again then."""

    def __init__(self, session: Session, store: KvStore | None, pause_s: float = 60.0) -> None:
        self._session, self._store, self._pause_s = session, store, pause_s
        self._again_s = 0.0  # by time.monotonic: until then no page is stored

    @property
    def saves(self) -> bool:
        """Whether pages are stored now."""
        return self._store is not None and time.monotonic() >= self._again_s

    @property
    def stored(self) -> Callable[[bytes], bool]:
        """Whether the page of a digest is in the store."""
        return (lambda _: False) if self._store is None else self._store.__contains__

    def keep(self, page: int, digest: bytes) -> None:
        """Stores a page. Where the store fails, the page is not kept, and no other is for a while. Raises what the
        saves of the last pass raised."""
        if self._store is None or not self.saves:
            return
        pages = self._session.settled_kv()
        try:
            self._store.save(digest, pages.read(page))
        except StorageFailed as error:
            warnings.warn(f"KV is not kept for {self._pause_s:.0f} s: {error.message}", stacklevel=2)
            self._again_s = time.monotonic() + self._pause_s

    def move(self, moves: Sequence[Move]) -> bool:
        """Stores pages, brings them back and copies them, in this order. False where a stored page is not what was
        stored. Raises as `keep`, and StorageFailed where KV lies on a disk that fails."""
        if self._store is not None and any(isinstance(move, Save) for move in moves):
            self._store.use(move.digest for move in moves if isinstance(move, Restore))
        for move in moves:
            if isinstance(move, Save):
                self.keep(move.page, move.digest)
                continue
            pages = self._session.settled_kv()
            if isinstance(move, Copied):
                pages.copy(move.source, move.page)
            elif self._store is None or not self._store.load(move.digest, pages.rooms(move.page)):
                return False
        return True
