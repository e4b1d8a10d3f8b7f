"""Locks on folders between processes: shared while a folder is read, exclusive while it is written or removed."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path


class FolderLock:
    """An flock on an open folder. It ends with `close`, with the object, or with the process however that ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    def is_at(self, folder: Path) -> bool:
        """Whether the locked folder still has this name, and not another folder or none."""
        try:
            return os.path.samestat(os.fstat(self._fd), folder.stat())
        except OSError:
            return False

    def close(self) -> None:
        """A second call does nothing."""
        self._close()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_folder(folder: Path, *, exclusive: bool, wait: bool) -> FolderLock | None:
    """The lock; None where the folder is not there, or where another holder stands against it and `wait` is False.

    Two locks of one process stand against each other as those of two processes do. On a file system without locks
    nobody stands against anybody. Raises OSError for what is no folder or may not be opened.
    """
    how = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
    while True:
        try:
            lock = FolderLock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock._fd, how)
        except BlockingIOError:
            lock.close()
            return None
        except OSError:
            return lock
        if lock.is_at(folder):
            return lock
        lock.close()  # it was renamed or removed meanwhile: the name may be another folder's now
