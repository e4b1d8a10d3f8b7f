"""Folders in the temporary folder, for as long as they are needed; those that killed processes left are removed."""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.store.locks import lock_folder

# A digest of this machine's name is in it, for others may share the folder, and numbers of their processes say nothing
# here. The number of the process that made it follows, and eight random characters.
PREFIX = f"penstock-of-{zlib.crc32(os.fsencode(platform.node())):08x}-"
_NAME = re.compile(rf"{PREFIX}([0-9]{{1,10}})-\w{{8}}", re.ASCII)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder, which is removed at the end. Removes those of processes that were killed before. Raises OSError."""
    parent = Path(tempfile.gettempdir())
    remove_left(parent)
    # The name comes first. A signal that ended `tempfile.mkdtemp` behind its last step would leave a folder whose name
    # nobody has.
    made, lock = parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}", None
    try:
        made.mkdir(0o700)
        lock = lock_folder(made, exclusive=False, wait=True)
        yield made
    finally:
        if lock is not None:
            lock.close()
        shutil.rmtree(made, ignore_errors=True)


def remove_left(parent: Path) -> None:
    """Removes the folders that `temporary_folder` made for processes of this user which have ended.

    A folder stays where a process of its number lives, and where a lock is on it: in a container other processes have
    this number. An empty one stays too, for it may have no lock yet. What cannot be read or removed stays."""
    with suppress(OSError), os.scandir(parent) as listed:
        for entry in listed:
            match = _NAME.fullmatch(entry.name)
            if match is None or _lives(int(match[1])):
                continue
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    _remove(Path(entry.path))


def _remove(folder: Path) -> None:
    lock = lock_folder(folder, exclusive=True, wait=False)
    if lock is not None:
        with lock:
            if any(folder.iterdir()):
                shutil.rmtree(folder)


def _lives(pid: int) -> bool:
    """Whether there is a process of this number, whoever's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or a number that no process has
        return True
    return True
