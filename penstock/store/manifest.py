"""`penstock.json`: what lies where in a packed model. Standard library only."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from penstock.spec import codec
from penstock.spec.parts import PAGE_BYTES, Part
from penstock.units import round_up

SCHEMA, VERSION = "penstock.packed", 2
FILE = "penstock.json"
CONFIG = "config.json"
MAX_BYTES = 100_000_000
SHARD_NAME = re.compile(r"model-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """One matrix inside each granule, in tiles or row by row (`spec.format`). `format` by name, as
    `parse_format` reads it."""

    name: str
    rows: int
    cols: int
    format: str
    offset: int
    tiled: bool


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A part is granules * granule_bytes bytes at `offset` of `file`; crc32 (zlib) over all of them."""

    key: str
    kind: str
    rows: int
    granules: int
    granule_bytes: int
    blocks: tuple[PackedBlock, ...]
    file: str
    offset: int
    crc32: int

    @property
    def nbytes(self) -> int:
        return self.granules * self.granule_bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """Parts in the order in which a pass reads them. `total_bytes`: of all parts."""

    weights: str
    total_bytes: int
    parts: tuple[PackedPart, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to be: its name, its header with the length prefix, and its parts with their offsets."""

    name: str
    header: bytes
    parts: tuple[tuple[Part, int], ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(part.nbytes for part, _ in self.parts)


def describe(part: Part, file: str, offset: int, crc32: int) -> PackedPart:
    blocks = tuple(PackedBlock(b.name, b.rows, b.cols, b.format.name, b.offset, b.tiled) for b in part.blocks)
    return PackedPart(part.key, part.kind, part.rows, part.granules, part.granule_bytes, blocks, file, offset, crc32)


def shards(parts: tuple[Part, ...], shard_bytes: int, first: int = 0) -> tuple[Shard, ...]:
    """Cuts the parts, in order, into files of at most `shard_bytes` of data, and of at least one part. `first`: files
    before these."""
    if not parts:
        return ()
    groups: list[list[Part]] = [[]]
    for part in parts:
        if groups[-1] and sum(p.nbytes for p in groups[-1]) + part.nbytes > shard_bytes:
            groups.append([])
        groups[-1].append(part)
    return tuple(_shard(f"model-{first + i + 1:05d}.safetensors", group) for i, group in enumerate(groups))


def spread_shards(parts: tuple[Part, ...], shard_bytes: int) -> tuple[tuple[Shard, ...], frozenset[str]]:
    """The same for two disks, and the names of those for the second. Part after part goes where less lies so far, so
    that at any place of a pass both disks have about as much to read."""
    sides: tuple[list[Part], list[Part]] = ([], [])
    for part in parts:
        fewer = min(sides, key=lambda side: sum(p.nbytes for p in side))
        fewer.append(part)
    here = shards(tuple(sides[0]), shard_bytes)
    there = shards(tuple(sides[1]), shard_bytes, len(here))
    return here + there, frozenset(shard.name for shard in there)


def _shard(name: str, parts: list[Part]) -> Shard:
    entries: dict[str, object] = {"__metadata__": {"format": "penstock"}}
    begins, end = [], 0
    for part in parts:
        begins.append(end)
        end += part.nbytes
        shape = [part.granules, part.granule_bytes]
        entries[part.key] = {"dtype": "U8", "shape": shape, "data_offsets": [begins[-1], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # safetensors allows spaces after the header. Every part is a multiple of 4096 bytes, so all are aligned.
    data = round_up(8 + len(text), PAGE_BYTES)
    header = (data - 8).to_bytes(8, "little") + text.ljust(data - 8)
    return Shard(name, header, tuple((part, data + begin) for part, begin in zip(parts, begins, strict=True)))


def dumps(manifest: Manifest) -> str:
    return codec.dumps(manifest, SCHEMA, VERSION) + "\n"


def loads(text: str, where: str) -> Manifest:
    """Raises BadRequest, as `codec.loads`."""
    return codec.loads(Manifest, text, SCHEMA, VERSION, where)
