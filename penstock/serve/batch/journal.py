"""The file of answers, which is its own journal: a line is added when it is whole, and lines that are there are not
answered again.

An answer's id tells the line, its place and the model that it was asked of (`Lines.id_of`). So a file that was begun
shows by itself what is done, and whether it is of these requests at all. Nothing else is ever written to.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import BadRequest, BrokenModel, StorageFailed
from penstock.serve.batch.lines import Lines
from penstock.store.files import open_to_append, sync_folder
from penstock.units import MIB

_SYNC_S = 1.0  # a power cut costs the answers of so many seconds; if the process ends, none are lost
_BEGINS = b'{"id": "'
_LOOKED_AT_BYTES = 64  # of a line, in which its id is


class OtherAnswers(BadRequest):
    """The file of answers was begun for other requests, with other flags, or by another model."""


class Journal:
    """The answers to `lines` in `file`, which may be new, empty, or begun by an earlier run: then a last line that was
    cut off is taken away. `done`: the numbers of the lines that have an answer.

    Raises OtherAnswers where the file holds anything else; BadRequest where it cannot be written, is the file of the
    requests, or is being written by another process."""

    def __init__(self, file: Path, lines: Lines) -> None:
        self._file, self._lines = file, lines
        self.done: set[int] = set()
        self._synced_s = time.monotonic()
        try:
            self._fd = open_to_append(file)
        except OSError as error:
            raise BadRequest(f"{file} cannot be written: {error.strerror}") from None
        except BrokenModel as error:
            raise BadRequest(error.message) from None
        try:
            if lines.is_same_file(self._fd):
                raise BadRequest(f"{file} is the file of the requests: name another one for the answers")
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadRequest(f"another process is writing answers to {file}") from None
            except OSError as error:
                raise BadRequest(f"{file} cannot be locked: {error.strerror}") from None
            with suppress(OSError):
                sync_folder(file.parent)
            self._bytes = self._read_back()
            if self._bytes < os.fstat(self._fd).st_size:
                os.ftruncate(self._fd, self._bytes)
        except BaseException:
            os.close(self._fd)
            raise

    def id_of(self, number: int) -> str:
        return self._lines.id_of(number)

    def add(self, number: int, custom_id: str | None, response: Any, error: Any = None) -> None:
        """Adds a line's answer. Raises StorageFailed, and then the file is as it was before."""
        record = {"id": self.id_of(number), "custom_id": custom_id, "response": response, "error": error}
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += os.write(self._fd, line[written:])
            if time.monotonic() - self._synced_s > _SYNC_S:
                self.sync()
        except OSError as error:
            os.ftruncate(self._fd, self._bytes)
            raise StorageFailed(
                f"cannot write to {self._file}: {error.strerror}; {len(self.done)} of {len(self._lines)} lines are"
                " done, and the same command goes on from there"
            ) from None
        self._bytes += len(line)
        self.done.add(number)

    def sync(self) -> None:
        """Returns once the added lines survive a power cut. Raises OSError."""
        os.fsync(self._fd)
        self._synced_s = time.monotonic()

    def close(self) -> None:
        with suppress(OSError):  # of a disk that is full: what was added is in the file
            self.sync()
        os.close(self._fd)

    def _read_back(self) -> int:
        """Notes which lines are done. Returns the bytes of whole lines. Raises OtherAnswers."""
        with os.fdopen(os.dup(self._fd), "rb") as stream:
            whole = 0
            while line := stream.readline(_LOOKED_AT_BYTES):
                nbytes, piece = len(line), line
                while not piece.endswith(b"\n") and (piece := stream.readline(MIB)):
                    nbytes += len(piece)
                text = line[len(_BEGINS) :].decode("ascii", "replace")
                line_id, ends, _ = text.partition('"')
                is_ours = line[: len(_BEGINS)] == _BEGINS[: len(line)]
                number = self._lines.number_of(line_id) if is_ours and ends else None
                is_whole = piece.endswith(b"\n")
                if number is not None and is_whole:
                    self.done.add(number)
                    whole += nbytes
                elif is_ours and not is_whole and (number is not None or self._lines.begins_id(text)):
                    return whole  # the last line, which was cut off
                else:
                    raise self._not_ours(len(self.done) + 1)
            return whole

    def _not_ours(self, line: int) -> OtherAnswers:
        return OtherAnswers(
            f"{self._file} stays: its line {line} is no answer to a line of {self._lines.file} by this model and with"
            " these flags; name another file for the answers"
        )
