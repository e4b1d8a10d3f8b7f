"""Opens packed models: checks everything but the weights, and tells where the weights lie.

The movers read the weights, and check each granule when they read it first. Only the standard library is used here.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from penstock.errors import BadRequest, BrokenModel, DamagedModel, StorageFailed, UnsupportedModel
from penstock.models import spec_from_config
from penstock.spec.format import Format
from penstock.spec.model import FfnSpec, ModelSpec
from penstock.spec.parts import PAGE_BYTES, Part, parts
from penstock.spec.places import Tier, disk
from penstock.spec.predictors import TRAIN
from penstock.store import manifest as manifests
from penstock.store.files import MAX_COPIED_BYTES, open_regular, parse_json, read_bytes, read_text, storage_errors
from penstock.store.gguf.files import Gguf, open_gguf
from penstock.store.gguf.header import is_gguf
from penstock.store.gguf.model import read_gguf_config
from penstock.store.header import quoted, read_header
from penstock.store.manifest import (
    AGAIN,
    CONFIG,
    COPIED,
    MAX_CONFIG_BYTES,
    SHARD_NAME,
    SUM_BYTES,
    SUMS,
    Manifest,
    PackedFile,
    PackedPart,
)

T = TypeVar("T")

# Bytes of memory that the tokenizer takes at its peak, per byte of tokenizer.json. BPE files of 65 k to 256 k entries
# took 9 to 19 (270 for each string in them, however the JSON is laid out), one without any white space 23.
TOKENIZER_PEAK = 16


class Location(NamedTuple):
    """Where a part lies: `nbytes` at `offset` (a multiple of 4096) of `Packed.files[file_index]`."""

    file_index: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Packed:
    """A packed model that passed the checks of `open_packed`. `parts`: by key, in the order in which a pass reads them.
    `sums`: the checksums of all granules, part after part, 8 bytes each; None where granules are not to be compared.
    `orders`: layer → the order of its neurons (`spec.order`); empty where that is the checkpoint's. `ahead`: how many
    layers before its own a predictor hears, where there are predictors among the parts."""

    folder: Path
    spec: ModelSpec
    weights: Format
    files: tuple[Path, ...]
    locations: dict[str, Location]
    parts: dict[str, Part]
    total_bytes: int
    disks: dict[Path, Tier]  # of each file
    sums: bytes | None = None
    orders: Mapping[int, array[int]] = field(default_factory=dict)
    ahead: int = 0

    @property
    def part_disks(self) -> dict[str, Tier]:
        """The disk of each part."""
        return {key: self.disks[self.files[location.file_index]] for key, location in self.locations.items()}

    @property
    def first_granules(self) -> dict[str, int]:
        """For each part the number of granules in all parts before it. Its checksums begin at SUM_BYTES times that."""
        firsts, count = {}, 0
        for key, part in self.parts.items():
            firsts[key] = count
            count += part.granules
        return firsts

    def sums_of(self, part_key: str) -> bytes:
        """The checksums of a part's granules, in order. Only of a model that has checksums."""
        assert self.sums is not None
        begin = SUM_BYTES * self.first_granules[part_key]
        return self.sums[begin : begin + SUM_BYTES * self.parts[part_key].granules]

    def locate(self, part_key: str, lo: int, hi: int) -> tuple[Path, int, int]:
        """Where granules lo..hi of a part lie: (file, offset, bytes). This is one contiguous range, aligned to 4096
        bytes. Raises ValueError for granules that the part does not have."""
        part, location = self.parts[part_key], self.locations[part_key]
        if not 0 <= lo <= hi <= part.granules:
            raise ValueError(f"{part_key} has {part.granules} granules, not {lo}..{hi}")
        stride = part.granule_bytes
        return self.files[location.file_index], location.offset + lo * stride, (hi - lo) * stride


def is_packed(folder: Path) -> bool:
    """Whether a folder holds a penstock.json. Opening the model refuses one that is not ours, by its name."""
    return os.path.lexists(folder / manifests.FILE)


