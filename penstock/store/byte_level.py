"""GPT-2's table of characters for bytes, which byte-level tokenizers write their vocabularies with."""

from __future__ import annotations


def byte_characters() -> list[str]:
    """The printable character that stands for each byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]
