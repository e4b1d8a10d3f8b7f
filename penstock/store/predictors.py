"""Keeps the predictors of a packed model in one file beside its weights, which is replaced as a whole.

The file is a safetensors file. Its metadata say what `spec.predictors` knows of them, with a checksum of its own, and
the checksum of each predictor's granule. So the header follows from that text, to the byte.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.errors import BadRequest, BrokenModel
from penstock.spec import predictors as spec_predictors
from penstock.spec.model import ModelSpec
from penstock.spec.parts import PAGE_BYTES, Part
from penstock.spec.predictors import TRAIN, Predictors
from penstock.store import manifest as manifests
from penstock.store.files import Output, open_regular, read_bytes, reading, storage_errors
from penstock.store.packed import Location, Packed, find_disks
from penstock.units import round_up

FILE = manifests.PREDICTORS
_MAX_HEADER_BYTES = 16 << 20
_KEY = "predictors"

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Granule = npt.NDArray[np.uint8]


def model_sha256(folder: Path) -> str:
    """What predictors name the packed model by that they are for. Raises BrokenModel, StorageFailed."""
    return hashlib.sha256(read_bytes(folder / manifests.FILE, manifests.MAX_BYTES)).hexdigest()


def keep(predictors: Predictors, granules: Sequence[Granule], folder: Path, spec: ModelSpec) -> Path:
    """Writes predictors beside a packed model and returns their file. `granules`: of each layer the predictor's. Their
    checksums are worked out here. Raises StorageFailed."""
    parts, file = predictors.parts(spec), folder / FILE
    sums = [_native.granule_sums(g.ctypes.data, 1, g.nbytes) for g in granules]
    predictors = replace(predictors, sums=tuple(each.hex() for each in sums))
    with storage_errors("write", file), Output(file) as output:
        output.stream.write(_header(predictors, parts))
        for granule in granules:
            output.stream.write(granule.data)
        output.commit()
    return file


def kept(folder: Path, spec: ModelSpec) -> Predictors | None:
    """What is known of the predictors beside a packed model; None where there are none. Raises BadRequest where they
    are of another model; BrokenModel where they are damaged, which packing the model again would not mend;
    StorageFailed."""
    return _read(folder, spec)[0] if os.path.lexists(folder / FILE) else None


def with_predictors(packed: Packed) -> Packed:
    """The packed model with its predictors among its parts, so that readers find them and compare them with their
    checksums. Raises BadRequest where there are none, and as `kept`."""
    if not os.path.lexists(packed.folder / FILE):
        raise BadRequest(f"{packed.folder} has no predictors, which --sparsity predict needs: {TRAIN}")
    predictors, data = _read(packed.folder, packed.spec)
    file, parts = packed.folder / FILE, {part.key: part for part in predictors.parts(packed.spec)}
    locations, offset = dict(packed.locations), data
    for key, part in parts.items():
        locations[key] = Location(len(packed.files), offset, part.nbytes)
        offset += part.nbytes
    files = (*packed.files, file)
    sums = None if packed.sums is None else packed.sums + b"".join(map(bytes.fromhex, predictors.sums))
    every = packed.parts | parts
    disks, ahead = find_disks(files), predictors.ahead
    return replace(packed, files=files, locations=locations, parts=every, sums=sums, disks=disks, ahead=ahead)


def _header(predictors: Predictors, parts: tuple[Part, ...]) -> bytes:
    """With the length before it, padded to whole pages."""
    described = manifests.seal(spec_predictors.dumps(predictors))
    entries: dict[str, Any] = {"__metadata__": {"format": "penstock", _KEY: described}}
    end = 0
    for part in parts:
        entries[part.key] = {"dtype": "U8", "shape": [1, part.nbytes], "data_offsets": [end, end + part.nbytes]}
        end += part.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    data = round_up(8 + len(text), PAGE_BYTES)
    return (data - 8).to_bytes(8, "little") + text.ljust(data - 8)


def _read(folder: Path, spec: ModelSpec) -> tuple[Predictors, int]:
    """(what is known of them, the byte of the file where the first one begins)."""
    file, again = folder / FILE, TRAIN
    with reading(file), os.fdopen(open_regular(file), "rb") as stream:
        file_bytes = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if length > min(_MAX_HEADER_BYTES, file_bytes):
            raise BrokenModel(f"{file} is no file of predictors: its header would have {length} bytes; {again}")
        header = stream.read(length)
    try:
        text = json.loads(header)["__metadata__"][_KEY]
        data = json.loads(text)
        body = json.dumps({k: v for k, v in data.items() if k != "sha256"}, indent=1, ensure_ascii=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BrokenModel(f"{file} is damaged: its header is not what was written; {again}") from None
    predictors = spec_predictors.loads(body, str(file))
    predictors.check(spec, str(file))
    parts = predictors.parts(spec)
    expected = _header(predictors, parts)
    if header != expected[8:]:
        raise BrokenModel(f"{file} is damaged, or was changed: its header is not what was written; {again}")
    if file_bytes != len(expected) + sum(part.nbytes for part in parts):
        raise BrokenModel(f"{file} has {file_bytes} bytes, which is not what was written; {again}")
    if predictors.model_sha256 != model_sha256(folder):
        raise BadRequest(f"{file} has the predictors of another packed model; {again}")
    return predictors, len(expected)