def has_sums(folder: Path) -> bool:
    """Whether a packed model has checksums of all its bytes; one that an older version packed has not. Raises
    BrokenModel where penstock.json cannot be read."""
    return bool(read_files(folder))


def _no_config(folder: Path) -> str:
    """What is wrong with a folder without config.json, and what would work where it holds GGUF files."""
    files = sorted(file for file in folder.glob("*.gguf") if "mmproj" not in file.name)
    if not files:
        return f"{folder} holds no {CONFIG}: a model folder has one"
    return f"{folder} holds no {CONFIG}, but GGUF files: name one, such as {files[0]}"


def read_config(
    path: Path, listed: Sequence[PackedFile] = (), *, to_plan: bool = False
) -> tuple[dict[str, Any], ModelSpec]:
    """Reads config.json, and the ModelSpec that follows from it. `path`: a model's folder, or its config.json; or
    a GGUF file, whose metadata stand for it. The spec counts the bytes of a tokenizer.json beside it. `listed`: the
    files that a packed model lists; config.json is compared with its checksum among them. `to_plan`: the model is only
    planned, so a type that does not run yet will do.

    Raises BadRequest where there is none, BrokenModel where it is no JSON, DamagedModel, UnsupportedModel for an
    unknown model type.
    """
    if is_gguf(path):
        return read_opened(open_gguf(path), path, to_plan=to_plan)
    file = path / CONFIG if path.is_dir() else path
    if not file.exists():
        raise BadRequest(_no_config(path) if path.is_dir() else f"{path} is not there")
    if file.suffix == ".safetensors":
        raise BadRequest(f"{path} is a weights file: give its folder, which should hold {CONFIG}")
    content = read_bytes(file, MAX_CONFIG_BYTES)
    _compare_file(file, content, listed)
    config = parse_json(content, file)
    spec = spec_from_config(config, str(file), to_plan=to_plan)
    tokenizer = file.parent / "tokenizer.json"
    if tokenizer.is_file():
        spec = replace(spec, tokenizer_bytes=TOKENIZER_PEAK * tokenizer.stat().st_size)
    return config, spec


def read_opened(gguf: Gguf, path: Path, *, to_plan: bool = False) -> tuple[dict[str, Any], ModelSpec]:
    """As `read_config`, of a GGUF file whose header was read. `path`: what errors call it."""
    config = read_gguf_config(gguf)
    return config, spec_from_config(config, str(path), to_plan=to_plan)


def check_files(folder: Path) -> None:
    """Compares all small files of a packed model with penstock.json. Of a model that an older version packed nothing is
    compared.

    Raises DamagedModel for a file that has changed, and for a file that would be used but is not listed. Other files in
    the folder are left alone.
    """
    listed = read_files(folder)
    if not listed:
        return
    for small in listed:
        file = folder / small.name
        _compare_file(file, read_bytes(file, MAX_COPIED_BYTES), listed)
    names = {small.name for small in listed}
    for name in (*COPIED, manifests.USED_FOLDER):
        if name not in names and os.path.lexists(folder / name):
            raise DamagedModel(f"{folder / name} was not there when the model was packed; {AGAIN}")


def _compare_file(file: Path, content: bytes, listed: Sequence[PackedFile]) -> None:
    """Raises DamagedModel where a file's content differs from what is listed. A file that is not listed is not
    compared."""
    for small in listed:
        if small.name != file.name:
            continue
        if len(content) != small.nbytes:
            raise DamagedModel(f"{file} has {len(content)} bytes, it was packed with {small.nbytes}; {AGAIN}")
        if hashlib.sha256(content).hexdigest() != small.sha256:
            raise DamagedModel(f"{file} is damaged, or was changed after packing: its checksum does not fit; {AGAIN}")


