"""A file of requests, one JSON object a line, of which a few are in memory at a time."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from penstock.errors import BadRequest, BrokenModel
from penstock.store.files import open_regular
from penstock.units import MIB, format_bytes

MOST_LINES = 200_000
# A prompt of 128k tokens has some 600 KB. Longer lines are skipped, and never in memory as a whole.
MOST_LINE_BYTES = 4 * MIB
LINE_BYTES = 300  # of memory that a line takes beside its text: where it lies, its digest, and what is known of it
_DIGEST_BYTES, _NUMBER_DIGITS = 8, 6
_ID = "batch_req_"


class LineTooLong(BadRequest):
    """A line is longer than any that is read."""


class Lines:
    """The lines of `file` that are not blank, numbered from 0. `model`: a name for the model and all that may change
    its answers. It goes into the digest of each line, and so into `id_of`.

    Raises BadRequest where the file cannot be read, or has too many lines."""

    def __init__(self, file: Path, model: str) -> None:
        self.file = file
        self._model = model.encode()
        try:
            self._stream: BinaryIO = os.fdopen(open_regular(file), "rb")
        except OSError as error:
            raise BadRequest(f"{file} cannot be read: {error.strerror}") from None
        except BrokenModel as error:
            raise BadRequest(error.message) from None
        self._offsets, self._bytes, self._digests = array("q"), array("q"), bytearray()
        try:
            for offset, nbytes, digest in self._scan():
                if len(self._offsets) >= MOST_LINES:
                    raise BadRequest(f"{file} has more than {MOST_LINES} lines: split it")
                self._offsets.append(offset)
                self._bytes.append(nbytes)
                self._digests += digest
        except BaseException:
            self._stream.close()
            raise

    def __len__(self) -> int:
        return len(self._offsets)

    def close(self) -> None:
        self._stream.close()

    def is_same_file(self, fd: int) -> bool:
        """Whether a descriptor is of this very file."""
        return os.path.samestat(os.fstat(fd), os.fstat(self._stream.fileno()))

    def text(self, number: int) -> bytes:
        """A line's bytes. Raises LineTooLong, and BadRequest where it is not what it was when the file was opened."""
        nbytes = self._bytes[number]
        if nbytes > MOST_LINE_BYTES:
            raise LineTooLong(f"a line may have {format_bytes(MOST_LINE_BYTES)}; this one has {format_bytes(nbytes)}")
        self._stream.seek(self._offsets[number])
        line = self._stream.read(nbytes)
        if self._digest(number, line) != self._digest_of(number):
            raise BadRequest(f"{self.file} was changed while it was being answered: line {number + 1}")
        return line

    def id_of(self, number: int) -> str:
        """An id that belongs to this line, at this place, asked of this model, and to nothing else."""
        return f"{_ID}{number:0{_NUMBER_DIGITS}x}{self._digest_of(number).hex()}"

    def number_of(self, line_id: object) -> int | None:
        """The line that has this id; None where none has."""
        number = self._number_in(line_id) if isinstance(line_id, str) else None
        return number if number is not None and self.id_of(number) == line_id else None

    def begins_id(self, text: str) -> bool:
        """Whether an id of one of the lines begins with this."""
        if len(text) < len(_ID) + _NUMBER_DIGITS:
            return _ID.startswith(text[: len(_ID)]) and _is_hex(text[len(_ID) :])
        number = self._number_in(text)
        return number is not None and self.id_of(number).startswith(text)

    def _number_in(self, text: str) -> int | None:
        digits = text[len(_ID) : len(_ID) + _NUMBER_DIGITS]
        if not text.startswith(_ID) or len(digits) < _NUMBER_DIGITS or not _is_hex(digits):
            return None
        number = int(digits, 16)
        return number if number < len(self) else None

    def _digest(self, number: int, line: bytes) -> bytes:
        return blake2b(b"%d " % number + line, digest_size=_DIGEST_BYTES, key=self._key).digest()

    @property
    def _key(self) -> bytes:
        return blake2b(self._model, digest_size=32).digest()

    def _digest_of(self, number: int) -> bytes:
        return bytes(self._digests[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES])

    def _scan(self) -> Iterator[tuple[int, int, bytes]]:
        """(offset, bytes, digest) of each line that is not blank. Of one that is too long the beginning is digested."""
        offset = number = 0
        while line := self._stream.readline(MOST_LINE_BYTES + 1):
            nbytes = len(line)
            rest = line
            while not rest.endswith(b"\n") and (rest := self._stream.readline(MIB)):
                nbytes += len(rest)
            if line.strip() or nbytes > MOST_LINE_BYTES:
                yield offset, nbytes, self._digest(number, line)
                number += 1
            offset += nbytes


def _is_hex(text: str) -> bool:
    return set(text) <= set("0123456789abcdef")
