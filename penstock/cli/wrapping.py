"""Breaks text between words while it streams to a terminal, whose own way is to break within them."""

from __future__ import annotations

import unicodedata

_ERASE_LINE = "\033[K"
_TAB = 8
_MOST_MARKS = 4  # a column: a word with more characters is left to the terminal


class Wrapping:
    """Text of one answer, piece by piece. `column`: the cursor's, from 0 on; the number of columns where the last one
    is written, and the next character wraps."""

    def __init__(self) -> None:
        self.column = 0
        self._word: str | None = ""  # what the cursor's line ends with; None: it is left to the terminal
        self._back = 0  # its columns
        self._sure = True  # that every terminal counts this line's columns alike

    def push(self, text: str, columns: int) -> str:
        """The codes and text to print for the next piece, on a terminal of so many columns. A word that has begun and
        does not fit is erased and begins anew in the next line. One that is wider than half a line is left to the
        terminal: languages without spaces have such, and what is copied out of it should stay one word. So is a line
        from a character on whose width differs between terminals: to go back by too many columns erases words."""
        shown = ""
        for character in text:
            if character == "\n":
                self.column, self._word, self._back, self._sure = 0, "", 0, True
                shown += character
                continue
            tab = character == "\t"
            width = _TAB - self.column % _TAB if tab else width_of(character)
            self._sure = self._sure and not is_disputed(character)
            back = self._back
            if self.column + width < columns:
                self.column += width
            elif character in " \t":
                self.column, self._sure, character = 0, True, "\n"  # the line's end stands for the space
            elif self._sure and self._word is not None and 2 * back <= columns and back < self.column:
                shown += "\b" * back + (_ERASE_LINE if back else "") + "\n" + self._word
                self.column = back + width
            else:
                self.column = width if self.column + width > columns else self.column + width
            shown += character
            self._keep(character, width, columns)
        return shown

    def _keep(self, character: str, width: int, columns: int) -> None:
        """Takes a character into the word, which is kept no longer than it may be erased."""
        if character.isspace():
            self._word, self._back = "", 0
        elif self._word is not None:
            self._back += width
            over = 2 * self._back > columns or len(self._word) >= _MOST_MARKS * columns
            self._word = None if over else self._word + character


def width_of(character: str) -> int:
    """The columns that a character takes: 2 for wide ones, 0 for marks and what only formats."""
    if unicodedata.east_asian_width(character) in "WF":
        return 2
    medial = "\u1160" <= character <= "\u11ff"  # Korean letters that stand within the syllable begun before
    return 0 if medial or unicodedata.category(character) in ("Mn", "Me", "Cf") else 1


def is_disputed(character: str) -> bool:
    """Whether terminals differ in how many columns it takes, or what stands before it: joiners and other formats, the
    vowel signs of Indian languages that take room, U+FE0F, skin tones, and the letters of flags."""
    joins = (
        character == "\ufe0f" or "\U0001f3fb" <= character <= "\U0001f3ff" or "\U0001f1e6" <= character <= "\U0001f1ff"
    )
    return joins or unicodedata.category(character) in ("Cf", "Mc")
