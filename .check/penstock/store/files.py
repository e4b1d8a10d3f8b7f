"""Small files, read with one clear line for whatever is wrong and written in one step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from penstock.errors import BrokenModel, StorageFailed


def read_bytes(file: Path, max_bytes: int) -> bytes:
    """A small file that somebody else wrote. Raises BrokenModel (missing, too long), StorageFailed."""
    try:
        size = file.stat().st_size
        if size > max_bytes:
            raise BrokenModel(f"{file} has {size} bytes; at most {max_bytes} make sense")
        return file.read_bytes()
    except FileNotFoundError:
        raise BrokenModel(f"{file} is missing") from None
    except OSError as error:
        raise StorageFailed(f"cannot read {file}: {error.strerror}") from None


def read_text(file: Path, max_bytes: int) -> str:
    """UTF-8 text that somebody else wrote. Raises BrokenModel (missing, too long, no UTF-8), StorageFailed."""
    try:
        return read_bytes(file, max_bytes).decode("utf-8")
    except UnicodeDecodeError:
        raise BrokenModel(f"{file} is not UTF-8 text") from None


def read_json(file: Path, max_bytes: int) -> dict[str, Any]:
    """A JSON object that somebody else wrote. Raises BrokenModel, StorageFailed."""
    try:
        found = json.loads(read_text(file, max_bytes))
    except (ValueError, RecursionError) as error:
        why = "it nests too deep" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise BrokenModel(f"{file} is not JSON: {why}") from None
    if not isinstance(found, dict):
        raise BrokenModel(f"{file} should hold a JSON object")
    return found


def write_bytes(file: Path, content: bytes) -> None:
    """Written aside, synced, renamed: a reader sees the old file or the whole new one. Raises OSError."""
    aside = file.with_name(file.name + ".tmp")
    try:
        with aside.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        aside.rename(file)
    finally:
        aside.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
