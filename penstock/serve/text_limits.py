"""Computes the limits of a request to the tokenizer's process: processor time, memory, bytes of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.runtime import host
from penstock.serve.confined import ChildLimits
from penstock.serve.text_files import TOKENIZER, text_bytes
from penstock.store.packed import TOKENIZER_PEAK
from penstock.units import MIB

# Each limit has a flat part, and parts that grow with the model's files and with the user's text. To open a file of
# 15 MB takes 0.9 s of processor time, to encode a text 0.6 µs a byte. In memory a byte of the file takes 9 to 27 bytes,
# one of the text 155. With 4 s as flat part, hostile files of a few KB took over 5 s by the clock on a busy machine.
_CPU_S, _CPU_S_PER_FILE_BYTE, _CPU_S_PER_BYTE = 2.0, 2e-7, 4e-6
_MEMORY_BYTES, _MEMORY_PER_BYTE = 128 * MIB, 256
_ANSWER_BYTES, _ANSWER_PER_BYTE = 1 << 20, 64

# The child's share of PROCESS_BYTES. The child peaks at 12 MiB, with jinja2 at 19 MiB; this process at 55 MiB beside
# its arenas.
_CHILD_BYTES = 24 * MIB
# The part of that share for pages of its libraries, which are the child's alone and which its limit does not count:
# 5 MiB were seen.
_LIBRARY_BYTES = 6 * MIB


@dataclass(frozen=True, slots=True)
class TextLimits:
    """The limits for one folder, whose files have `file_bytes` together. `within_bytes`: the most memory of this
    process and the child together; None where the user has set no limit."""

    folder: Path
    file_bytes: int
    within_bytes: int | None

    @classmethod
    def of(cls, folder: Path, within_bytes: int | None) -> TextLimits:
        """The limits for a folder, whose files are measured now."""
        return cls(folder, text_bytes(folder), within_bytes)

    def now(self, doing: str, text_bytes: int = 0, file: Path | None = None) -> ChildLimits:
        """The limits of a request that is made now. `text_bytes`: of the user's text. `file`: the file that the request
        needs; None for the tokenizer's."""
        memory_bytes = _MEMORY_BYTES + TOKENIZER_PEAK * self.file_bytes + _MEMORY_PER_BYTE * text_bytes
        hint = ""
        if self.within_bytes is not None:
            # The child may take the bytes that the plan counts for it, or all that this process leaves now, if more.
            planned_bytes = _CHILD_BYTES + TOKENIZER_PEAK * self.file_bytes
            left_bytes = max(planned_bytes, self.within_bytes - host.rss_bytes()) - _LIBRARY_BYTES
            if left_bytes < memory_bytes:
                memory_bytes, hint = left_bytes, ", all that --host-memory leaves it"
        return ChildLimits(
            doing,
            file or self.folder / TOKENIZER,
            _CPU_S + _CPU_S_PER_FILE_BYTE * self.file_bytes + _CPU_S_PER_BYTE * text_bytes,
            memory_bytes,
            _ANSWER_BYTES + _ANSWER_PER_BYTE * text_bytes,
            hint=hint,
        )
