"""Stores a service's KV pages, brings them back and copies them, as its scheduler says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from penstock.errors import StorageFailed
from penstock.serve.kv_store import KvStore
from penstock.serve.pages import Copied, Move, Restore, Save
from penstock.serve.session import Session


class Keeper:
    """`store`: where pages are kept; None for nowhere. `saves`: whether pages are still stored. It becomes false when
    the store fails."""

    def __init__(self, session: Session, store: KvStore | None) -> None:
        self._session, self._store = session, store
        self.saves = store is not None

    @property
    def stored(self) -> Callable[[bytes], bool]:
        """Whether the page of a digest is in the store."""
        return (lambda _: False) if self._store is None else self._store.__contains__

    def keep(self, page: int, digest: bytes) -> None:
        """Stores a page. Where the store fails, no more are stored. Raises what the saves of the last pass raised."""
        if self._store is None or not self.saves:
            return
        pages = self._session.settled_kv()
        try:
            self._store.save(digest, pages.read(page))
        except StorageFailed as error:
            warnings.warn(f"KV is not kept any more: {error.message}", stacklevel=2)
            self.saves = False

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
