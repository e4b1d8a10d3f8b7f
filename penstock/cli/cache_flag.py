"""The folder that --cache names. Errors about it name the flag."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import BadRequest, PenstockError, StorageFailed

# What is said of a folder that cannot be written to, or has no room.
_WORDS = ("too full", "became full", *(os.strerror(number) for number in (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM,
)))  # fmt: skip


@contextmanager
def naming_cache_flag(cache: str | None) -> Iterator[None]:
    """In this block errors of a disk that has no room, or cannot be written to, name --cache where they are about the
    cache. `cache`: the value of the flag. Raises what is raised in the block."""
    try:
        yield
    except StorageFailed as error:
        if _is_about(error.message, cache):
            error.message += " (--cache DIR names another place)"
            error.args = (error.message,)
        raise
    except OSError as error:
        if error.filename is not None and error.strerror and _is_about(f"{error.filename}: {error.strerror}", cache):
            message = f"{os.fsdecode(error.filename)}: {error.strerror} (--cache DIR names another place)"
            raise StorageFailed(message) from None
        raise


def _is_about(message: str, cache: str | None) -> bool:
    try:
        folder = cache_folder(cache)
    except PenstockError:
        return False
    named = any(str(path) in message for path in {folder, folder.absolute()} if path.name)
    return named and "--cache" not in message and any(word in message for word in _WORDS)


def cache_folder(name: str | None) -> Path:
    """The folder of --cache; without that flag $XDG_CACHE_HOME/penstock if that is an absolute path, else the default.
    Raises BadRequest for an empty name."""
    from penstock.serve.planning import default_cache

    if name == "":
        raise BadRequest("--cache names no folder")
    if name is not None:
        return Path(os.path.expanduser(name))
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base) / "penstock" if os.path.isabs(base) else default_cache()
