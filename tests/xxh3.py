"""XXH3 of 64 bits without a seed, for more than 240 bytes, by its specification: the oracle of csrc/hash-inl.h.

github.com/Cyan4973/xxHash, doc/xxhash_spec.md. Whole numbers of Python, one lane at a time.
"""

from __future__ import annotations

_P32_1, _P32_2, _P32_3 = 2654435761, 2246822519, 3266489917
_P64_1, _P64_2, _P64_3 = 11400714785074694791, 14029467366897019727, 1609587929392839161
_P64_4, _P64_5, _MX1 = 9650029242287828579, 2870177450012600261, 0x165667919E3779F9
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_ALL, _LOW = 2**64 - 1, 2**32 - 1


def xxh3_64(data: bytes) -> int:
    assert len(data) > 240
    sums = [_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1]
    stripes_per_block = (len(_SECRET) - 64) // 8
    block_bytes = 64 * stripes_per_block
    whole = (len(data) - 1) // block_bytes
    for block in range(whole):
        for n in range(stripes_per_block):
            _accumulate(sums, _words(data, block * block_bytes + 64 * n), _words(_SECRET, 8 * n))
        secret = _words(_SECRET, len(_SECRET) - 64)
        sums = [(s ^ s >> 47 ^ key) * _P32_1 & _ALL for s, key in zip(sums, secret, strict=True)]
    for n in range((len(data) - whole * block_bytes - 1) // 64):
        _accumulate(sums, _words(data, whole * block_bytes + 64 * n), _words(_SECRET, 8 * n))
    _accumulate(sums, _words(data, len(data) - 64), _words(_SECRET, len(_SECRET) - 71))
    keyed = [s ^ key for s, key in zip(sums, _words(_SECRET, 11), strict=True)]
    result = len(data) * _P64_1
    for i in range(0, 8, 2):
        product = keyed[i] * keyed[i + 1]
        result += product & _ALL ^ product >> 64
    result &= _ALL
    result = (result ^ result >> 37) * _MX1 & _ALL
    return result ^ result >> 32


def _words(data: bytes, at: int) -> list[int]:
    return [int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little") for i in range(8)]


def _accumulate(sums: list[int], stripe: list[int], secret: list[int]) -> None:
    for i in range(8):
        value = stripe[i] ^ secret[i]
        sums[i ^ 1] = sums[i ^ 1] + stripe[i] & _ALL
        sums[i] = sums[i] + (value & _LOW) * (value >> 32) & _ALL
