"""How long a model may think: where it has thought enough, the end of its thoughts is put into the answer."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.tools.writing import THINK, THOUGHT

THOUGHT_ENDS = f"{THOUGHT}\n\n"  # what is put in


class Budget:
    """Of one answer. `limit`: the most tokens of thought. `end_ids`: ids of `THOUGHT_ENDS`. `begun`: the answer begins
    in the middle of thoughts; else it thinks where it begins with `THINK`."""

    def __init__(self, limit: int, end_ids: Sequence[int], begun: bool) -> None:
        self._left, self._end_ids, self._begun = limit, list(end_ids), begun
        self._text = ""
        self._open = True  # whether the answer thinks, or may still begin to

    def forced(self) -> int | None:
        """The token that has to come next; None where any may."""
        thinks = self._begun or self._text.lstrip().startswith(THINK)
        return self._end_ids[0] if self._open and thinks and self._left <= 0 and self._end_ids else None

    def take(self, forced: bool, text: str) -> None:
        """The answer has one more token, by which this text has become certain."""
        self._left -= 1
        self._text += text
        if forced:
            self._end_ids.pop(0)
            self._open = bool(self._end_ids)
            return
        begins = self._text.lstrip()[: len(THINK)]
        self._open &= THOUGHT not in self._text and (self._begun or THINK.startswith(begins))
