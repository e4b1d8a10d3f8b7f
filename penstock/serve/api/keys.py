"""Keys that clients must have, with their names and limits: requests at once, and tokens a minute."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf

from penstock.errors import BadRequest

_LIMITS = {"at-once": "at_once", "tokens-per-minute": "tokens_per_minute"}


@dataclass(frozen=True)
class Key:
    """A key that clients may have.

    name               the owner's
    at_once            the most open requests; None for any number
    tokens_per_minute  the most tokens of prompts and answers together, over any longer time; None for any number
    """

    name: str
    secret: str = field(repr=False)
    at_once: int | None = None
    tokens_per_minute: int | None = None


def parse_keys(text: str, where: str) -> tuple[Key, ...]:
    """The keys of a file, one a line: `KEY`, or `NAME KEY`, then perhaps `at-once=N` and `tokens-per-minute=N`. Lines
    that begin with # are left out. `where` names the file in errors, which never hold a key. Raises BadRequest."""
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        named = words if len(words) > 1 else [f"line {number}", words[0]]
        limits = dict(_limit(word, f"{where}, line {number}") for word in named[2:])
        keys.append(Key(named[0], named[1], **limits))
    for what, column in (("name", [key.name for key in keys]), ("key", [key.secret for key in keys])):
        if len(set(column)) < len(column):
            raise BadRequest(f"{where}: a {what} comes twice")
    if not keys:
        raise BadRequest(f"{where} has no key in it: write one a line")
    return tuple(keys)


def _limit(word: str, where: str) -> tuple[str, int]:
    name, _, value = word.partition("=")
    if name not in _LIMITS or not (value.isascii() and value.isdecimal() and int(value[:18]) > 0):
        raise BadRequest(f"{where}: after a name and a key there may be at-once=N and tokens-per-minute=N")
    return _LIMITS[name], int(value[:18])


def known(keys: tuple[Key, ...], secret: str) -> Key | None:
    """The key with this secret. All keys are compared, each in the same time, because a difference in time would tell
    something of a key."""
    same = [hmac.compare_digest(secret.encode(), key.secret.encode()) for key in keys]
    return keys[same.index(True)] if any(same) else None


class Spending:
    """Counts the open requests and the spent tokens of each key. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, int] = {}
        self._left: dict[str, tuple[float, float]] = {}  # tokens that are left, and the second at which that was so

    def refuses(self, key: Key) -> tuple[str, float] | None:
        """Why the key may not ask now, and the seconds until it may."""
        if key.at_once is not None and self._open.get(key.name, 0) >= key.at_once:
            return f"{key.at_once} requests of this key are open, and no more may be", 1.0
        if (left := self._tokens(key)) <= 0:
            assert key.tokens_per_minute is not None
            return f"this key has {key.tokens_per_minute} tokens a minute, and has had them", (
                1 - left
            ) * 60 / key.tokens_per_minute
        return None

    def begin(self, key: Key) -> None:
        self._open[key.name] = self._open.get(key.name, 0) + 1

    def end(self, key: Key) -> None:
        self._open[key.name] -= 1

    def spend(self, key: Key, tokens: int) -> None:
        """Counts the tokens of an answer that has ended. A key may owe some afterwards."""
        if key.tokens_per_minute is not None:
            self._left[key.name] = (self._tokens(key) - tokens, self._clock())

    def _tokens(self, key: Key) -> float:
        """Tokens that are left. They are those of a minute at most, and come back evenly."""
        if key.tokens_per_minute is None:
            return inf
        left, at_s = self._left.get(key.name, (float(key.tokens_per_minute), self._clock()))
        return min(key.tokens_per_minute, left + (self._clock() - at_s) * key.tokens_per_minute / 60)


def seconds_to_wait(seconds: float) -> bytes:
    """As Retry-After says it."""
    return str(max(1, ceil(seconds))).encode()
