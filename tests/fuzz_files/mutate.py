"""Mutants of seeds: of JSON by its structure, of safetensors files by header and bytes, of GGUF files by entries,
tensors and numbers, of templates by their tokens.

A mutant depends on nothing but the seeds and the random numbers given, so a case can be made again from its name.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from tests.fuzz_files import mutate_gguf, mutate_json
from tests.fuzz_files.corpus import Seed

_TOKEN = re.compile(r"\{[{%#]-?|-?[}%#]\}|\w+|'[^'\n]*'|\"[^\"\n]*\"|\s+|[^\w\s]", re.S)
_FILTERS = (
    "join", "center(99999999)", "length", "list", "upper", "tojson", "indent(9999)", "replace('a', 'a' * 9999)",
    "string", "wordwrap(1)", "format(1)", "batch(1)", "slice(99999)", "map('upper')", "sum", "reverse", "first",
    "urlize", "pprint",
)  # fmt: skip
_EXPRESSIONS = (
    "range(10**9)", "'x' * 10**9", "'%1000000000d' % 1", "10**10**10", "[0] * 10**9", "lipsum(n=10000)",
    "messages * 10**7", "self", "loop", "caller()", "cycler", "joiner()", "namespace(a=1)", "messages[0].__class__",
    "''.join(range(9))", "raise_exception('no')", "strftime_now('%Y' * 9999)", "'{0:>999999999}'.format(1)",
    "messages[99].x.y", "1 / 0", "tools", "bos_token * 10**9", "dict(a=1)", "range(99999) | list | length",
    "undefined_name()", "none.x",
)  # fmt: skip
_NUMBERS = ("0", "-1", "1", "99999999", "10**9", "2**64", "1e308", "9" * 400)
_LENGTHS = (0, 1, 7, 100, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64 - 1, 100_000_000, 100_000_001)


def mutant(rng: random.Random, seed: Seed, family: Sequence[Seed]) -> bytes:
    """A mutant of `seed`; `family`: all seeds of its kind, to take pieces from."""
    if rng.random() < 0.12:
        return of_bytes(rng, seed.content, rng.choice(family).content)
    if seed.path.suffix in (".json", ".jsonl"):
        return _of_json(rng, seed.content, family)
    if seed.path.suffix == ".safetensors":
        return _of_shard(rng, seed.content, family)
    if seed.path.suffix == ".gguf":
        found = mutate_gguf.any_of(rng, seed.content, [each.content for each in family])
        return of_bytes(rng, seed.content, rng.choice(family).content) if found is None else found
    return of_text(rng, seed.content, rng.choice(family).content)


def of_bytes(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """Flipped bits, cuts, repeats, foreign pieces, marks of other encodings."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 2, 4, 8, 64, 1024)))
        what = rng.randrange(10)
        if what < 3 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif what == 3:
            del data[at:]
        elif what == 4:
            del data[at:end]
        elif what == 5:
            data[at:at] = data[at:end] * rng.choice((1, 2, 100))
        elif what == 6:
            data[at:end] = bytes([rng.choice((0, 0x7F, 0x80, 0xFF))]) * (end - at)
        elif what == 7:
            start = rng.randrange(len(other) + 1)
            data[at:end] = other[start : start + rng.choice((4, 64, 4096))]
        elif what == 8:
            data[at:at] = rng.randbytes(rng.choice((1, 8, 256)))
        else:
            data = bytearray(rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"\xf0\x28"))) + data
    return bytes(data)


def of_text(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """Tokens deleted, doubled, swapped and replaced by what costs time, memory or both; the whole in a loop."""
    tokens, foreign = (_TOKEN.findall(part.decode("utf-8", "replace")) for part in (content, other))
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        at = rng.randrange(len(tokens) + 1)
        end = min(len(tokens), at + rng.choice((1, 1, 2, 5, 20)))
        what = rng.randrange(11)
        if what == 0:
            del tokens[at:end]
        elif what == 1:
            tokens[at:at] = tokens[at:end] * rng.choice((1, 2, 50))
        elif what == 2:
            start = rng.randrange(len(foreign) + 1)
            tokens[at:end] = foreign[start : start + rng.choice((1, 5, 30))]
        elif what == 3:
            tokens[at:at] = ["{{ ", rng.choice(_EXPRESSIONS), " }}"]
        elif what == 4:
            tokens[at:at] = [" | ", rng.choice(_FILTERS)]
        elif what == 5:
            tokens[at:end] = [rng.choice(_EXPRESSIONS)]
        elif what == 6:
            loop = f"{{% for i{rng.randrange(9)} in range({rng.choice(('3', '1000', '99999', '10**6'))}) %}}"
            tokens = [loop, *tokens, "{% endfor %}"]
        elif what == 7:
            numbers = [i for i, token in enumerate(tokens) if token.isdigit()]
            if numbers:
                tokens[rng.choice(numbers)] = rng.choice(_NUMBERS)
        elif what == 8 and tokens:
            j = rng.randrange(len(tokens))
            tokens[at - 1], tokens[j] = tokens[j], tokens[at - 1]
        elif what == 9:
            tokens[at:end] = [rng.choice("+-*/%~|()[]{}.,:=") for _ in range(rng.choice((1, 2, 3)))]
        else:
            tokens[at:at] = [
                rng.choice(("\x00", "\u202e", "é" * 99, "{#", "{%", "%}", "{{" * 500, "(" * 500, "-" * 5000))
            ]
    return "".join(tokens).encode("utf-8", "replace")


def _of_json(rng: random.Random, content: bytes, family: Sequence[Seed]) -> bytes:
    try:
        tree = mutate_json.parsed(content.decode("utf-8"))
    except (ValueError, RecursionError):  # a seed that is no JSON on purpose
        return of_bytes(rng, content, rng.choice(family).content)
    return mutate_json.dumped(mutate_json.mutated(rng, tree, *_pieces_of(rng, family)))


def _of_shard(rng: random.Random, content: bytes, family: Sequence[Seed]) -> bytes:
    """A mutated header over the same data, or a wrong length, or bytes of the data."""
    length = min(int.from_bytes(content[:8], "little"), len(content))
    header, data = content[8 : 8 + length], content[8 + length :]
    what = rng.randrange(10)
    if what == 0:
        return rng.choice(_LENGTHS).to_bytes(8, "little") + content[8:]
    if what == 1:
        return content[: 8 + length] + of_bytes(rng, data, data)
    header = _of_json(rng, header, family) if what < 9 else of_bytes(rng, header, rng.choice(family).content)
    if rng.random() < 0.3 and len(header) < length:  # the data stay where they were
        header = header.ljust(length)
    return len(header).to_bytes(8, "little") + header + data


def _pieces_of(rng: random.Random, family: Sequence[Seed]) -> tuple[list[object], list[str]]:
    """A tree of another seed to take values from, and its words."""
    for _ in range(4):
        content = rng.choice(family).content
        if family[0].path.suffix == ".safetensors":
            content = content[8 : 8 + int.from_bytes(content[:8], "little")]
        try:
            tree = mutate_json.parsed(content.decode("utf-8"))
        except (ValueError, RecursionError):
            continue
        return [tree], list(mutate_json.strings(tree))[:400]
    return [], []
