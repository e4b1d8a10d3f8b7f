"""Locks folders between processes: shared while a folder is read, exclusive while it is written or removed."""

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
        """Ends the lock. A second call does nothing."""
        self._close()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_folder(folder: Path, *, exclusive: bool, wait: bool) -> FolderLock | None:
    """Locks a folder. None where the folder is not there, or where another lock is in the way and `wait` is False.

    Two locks of one process are in each other's way as those of two processes are. On a file system without locks no
    lock is in the way. Raises OSError for anything but a folder, and for a folder that may not be opened.
    """
    operation = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
    while True:
        try:
            lock = FolderLock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock._fd, operation)
        except BlockingIOError:
            lock.close()
            return None
        except OSError:
            return lock
        if lock.is_at(folder):
            return lock
        lock.close()  # the folder was renamed or removed meanwhile: another one may have its name now
