"""Records of which neurons of a layer's FFN counted for each token: those that fired, or that predictors called active.

They are answers as those of routers are (`spec.answers`): what a disk is asked for follows from them. Neurons have the
checkpoint's numbers. A token's set is bits, neuron n the bit n % 8 of byte n // 8.
"""

from __future__ import annotations

import re
import zlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from penstock.errors import BadRequest

# Of all layers' sets together, before they are compressed: 512 tokens of 32 layers of 16,384 neurons. The file is at
# most a third longer.
MOST_BYTES = 32 << 20
_BITS = tuple(tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256))
_ANY = re.compile(rb"[^\0]")  # of a token 3 % of the neurons fire, so most bytes have no bit


@dataclass(frozen=True, slots=True)
class LiveSets:
    """The sets of a layer with `neurons` neurons, of `tokens` tokens in the order in which they came. `sets`: base64 of
    the bits of all tokens, compressed by zlib."""

    layer: int
    neurons: int
    tokens: int
    sets: str

    @classmethod
    def of(cls, layer: int, neurons: int, rows: Sequence[bytes]) -> LiveSets:
        """`rows`: the bits of each token."""
        return cls(layer, neurons, len(rows), b64encode(zlib.compress(b"".join(rows))).decode())

    def rows(self) -> tuple[bytes, ...]:
        """The bits of each token. Raises BadRequest where they are not so many, or name neurons that are not there."""
        width, whole = row_bytes(self.neurons), b""
        unpacking = zlib.decompressobj()
        with suppress(ValueError, zlib.error):
            whole = unpacking.decompress(b64decode(self.sets, validate=True), width * self.tokens + 1)
        rows = tuple(whole[lo : lo + width] for lo in range(0, len(whole), width))
        beyond = 0xFF << (self.neurons % 8 or 8) & 0xFF  # bits of the last byte that are no neuron's
        if len(whole) != width * self.tokens or any(row[-1] & beyond for row in rows):
            raise BadRequest(f"the neurons of layer {self.layer} make no sense for {self.tokens} tokens")
        return rows


def row_bytes(neurons: int) -> int:
    """Bytes of a token's set."""
    return -(-neurons // 8)


def most_tokens(neurons: Sequence[int]) -> int:
    """Of how many tokens sets are kept. `neurons`: of each layer."""
    return max(1, MOST_BYTES // max(1, sum(map(row_bytes, neurons))))


def numbers(row: bytes) -> array[int]:
    """The neurons of a token's set, in rising order."""
    found = array("I")
    for match in _ANY.finditer(row):
        byte = match.start()
        found.extend([8 * byte + bit for bit in _BITS[row[byte]]])
    return found


def shares_together(rows: Sequence[bytes], neurons: int, together: Sequence[int]) -> Iterator[float]:
    """For each of `together`, rising: the share of the neurons that so many successive tokens have in their sets, in
    the mean. Of more tokens than there are as many as of all that there are."""
    sets = [int.from_bytes(row, "little") for row in rows]
    last = 0.0
    for count in together:
        windows = len(sets) // count
        if windows:
            united = 0
            for i in range(windows):
                union = 0
                for each in sets[count * i : count * (i + 1)]:
                    union |= each
                united += union.bit_count()
            last = max(last, united / windows / neurons)  # a window leaves the last tokens out
        yield min(1.0, last)
