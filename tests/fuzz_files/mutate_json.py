"""Mutants of JSON texts that keep their structure: one value, key or element is wrong, the rest is as it was.

An object is a list of pairs here, so that a mutant can name a key twice, and a `Raw` is text that JSON cannot say
otherwise: NaN, a number of 5000 digits, a hundred thousand brackets.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any


class Raw(str):
    """Text written as it stands."""


class Pairs(list[tuple[str, Any]]):
    """A JSON object, keys in order, twice where they stand twice."""


_NUMBERS = (
    "-1", "0", "1", "2", "3", "7", "63", "64", "65", "255", "4096", "65536", "2147483647", "2147483648", "4294967296",
    "9007199254740993", "9223372036854775807", "9223372036854775808", "18446744073709551616", "-2147483649",
    "-9223372036854775809", "0.0", "-0.0", "0.5", "1e-300", "1e300", "1e308", "1e999", "-1e999", "NaN", "Infinity",
    "-Infinity", "1" + "0" * 30, "1" * 5000,
)  # fmt: skip
_TEXTS = (
    "", " ", "a", "\n", "\x00", "\x1b[2J", "\ud800", "é", "𝄞", "A" * 300, "A" * 70_000, "../../../etc/passwd",
    "/dev/zero", "/etc/passwd", "..", "%s%n{0}{{}}", "null", "true", "1", "-1", "nan", "__class__", "\u202e", "<0xFF>",
)  # fmt: skip
_DEEP = 100_000
_MANY = 2_000


def parsed(text: str) -> Any:
    """The text's tree. Raises ValueError or RecursionError where it is no JSON."""
    return json.loads(text, object_pairs_hook=Pairs, parse_float=Raw, parse_int=Raw, parse_constant=Raw)


def dumped(tree: Any) -> bytes:
    """The tree as text, lone surrogates escaped."""
    return "".join(_pieces(tree)).encode("utf-8", "replace")


def strings(tree: Any) -> Iterator[str]:
    """All keys and texts of a tree: the words that its kind of file knows."""
    if isinstance(tree, Pairs):
        for key, value in tree:
            yield key
            yield from strings(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from strings(value)
    elif isinstance(tree, str) and not isinstance(tree, Raw):
        yield tree


def mutated(rng: random.Random, tree: Any, others: Sequence[Any], words: Sequence[str]) -> Any:
    """A copy of `tree` with one to four changes. `others`: trees to take pieces from; `words`: texts of their kind."""
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        places = list(_places(tree))
        if not places:
            return _extreme(rng, words)
        tree = _changed(rng, tree, rng.choice(places), others, words)
    return tree


def _places(tree: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every value inside of a tree as indices from its root. Of long lists the first and last entries: a vocabulary
    would otherwise take all changes."""
    if isinstance(tree, list):
        for i in range(len(tree)) if len(tree) <= 64 else (*range(24), *range(len(tree) - 24, len(tree))):
            yield (*path, i)
            yield from _places(_at(tree, i), (*path, i))


def _at(node: list[Any], i: int) -> Any:
    return node[i][1] if isinstance(node, Pairs) else node[i]


def _changed(rng: random.Random, tree: Any, path: tuple[int, ...], others: Sequence[Any], words: Sequence[str]) -> Any:
    """`tree` with the value at `path` changed; what lies beside the path is shared with the original."""
    i, rest = path[0], path[1:]
    node = Pairs(tree) if isinstance(tree, Pairs) else list(tree)
    if rest:
        value = _changed(rng, _at(node, i), rest, others, words)
        node[i] = (node[i][0], value) if isinstance(node, Pairs) else value
        return node
    what = rng.randrange(12)
    if what == 0:
        del node[i]
    elif what == 1:
        node.insert(rng.randrange(len(node) + 1), node[i])
    elif what == 2:
        j = rng.randrange(len(node))
        node[i], node[j] = node[j], node[i]
    elif what == 3 and isinstance(node, Pairs):
        node[i] = (_word(rng, words), node[i][1])
    elif what == 4 and isinstance(node, Pairs):
        node.insert(rng.randrange(len(node) + 1), (_word(rng, words), _extreme(rng, words)))
    elif what == 5 and isinstance(node, Pairs):  # a key twice, its two values different
        node.append((node[i][0], _extreme(rng, words)))
    else:
        value = _replaced(rng, _at(node, i), others, words)
        node[i] = (node[i][0], value) if isinstance(node, Pairs) else value
    return node


def _replaced(rng: random.Random, value: Any, others: Sequence[Any], words: Sequence[str]) -> Any:
    what = rng.randrange(10)
    if what < 3 and isinstance(value, Raw):
        return _nudged(rng, value)
    if what < 3 and isinstance(value, str) and words:
        return rng.choice(words)
    if what == 3 and others:
        other = rng.choice(others)
        places = list(_places(other))
        for i in rng.choice(places) if places else ():
            other = _at(other, i)
        return other
    if what == 4:
        return [value] * rng.choice((0, 1, 2, 2 if isinstance(value, list) else _MANY))
    if what == 5:
        return Pairs([(_word(rng, words), value)])
    if what == 6:
        return json.dumps(value) if isinstance(value, str) else "1"
    return _extreme(rng, words)


def _nudged(rng: random.Random, number: Raw) -> Raw:
    """A number near another one."""
    try:
        value = float(number) if any(c in number for c in ".eEnN") else int(number)
        near = (value + 1, value - 1, value * 2, -value, value * 1000, value / 2, float(value), value**2)
        return Raw(json.dumps(rng.choice(near)))
    except (ValueError, OverflowError):
        return Raw("0")


def _extreme(rng: random.Random, words: Sequence[str]) -> Any:
    what = rng.randrange(20)
    if what < 11:
        return Raw(rng.choice(_NUMBERS))
    if what < 14:
        return rng.choice(_TEXTS)
    if what < 16:
        return _word(rng, words)
    if what == 16:
        deep = rng.choice((50, 900, _DEEP))
        return Raw("[" * deep + "]" * deep if rng.random() < 0.5 else '{"a":' * deep + "1" + "}" * deep)
    return rng.choice((Pairs(), [], Raw("null"), Raw("true"), Raw("false"), Raw("nul"), Raw("")))


def _word(rng: random.Random, words: Sequence[str]) -> str:
    return rng.choice(words) if words and rng.random() < 0.8 else rng.choice(_TEXTS)


def _pieces(tree: Any) -> Iterator[str]:
    if isinstance(tree, Pairs):
        yield "{"
        for i, (key, value) in enumerate(tree):
            yield f"{', ' if i else ''}{json.dumps(key)}: "
            yield from _pieces(value)
        yield "}"
    elif isinstance(tree, list):
        yield "["
        for i, value in enumerate(tree):
            yield ", " if i else ""
            yield from _pieces(value)
        yield "]"
    elif isinstance(tree, Raw):
        yield tree
    else:
        yield json.dumps(tree)
