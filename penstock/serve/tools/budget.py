"""How long a model may think: where it has thought enough, the end of its thoughts is put into the answer."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.tools.writing import THINK, THOUGHT

THOUGHT_ENDS = f"{THOUGHT}\n\n"  # what is put in


class Budget:
    """How much one answer may still think.

    limit    the most tokens of thought
    end_ids  ids of `THOUGHT_ENDS`
    begun    the prompt has opened the thoughts. Else an answer thinks if it begins with `THINK`
    """

    def __init__(self, limit: int, end_ids: Sequence[int], begun: bool) -> None:
        self._left, self._end_ids, self._begun = limit, list(end_ids), begun
        self._text = ""
        self._open = True  # whether the answer thinks, or may still begin to

    def forced(self) -> int | None:
        """The token that has to come next; None where any may."""
        return self._end_ids[0] if self._open and self._begun and self._left <= 0 and self._end_ids else None

    def take(self, forced: bool, text: str) -> None:
        """The answer has one more token, and this text has become certain with it."""
        if not self._open:
            return
        self._left -= 1
        if forced:
            self._end_ids.pop(0)
            self._open = bool(self._end_ids)
            return
        self._text = (self._text + text) if self._begun else (self._text + text).lstrip()
        if not self._begun and self._text.startswith(THINK):
            self._begun, self._text = True, self._text[len(THINK) :]
        if self._begun:
            self._open = THOUGHT not in self._text
            self._text = self._text[-len(THOUGHT) :]  # what may be the beginning of the end
        else:
            self._open = THINK.startswith(self._text)
