"""Opening packed models: cheap checks, then only places. Standard library only; the movers read the bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import BadRequest, BrokenModel, StorageFailed
from penstock.models import spec_from_config
from penstock.spec.format import Format, parse_format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import PAGE_BYTES, Part, parts
from penstock.store import manifest as manifests
from penstock.store.files import read_json, read_text
from penstock.store.header import quoted, read_header
from penstock.store.manifest import CONFIG, SHARD_NAME, Manifest, PackedPart

MAX_CONFIG_BYTES = 16_000_000

# What the tokenizer costs the process at its peak, per byte of tokenizer.json: one of 9 MB with 128 k
# entries took 105 MiB.
TOKENIZER_PEAK = 12


@dataclass(frozen=True, slots=True)
class Location:
    """A part: `nbytes` at `offset` (a multiple of 4096) of `Packed.files[file_index]`."""

    file_index: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Packed:
    """A packed model that passed the checks of `open_packed`. `parts` in the order in which a pass reads them."""

    folder: Path
    spec: ModelSpec
    weights: Format
    files: tuple[Path, ...]
    locations: dict[str, Location]
    parts: dict[str, Part]
    total_bytes: int
    disks: dict[Path, str]  # of each file

    @property
    def part_disks(self) -> dict[str, str]:
        """The disk of each part."""
        return {key: self.disks[self.files[location.file_index]] for key, location in self.locations.items()}

    def locate(self, part_key: str, lo: int, hi: int) -> tuple[Path, int, int]:
        """Where granules lo..hi of a part lie: file, offset, bytes. One contiguous, aligned range."""
        part, location = self.parts[part_key], self.locations[part_key]
        if not 0 <= lo <= hi <= part.granules:
            raise ValueError(f"{part_key} has {part.granules} granules, not {lo}..{hi}")
        stride = part.granule_bytes
        return self.files[location.file_index], location.offset + lo * stride, (hi - lo) * stride


def is_packed(folder: Path) -> bool:
    return (folder / manifests.FILE).is_file()


def read_config(path: Path) -> tuple[dict[str, Any], ModelSpec]:
    """`path`: a model's folder, or its config.json. The spec counts a tokenizer.json that stands beside it.

    Raises BadRequest (nothing there), BrokenModel (no JSON), UnsupportedModel (unknown model type).
    """
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        if path.is_dir():
            raise BadRequest(f"{path} holds no {CONFIG}: a model folder has one")
        raise BadRequest(f"{path} is not there" if not path.exists() else f"{path} is no file")
    if file.suffix == ".safetensors":
        raise BadRequest(f"{path} is a weights file: give its folder, which should hold {CONFIG}")
    config = read_json(file, MAX_CONFIG_BYTES)
    spec = spec_from_config(config, str(file))
    tokenizer = file.parent / "tokenizer.json"
    if tokenizer.is_file():
        spec = replace(spec, tokenizer_bytes=TOKENIZER_PEAK * tokenizer.stat().st_size)
    return config, spec


def open_packed(folder: Path) -> Packed:
    """Opens a packed model: reads penstock.json, config.json and the shards' headers, no weights.

    Raises BadRequest where the folder holds no packed model, BrokenModel (one line: which file, what is
    wrong) where it is truncated, inconsistent, or packed by another version, StorageFailed where a second disk is
    missing.
    """
    if not is_packed(folder):
        raise BadRequest(f"{folder} holds no packed model (no {manifests.FILE}): make one with `penstock pack`")
    manifest = read_manifest(folder)
    _, spec = read_config(folder)
    try:
        weights = parse_format(manifest.weights)
    except BadRequest as error:
        raise BrokenModel(f"{folder / manifests.FILE}: {error.message}") from None
    derived = parts(spec, weights)
    _compare(folder, manifest, derived)
    names = tuple(dict.fromkeys(part.file for part in manifest.parts))
    for name in names:
        _check_shard(folder / name, [part for part in manifest.parts if part.file == name])
    locations = {part.key: Location(names.index(part.file), part.offset, part.nbytes) for part in manifest.parts}
    files = tuple(folder / name for name in names)
    by_key = {p.key: p for p in derived}
    return Packed(folder, spec, weights, files, locations, by_key, manifest.total_bytes, find_disks(files))


def part_disks(folder: Path) -> dict[str, str]:
    """The disk of each part of a packed model; empty where the folder holds none."""
    if not is_packed(folder):
        return {}
    listed = read_manifest(folder).parts
    disks = find_disks(tuple(dict.fromkeys(folder / part.file for part in listed)))
    return {part.key: disks[folder / part.file] for part in listed}


def find_disks(files: Sequence[Path]) -> dict[Path, str]:
    """disk0, disk1, … for each file, by the file system that it (or what a link leads to) lies on, in order."""
    devices: dict[int, str] = {}
    found = {}
    for file in files:
        _require_target(file)
        found[file] = devices.setdefault(file.stat().st_dev, f"disk{len(devices)}")
    return found


def _require_target(file: Path) -> None:
    """A link to a file on a second disk leads somewhere. Raises StorageFailed."""
    if file.is_symlink() and not file.exists():
        raise StorageFailed(f"{file} leads to {os.readlink(file)}, which is not there: is its disk mounted?")


def read_manifest(folder: Path) -> Manifest:
    """penstock.json, checked for its form alone. Raises BrokenModel."""
    file = folder / manifests.FILE
    try:
        return manifests.loads(read_text(file, manifests.MAX_BYTES), str(file))
    except BadRequest as error:
        raise BrokenModel(f"{error.message} (packed by another version? pack the checkpoint again)") from None


def _compare(folder: Path, manifest: Manifest, derived: tuple[Part, ...]) -> None:
    """The parts that penstock.json lists are those that config.json leads to."""
    where = folder / manifests.FILE
    keys, expected = [part.key for part in manifest.parts], [part.key for part in derived]
    again = "packed by another version, or config.json was changed: pack the checkpoint again"
    if keys != expected:
        wrong = next((k for k in expected + keys if k not in keys or k not in expected), "the order")
        raise BrokenModel(f"{where} does not fit {CONFIG} ({quoted(wrong)} differs); {again}")
    for found, part in zip(manifest.parts, derived, strict=True):
        if found != manifests.describe(part, found.file, found.offset, found.crc32):
            raise BrokenModel(f"{where} does not fit {CONFIG}: part {part.key} has another layout; {again}")
        if not SHARD_NAME.fullmatch(found.file):
            raise BrokenModel(f"{where}: part {part.key} lies in {quoted(found.file)}, which is no shard's name")
        if found.offset < 0 or found.offset % PAGE_BYTES:
            raise BrokenModel(f"{where}: part {part.key} lies at byte {found.offset}, no multiple of {PAGE_BYTES}")
    total = sum(part.nbytes for part in manifest.parts)
    if manifest.total_bytes != total:
        raise BrokenModel(f"{where}: total_bytes is {manifest.total_bytes}, the parts have {total}")


def _check_shard(file: Path, listed: list[PackedPart]) -> None:
    """A shard's own header says the same as penstock.json."""
    _require_target(file)
    try:
        header = read_header(file)
    except BrokenModel as error:
        raise BrokenModel(f"{error.message}; pack the checkpoint again") from None
    if set(header.tensors) != {part.key for part in listed}:
        raise BrokenModel(f"{file} holds other parts than {manifests.FILE} lists")
    for part in listed:
        tensor = header.tensors[part.key]
        if (tensor.dtype, tensor.shape, tensor.offset) != ("U8", (part.granules, part.granule_bytes), part.offset):
            raise BrokenModel(f"{file}: its header and {manifests.FILE} disagree on part {part.key}")
    end = max(part.offset + part.nbytes for part in listed)
    if header.file_bytes != end:
        raise BrokenModel(f"{file} has {header.file_bytes} bytes, its parts end at {end}")