def damaged_granule(file: Path, part: str, granule: int) -> BrokenModel:
    """The error for a granule whose bytes are not those that were packed: DamagedModel, but for a predictor's, which
    packing the model again would not mend."""
    trained = file.name == manifests.PREDICTORS
    kind, way_out = (BrokenModel, TRAIN) if trained else (DamagedModel, AGAIN)
    return kind(
        f"{file}: granule {granule} of part {part} is damaged: its checksum does not fit; {way_out}",
        file=str(file),
        part=part,
        granule=granule,
    )


def open_packed(folder: Path, verify: bool = True) -> Packed:
    """Opens a packed model: reads penstock.json, config.json, the shards' headers and the checksums, and no weights.

    With `verify` each of these files is compared with its checksum, and the movers will compare the weights. A model
    that an older version packed cannot be compared; a warning says so. penstock.json is always compared if it has a
    checksum.

    Raises BadRequest where the folder holds no packed model; BrokenModel, which names the file, where it is truncated,
    inconsistent, or packed by another version; DamagedModel where bytes are not those that were packed; StorageFailed
    where a second disk is missing.
    """
    if not is_packed(folder):
        raise BadRequest(f"{folder} holds no packed model (no {manifests.FILE}): make one with `penstock pack`")
    manifest = read_manifest(folder)
    if verify and not manifest.has_sums:
        warnings.warn(
            f"{folder} was packed by an older version: its bytes are not checked; pack it again", stacklevel=2
        )
    verify = verify and manifest.has_sums
    _, spec = read_config(folder, manifest.files if verify else ())
    try:
        weights = manifests.formats(manifest)
    except BadRequest as error:
        raise BrokenModel(f"{folder / manifests.FILE}: {error.message}") from None
    derived = parts(spec, weights)
    _compare(folder, manifest, derived)
    names = tuple(dict.fromkeys(part.file for part in manifest.parts))
    by_key = {p.key: p for p in derived}
    for name in names:
        listed = [part for part in manifest.parts if part.file == name]
        _check_shard(folder / name, listed)
        if verify:
            _compare_header(folder / name, [by_key[part.key] for part in listed])
    locations = {part.key: Location(names.index(part.file), part.offset, part.nbytes) for part in manifest.parts}
    files = tuple(folder / name for name in names)
    sums = _read_sums(folder / SUMS, manifest) if verify else None
    orders = orders_of(folder, manifest, spec)
    return Packed(
        folder, spec, weights, files, locations, by_key, manifest.total_bytes, find_disks(files), sums, orders
    )


def orders_of(folder: Path, manifest: Manifest, spec: ModelSpec) -> dict[int, array[int]]:
    """The order of each layer's neurons. Raises BrokenModel where it is none."""
    if not manifest.orders:
        return {}
    where = folder / manifests.FILE
    neurons = [layer.ffn.neurons if isinstance(layer.ffn, FfnSpec) else 0 for layer in spec.layers]
    if not spec.fires or [each.layer for each in manifest.orders] != list(range(len(neurons))):
        raise BrokenModel(f"{where}: its orders of neurons are not those of this model's layers; {AGAIN}")
    try:
        return {each.layer: each.numbers(neurons[each.layer]) for each in manifest.orders}
    except BadRequest as error:
        raise BrokenModel(f"{where}: {error.message}; {AGAIN}") from None


def part_disks(folder: Path) -> dict[str, Tier]:
    """The disk of each part of a packed model; empty where the folder holds none. Raises BrokenModel, DamagedModel,
    StorageFailed."""
    if not is_packed(folder):
        return {}
    listed = read_manifest(folder).parts
    disks = find_disks(tuple(dict.fromkeys(folder / part.file for part in listed)))
    return {part.key: disks[folder / part.file] for part in listed}


