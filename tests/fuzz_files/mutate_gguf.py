"""Mutants of GGUF files: entries and tensors changed, dropped, doubled and taken from others; counts, lengths, types
and offsets that do not fit."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import replace

from tests.fuzz_files.gguf_tree import ARRAY, NUMBERS, STRING, Array, Entry, Tree, dump, parse

_SIZES = (0, 1, 2, 3, 5, 31, 33, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**48, 2**53, 2**62, 2**63, 2**64 - 1)
_TYPES = (0, 1, 2, 3, 6, 7, 8, 9, 10, 12, 13, 14, 16, 20, 23, 24, 28, 30, 34, 39, 99, 2**31)  # of tensors
_STRINGS = (
    b"", b"\xff\xfe", b"\x00" * 9, b"llama", b"gpt2", b"qwen2", b"x" * 70_000, b"{{ 9 ** 9 ** 9 }}", b"../../x", b"\n",
    "\u202e\u2028".encode(), b"{% for i in range(10**9) %}a{% endfor %}",
)  # fmt: skip
_KEYS = (
    "general.alignment", "split.no", "split.count", "split.tensors.count", "general.file_type",
    "llama.rope.scaling.type", "llama.expert_count", "llama.attention.sliding_window", "tokenizer.ggml.eos_token_id",
    "tokenizer.chat_template",
)  # fmt: skip


def mutated(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """A mutant of a file; `other`: one to take pieces from. Raises as `parse` for files that are not in order."""
    tree = parse(content)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        tree = _changed(rng, tree, other)
    wrong: dict[int, int] = {}
    if rng.random() < 0.5:
        codes: list[str] = []
        dump(tree, seen=codes.append)
        for _ in range(rng.choice((1, 1, 2, 3))):
            # The first ones are the counts of the whole; those of the vocabulary are by far the most.
            at = rng.randrange(min(len(codes), rng.choice((3, 60, len(codes)))))
            wrong[at] = rng.choice(_SIZES)
    return dump(tree, wrong)


def _changed(rng: random.Random, tree: Tree, other: bytes) -> Tree:
    entries, tensors = list(tree.entries), list(tree.tensors)
    what = rng.randrange(13)
    if what < 6 and entries:
        at = rng.randrange(len(entries))
        if what == 0:
            del entries[at]
        elif what == 1:
            entries.insert(rng.randrange(len(entries)), entries[at])
        elif what == 2:
            there = rng.randrange(len(entries))
            entries[at] = replace(entries[at], key=entries[there].key)
        else:
            entries[at] = _value(rng, entries[at])
    elif what < 9 and tensors:
        at = rng.randrange(len(tensors))
        tensor = tensors[at]
        how = rng.randrange(7)
        if how == 0:
            del tensors[at]
        elif how == 1:
            tensors.append(replace(tensor, name=tensor.name + rng.choice((b"", b"x", b"\xff", b"y" * 2000))))
        elif how == 2:
            dims = list(tensor.dims)
            dims[rng.randrange(len(dims))] = rng.choice((*_SIZES, dims[0] + 32, dims[-1] + 1, dims[-1] - 1))
            tensors[at] = replace(tensor, dims=tuple(dims))
        elif how == 3:
            tensors[at] = replace(tensor, dims=(tensor.dims * 3)[: rng.randrange(7)])
        elif how == 4:
            tensors[at] = replace(tensor, kind=rng.choice(_TYPES))
        elif how == 5:
            tensors[at] = replace(tensor, offset=rng.choice((*_SIZES, tensor.offset + 32, tensor.offset + 1)))
        else:
            tensors[at] = replace(tensor, name=rng.choice(tensors).name)
    elif what == 9:
        entries.append(
            Entry(rng.choice(_KEYS).encode(), rng.choice((4, 8, 10, 5, 9)), rng.choice((0, 1, 3, 32, 2**31)))
        )
        entries[-1] = _value(rng, entries[-1]) if entries[-1].kind in (8, 9) or rng.random() < 0.5 else entries[-1]
    elif what == 10:
        theirs = parse(other)
        entries += rng.sample(theirs.entries, min(len(theirs.entries), rng.choice((1, 3))))
        if rng.random() < 0.3:
            tensors = list(theirs.tensors)
    else:
        data = bytearray(tree.data)
        end = rng.randrange(len(data) + 1)
        if rng.random() < 0.5:
            del data[end:]
        else:
            data[end : end + 64] = bytes([rng.choice((0, 0x7F, 0xFF))]) * 64
        return replace(tree, data=bytes(data))
    return replace(tree, entries=tuple(entries), tensors=tuple(tensors))


def _value(rng: random.Random, entry: Entry) -> Entry:
    """The entry with another value, most often of another type."""
    what = rng.randrange(6)
    if what == 0:
        kind = rng.choice(list(NUMBERS))
        return replace(entry, kind=kind, value=_number(rng, kind))
    if what == 1:
        return replace(entry, kind=STRING, value=rng.choice(_STRINGS))
    if what == 2:
        return replace(entry, kind=ARRAY, value=_nested(rng, rng.choice((0, 1, 3, 5, 50))))
    if what == 3 and isinstance(entry.value, Array) and entry.value.values:
        values = list(entry.value.values)
        at = rng.randrange(len(values))
        values[at : at + rng.choice((0, 1, 40))] = [rng.choice(values)] * rng.choice((0, 1, 2, 500))
        return replace(entry, value=Array(entry.value.of, tuple(values)))
    if what == 4 and isinstance(entry.value, Array) and entry.value.of == STRING and entry.value.values:
        strings = list(entry.value.values)
        strings[rng.randrange(len(strings))] = rng.choice(_STRINGS)
        return replace(entry, value=Array(STRING, tuple(strings)))
    if entry.kind in NUMBERS:
        return replace(entry, value=_number(rng, entry.kind))
    return replace(entry, kind=rng.choice((13, 99, 2**31)), value=b"x" * rng.choice((0, 4, 8)))


def _number(rng: random.Random, kind: int) -> float:
    if NUMBERS[kind] in "fd":
        return rng.choice((0.0, -1.0, 1e-38, 3e38, float("inf"), float("nan"), 1e4))
    return rng.choice((0, 1, 2, 3, 7, 31, 255, 2**31 - 1, 2**31, 2**63, 2**64 - 1))


def _nested(rng: random.Random, depth: int) -> Array:
    if depth == 0:
        return Array(rng.choice((4, 0, 7)), tuple(range(rng.choice((0, 1, 3)))))
    return Array(ARRAY, tuple(_nested(rng, depth - 1) for _ in range(rng.choice((1, 1, 2)) if depth < 9 else 1)))


# What `mutated` raises for a seed that is no file in order.
BROKEN = (ValueError, struct.error, OverflowError, MemoryError)


def any_of(rng: random.Random, content: bytes, family: Sequence[bytes]) -> bytes | None:
    """As `mutated`; None where the seed, or the one that pieces are taken from, is not in order."""
    try:
        return mutated(rng, content, rng.choice(family))
    except BROKEN:
        return None
