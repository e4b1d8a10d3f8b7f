"""Reads and writes `penstock.json`, which says what lies where in a packed model, and has its checksums.

Only the standard library is used here.

Of version 3 on, each byte of a packed model's folder has one checksum:

    a granule of weights     8 bytes in penstock.sums: XXH3 of 64 bits without a seed, little-endian; the parts in the
                             order of penstock.json, the granules of each in their order
    penstock.sums, and the   size and SHA-256 in penstock.json, under `files`
    small files
    penstock.json            SHA-256 in its own last field, of all bytes before that field's comma
    a shard's header         none: it follows from penstock.json, to the byte

A file in the folder that is not listed and would be used (`COPIED`, `USED_FOLDER`) is refused. Any other file in the
folder is left alone. Version 2 had no checksums but a CRC of each part. It is read, and its bytes are not checked.

Where neurons lie in another order than in the checkpoint (`spec.order`), penstock.json has it in a field `orders`. Else
it has no such field, and versions that know of no orders read it too.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.errors import BadRequest, DamagedModel
from penstock.spec import codec
from penstock.spec.format import Format, mixture, parse_format
from penstock.spec.order import NeuronOrder
from penstock.spec.parts import MIXED, PAGE_BYTES, Part
from penstock.store.files import MAX_COPIED_BYTES
from penstock.store.header import quoted
from penstock.units import round_up

SCHEMA, VERSION, UNCHECKED_VERSION = "penstock.packed", 3, 2
FILE = "penstock.json"
CONFIG, MAX_CONFIG_BYTES = "config.json", 16_000_000
SUMS = "penstock.sums"
# What may be kept beside a packed model: what a text was seen to ask of it, and predictors of who fires.
PROFILE, PREDICTORS = "profile.json", "predictors.safetensors"
SUM_BYTES = 8  # of a granule's checksum
RECORD = "source.json"  # the record of a copy in the cache (`store.copies`)
MAX_BYTES = 100_000_000
SHARD_NAME = re.compile(r"model-\d{5}\.safetensors")
SMALL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

# Files that are copied beside the shards where the checkpoint has them. In some checkpoints the chat template is a file
# of its own.
COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
    "chat_template.json", "LICENSE", "LICENSE.txt", "NOTICE",
)  # fmt: skip
USED_FOLDER = "additional_chat_templates"  # in a checkpoint; a packed model has none

AGAIN = "pack the checkpoint again (--no-verify takes it as it is)"  # the advice for a damaged model
_SEAL = re.compile(r',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """One matrix inside each granule, in tiles or row by row (`spec.format`). `format`: by name, as `parse_format`
    reads it. `offset`: in bytes from the granule's begin."""

    name: str
    rows: int
    cols: int
    format: str
    offset: int
    tiled: bool


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A part is granules * granule_bytes bytes at `offset` of `file`."""

    key: str
    kind: str
    rows: int
    granules: int
    granule_bytes: int
    blocks: tuple[PackedBlock, ...]
    file: str
    offset: int

    @property
    def nbytes(self) -> int:
        return self.granules * self.granule_bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of penstock.json. `parts`: in the order in which a pass reads them. `total_bytes`: of all parts. `files`:
    empty in a model that an older version packed, whose bytes cannot be checked. `orders`: of all layers' neurons, or
    none where they lie as in the checkpoint."""

    weights: str
    total_bytes: int
    parts: tuple[PackedPart, ...]
    files: tuple[PackedFile, ...] = ()
    orders: tuple[NeuronOrder, ...] = ()

    @property
    def has_sums(self) -> bool:
        return bool(self.files)


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A small file beside the shards. `sha256`: of all its bytes, in hexadecimal."""

    name: str
    nbytes: int
    sha256: str


class Shard(NamedTuple):
    """A file of weights, to be written. `header`: with the length prefix. `parts`: with their offsets in the file."""

    name: str
    header: bytes
    parts: tuple[tuple[Part, int], ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(part.nbytes for part, _ in self.parts)


def describe(part: Part, file: str, offset: int) -> PackedPart:
    blocks = tuple(PackedBlock(b.name, b.rows, b.cols, b.format.name, b.offset, b.tiled) for b in part.blocks)
    return PackedPart(part.key, part.kind, part.rows, part.granules, part.granule_bytes, blocks, file, offset)


def describe_file(name: str, content: bytes) -> PackedFile:
    return PackedFile(name, len(content), hashlib.sha256(content).hexdigest())


def shards(parts: tuple[Part, ...], shard_bytes: int, first: int = 0) -> tuple[Shard, ...]:
    """Cuts the parts, in order, into files of at most `shard_bytes` of data; a part that is larger has a file of its
    own. `first`: how many files come before these."""
    if not parts:
        return ()
    groups: list[list[Part]] = [[]]
    for part in parts:
        if groups[-1] and sum(p.nbytes for p in groups[-1]) + part.nbytes > shard_bytes:
            groups.append([])
        groups[-1].append(part)
    return tuple(shard(f"model-{first + i + 1:05d}.safetensors", group) for i, group in enumerate(groups))


def spread_shards(parts: tuple[Part, ...], shard_bytes: int) -> tuple[tuple[Shard, ...], frozenset[str]]:
    """As `shards`, but for two disks: all files, and the names of those for the second disk. Each part goes to the disk
    that has fewer bytes so far, so that at any point of a pass both disks have had about as much to read."""
    disks: tuple[list[Part], list[Part]] = ([], [])
    for part in parts:
        emptier = min(disks, key=lambda disk: sum(p.nbytes for p in disk))
        emptier.append(part)
    on_first = shards(tuple(disks[0]), shard_bytes)
    on_second = shards(tuple(disks[1]), shard_bytes, len(on_first))
    return on_first + on_second, frozenset(shard.name for shard in on_second)


def shard(name: str, parts: list[Part]) -> Shard:
    """The file that holds these parts, one after the other."""
    entries: dict[str, object] = {"__metadata__": {"format": "penstock"}}
    begins, end = [], 0
    for part in parts:
        begins.append(end)
        end += part.nbytes
        shape = [part.granules, part.granule_bytes]
        entries[part.key] = {"dtype": "U8", "shape": shape, "data_offsets": [begins[-1], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # safetensors allows spaces after the header, which align the first part to 4096 bytes. Every part is a multiple of
    # 4096 bytes, so all parts are aligned.
    data = round_up(8 + len(text), PAGE_BYTES)
    header = (data - 8).to_bytes(8, "little") + text.ljust(data - 8)
    return Shard(name, header, tuple((part, data + begin) for part, begin in zip(parts, begins, strict=True)))


def formats(manifest: Manifest) -> Format:
    """The formats of the model's weights. Raises BadRequest where the manifest names none that there is."""
    try:
        return parse_format(manifest.weights)
    except BadRequest:
        table = {
            f"{part.key}.{block.name}": parse_format(block.format)
            for part in manifest.parts if part.kind in MIXED for block in part.blocks if block.tiled
        }  # fmt: skip
        mixed = mixture(table, manifest.weights)
        # Formats of one kind are no mixture: their groups differ where matrices have few columns (`Format.within`).
        if mixed.name != manifest.weights or len({fmt.kind for fmt in table.values()}) == 1:
            raise
        return mixed