def find_disks(files: Sequence[Path]) -> dict[Path, Tier]:
    """The disk of each file. Each file system is a disk; they are numbered in the order in which files first lie on
    them. A link counts as the file that it leads to. Raises StorageFailed where that is missing."""
    devices: dict[int, Tier] = {}
    disks = {}
    for file in files:
        _require_target(file)
        disks[file] = devices.setdefault(file.stat().st_dev, disk(len(devices)).tier)
    return disks


def _require_target(file: Path) -> None:
    """Raises StorageFailed where a link to a file on a second disk leads nowhere."""
    if file.is_symlink() and not file.exists():
        raise StorageFailed(f"{file} leads to {os.readlink(file)}, which is not there: is its disk mounted?")


def read_manifest(folder: Path) -> Manifest:
    """penstock.json, checked for its form and compared with its own checksum. Raises BrokenModel, DamagedModel."""
    return _read(folder, manifests.loads)


def read_files(folder: Path) -> tuple[PackedFile, ...]:
    """The small files that a packed model lists; none where an older version packed it. Raises as `read_manifest`."""
    return _read(folder, manifests.loads_files)


def _read(folder: Path, loads: Callable[[str, str], T]) -> T:
    file = folder / manifests.FILE
    try:
        return loads(read_text(file, manifests.MAX_BYTES), str(file))
    except BadRequest as error:
        raise BrokenModel(f"{error.message} (packed by another version? pack the checkpoint again)") from None


def _compare(folder: Path, manifest: Manifest, derived: tuple[Part, ...]) -> None:
    """Raises BrokenModel where penstock.json lists other parts than those that follow from config.json."""
    where = folder / manifests.FILE
    keys, expected = [part.key for part in manifest.parts], [part.key for part in derived]
    again = "packed by another version, or config.json was changed: pack the checkpoint again"
    if keys != expected:
        wrong = next((k for k in expected + keys if k not in keys or k not in expected), "the order")
        raise BrokenModel(f"{where} does not fit {CONFIG} ({quoted(wrong)} differs); {again}")
    for listed, part in zip(manifest.parts, derived, strict=True):
        if listed != manifests.describe(part, listed.file, listed.offset):
            raise BrokenModel(f"{where} does not fit {CONFIG}: part {part.key} has another layout; {again}")
        if not SHARD_NAME.fullmatch(listed.file):
            raise BrokenModel(f"{where}: part {part.key} lies in {quoted(listed.file)}, which is no shard's name")
        if listed.offset < 0 or listed.offset % PAGE_BYTES:
            raise BrokenModel(f"{where}: part {part.key} lies at byte {listed.offset}, no multiple of {PAGE_BYTES}")
    total = sum(part.nbytes for part in manifest.parts)
    if manifest.total_bytes != total:
        raise BrokenModel(f"{where}: total_bytes is {manifest.total_bytes}, the parts have {total}")


def _check_shard(file: Path, listed: list[PackedPart]) -> None:
    """Raises BrokenModel where a shard's own header and penstock.json disagree."""
    _require_target(file)
    try:
        header = read_header(file)
    except (BrokenModel, UnsupportedModel) as error:  # Unsupported: an unknown element type, where packing wrote U8
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


def _compare_header(file: Path, parts: list[Part]) -> None:
    """Raises DamagedModel where a shard's header is not, to the byte, the one that follows from its parts."""
    expected = manifests.shard(file.name, parts).header
    with storage_errors("read", file), os.fdopen(open_regular(file), "rb") as stream:
        header = stream.read(len(expected))
    if header != expected:
        raise DamagedModel(f"{file} is damaged: its header is not what was packed; {AGAIN}")


def _read_sums(file: Path, manifest: Manifest) -> bytes:
    """The checksums of all granules. Raises BrokenModel, DamagedModel."""
    need = SUM_BYTES * sum(part.granules for part in manifest.parts)
    content = read_bytes(file, MAX_COPIED_BYTES)
    _compare_file(file, content, manifest.files)
    if len(content) != need:
        raise BrokenModel(f"{file} has {len(content)} bytes; the checksums of this model have {need}")
    return content
