"""The bytes that each token of a vocabulary adds to a text. `guides` needs them to say which tokens may come next. Only
the tokenizer's process computes them (`vocabulary`)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from tokenizers import Tokenizer as Core

from penstock.store.byte_level import byte_characters

BROKEN = "\ufffd"  # what a decoder writes for bytes that are not UTF-8
# Decoders with which each token but the first adds the same bytes, whatever stands beside it. The others (WordPiece,
# BPEDecoder, CTC) drop or add spaces between tokens.
_PLAIN = {"Sequence", "ByteLevel", "ByteFallback", "Fuse", "Strip", "Replace", "Metaspace"}
_BATCH = 4096  # pairs that are decoded at once: it bounds the memory of their texts


def token_bytes(core: Core, left_out: Collection[int], byte_tokens: Collection[int]) -> list[bytes] | None:
    """Bytes of each id, b"" for `left_out` and where they are not known; None for a decoder whose tokens have no bytes
    of their own. `byte_tokens`: ids of `<0x00>` … `<0xFF>`, whose text depends on their neighbours.

    A decoder treats the first token apart. So each token is decoded behind another one, an anchor. A part of a
    character has no text there: then its bytes are those of GPT-2's table, which byte-level vocabularies are written
    in."""
    kinds = set(_kinds(json.loads(core.decoder.__getstate__()))) if core.decoder is not None else set()
    if not kinds or not kinds <= _PLAIN:
        return None
    size = core.get_vocab_size(with_added_tokens=True)
    possible = (i for i in range(size) if i not in left_out and i not in byte_tokens)  # a run of bytes is one text
    anchor = next((i for i in possible if core.decode([i]) == "a"), None)
    if anchor is None:
        return None
    table = {character: byte for byte, character in enumerate(byte_characters())} if "ByteLevel" in kinds else {}
    spelled: list[bytes] = []
    for lo in range(0, size, _BATCH):
        ids = range(lo, min(lo + _BATCH, size))
        texts = core.decode_batch([[anchor, i] for i in ids], skip_special_tokens=False)
        for i, text in zip(ids, texts, strict=True):
            name = core.id_to_token(i)
            if name is None or i in left_out or not text.startswith("a"):
                spelled.append(b"")
            elif i in byte_tokens:
                spelled.append(bytes([int(name[3:5], 16)]))
            elif BROKEN not in text:
                spelled.append(text[1:].encode())
            else:
                known = all(character in table for character in name)
                spelled.append(bytes(table[character] for character in name) if known else b"")
    # A byte that a plain token has too is that token's: where a text is forced, the lowest id that fits is taken, and
    # models write `{` and not `<0x7B>`.
    plain = {each for i, each in enumerate(spelled) if len(each) == 1 and i not in byte_tokens}
    return [b"" if i in byte_tokens and each in plain else each for i, each in enumerate(spelled)]


def _kinds(state: Any) -> Iterator[str]:
    """The types of a decoder and of those inside it."""
    yield state["type"]
    for inner in state.get("decoders", ()):
        yield from _kinds(inner)