def dumps(manifest: Manifest) -> str:
    fields = codec.to_json(manifest)
    if not manifest.orders:
        del fields["orders"]
    return seal(codec.dumps(fields, SCHEMA, VERSION))


def seal(text: str) -> str:
    """A JSON object, indented by one, with its own checksum as the last field."""
    body = text.removesuffix("\n}")
    return f'{body},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def loads(text: str, where: str) -> Manifest:
    """Reads penstock.json. `where`: its path, for messages. Raises BadRequest as `codec.loads`, and DamagedModel for a
    text that `dumps` did not write."""
    manifest = codec.from_json(Manifest, _parse(text, where), where)
    for part in manifest.parts:
        if not SHARD_NAME.fullmatch(part.file):
            raise BadRequest(
                f"{where} has {quoted(part.key)} in the file {quoted(part.file)}, which is no shard's name"
            )
    if manifest.files:
        _check_files(manifest.files, where)
    return manifest


def loads_files(text: str, where: str) -> tuple[PackedFile, ...]:
    """Reads only `Manifest.files`, in a tenth of the time. Raises as `loads`."""
    files = codec.from_json(_Files, {"files": _parse(text, where).get("files", [])}, where).files
    if files:
        _check_files(files, where)
    return files


@dataclass(frozen=True, slots=True)
class _Files:
    files: tuple[PackedFile, ...]


def _parse(text: str, where: str) -> dict[str, Any]:
    """The fields of a Manifest, of either version."""
    data = codec.parse(text, where)
    schema = data.pop("schema", None)
    if schema == f"{SCHEMA}/{UNCHECKED_VERSION}":
        return _without_crcs(data, where)
    if schema != f"{SCHEMA}/{VERSION}":
        raise BadRequest(f"{where} has schema {schema!r}; this version reads {SCHEMA}/{VERSION}")
    seal = _SEAL.search(text)
    if seal is None or hashlib.sha256(text[: seal.start()].encode()).hexdigest() != seal[1]:
        raise DamagedModel(
            f"{where} is damaged, or was changed: its own checksum does not fit; pack the checkpoint again"
        )
    del data["sha256"]
    if not data.get("files"):
        raise BadRequest(f"{where} lists no files")
    return data


def _without_crcs(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields that version 2 wrote, without the checksum of each part."""
    parts = data.get("parts")
    if "files" in data or not isinstance(parts, list):
        raise BadRequest(f"{where} is not of version {UNCHECKED_VERSION}, which it claims to be")
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.pop("crc32", None), int):
            raise BadRequest(f"{where} has a part without a crc32")
    return data


def _check_files(files: tuple[PackedFile, ...], where: str) -> None:
    """Raises BadRequest unless the list has only plain names in the model's own folder, with config.json and the
    granules' checksums among them."""
    names = [file.name for file in files]
    for file in files:
        if not SMALL_NAME.fullmatch(file.name) or SHARD_NAME.fullmatch(file.name) or file.name == FILE:
            raise BadRequest(f"{where} lists the file {quoted(file.name)}, which no packed model has")
        if not 0 <= file.nbytes <= MAX_COPIED_BYTES:
            raise BadRequest(f"{where} lists {file.name} with {file.nbytes} bytes")
    if len(set(names)) < len(names):
        raise BadRequest(f"{where} lists a file twice")
    for name in (CONFIG, SUMS):
        if name not in names:
            raise BadRequest(f"{where} does not list {name}")
