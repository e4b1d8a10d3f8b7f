"""Breaks text between words while it streams to a terminal, whose own way is to break within them."""

from __future__ import annotations

import unicodedata

_ERASE_LINE = "\033[K"
_TAB = 8


class Wrapping:
    """Text of one answer, piece by piece. `column`: the cursor's, from 0 on; the number of columns where the last one
    is written, and the next character wraps."""

    def __init__(self) -> None:
        self.column = 0
        self._word = ""  # what the cursor's line ends with

    def push(self, text: str, columns: int) -> str:
        """The codes and text to print for the next piece, on a terminal of so many columns. A word that has begun and
        does not fit is erased and begins anew in the next line. One that is wider than half a line is left to the
        terminal: languages without spaces have such, and what is copied out of it should stay one word."""
        shown = ""
        for character in text:
            if character == "\n":
                self.column, self._word = 0, ""
                shown += character
                continue
            tab = character == "\t"
            width = _TAB - self.column % _TAB if tab else width_of(character)
            back = sum(map(width_of, self._word))
            if self.column + width < columns:
                self.column += width
            elif character in " \t":
                self.column, character = 0, "\n"  # the line's end stands for the space
            elif 2 * back <= columns and back < self.column:
                shown += "\b" * back + (_ERASE_LINE if back else "") + "\n" + self._word
                self.column = back + width
            else:
                self.column = width if self.column + width > columns else self.column + width
            self._word = "" if character.isspace() else self._word + character
            shown += character
        return shown


def width_of(character: str) -> int:
    """The columns that a character takes."""
    return 2 if unicodedata.east_asian_width(character) in "WF" else int(not unicodedata.combining(character))
