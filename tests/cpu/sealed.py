"""Packed models that a test has changed, and checksums that fit it again, to meet the checks behind them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from penstock import _native
from penstock.store import manifest as manifests
from penstock.store.packed import Packed


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON file of a packed model, as somebody would who makes all checksums fit."""
    content = json.loads((folder / name).read_text())
    change(content)
    if name == manifests.FILE:
        _write(folder, content)
    else:
        _replace(folder / name, json.dumps(content).encode())
        reseal(folder)


def reseal(folder: Path, weights: bool = False) -> None:
    """Lists the small files anew, as they are. `weights`: also the granules."""
    content = json.loads((folder / manifests.FILE).read_text())
    if weights:
        _replace(folder / manifests.SUMS, b"".join(_sums(folder, part) for part in content["parts"]))
    present = [name for name in (manifests.CONFIG, manifests.SUMS, *manifests.COPIED) if (folder / name).is_file()]
    files = [manifests.describe_file(name, (folder / name).read_bytes()) for name in present]
    content["files"] = [{"name": f.name, "nbytes": f.nbytes, "sha256": f.sha256} for f in files]
    _write(folder, content)


def as_version_2(folder: Path) -> None:
    """The model as penstock wrote it before there were checksums of granules."""
    content = json.loads((folder / manifests.FILE).read_text())
    del content["files"], content["sha256"]
    content["schema"] = "penstock.packed/2"
    for part in content["parts"]:
        part["crc32"] = 0
    _replace(folder / manifests.FILE, (json.dumps(content, indent=1) + "\n").encode())
    (folder / manifests.SUMS).unlink()


def flip(file: Path, at: int, change: int) -> None:
    """One byte, in place: the file stays the one that is open elsewhere."""
    with file.open("r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ change]))


@contextmanager
def damaged(packed: Packed, part: str, granule: int, byte: int, change: int) -> Iterator[None]:
    file, offset, nbytes = packed.locate(part, granule, granule + 1)
    flip(file, offset + byte % nbytes, change)
    try:
        yield
    finally:
        flip(file, offset + byte % nbytes, change)


def _write(folder: Path, content: dict[str, Any]) -> None:
    content.pop("sha256", None)
    _replace(folder / manifests.FILE, manifests.seal(json.dumps(content, indent=1)).encode())


def _replace(file: Path, content: bytes) -> None:
    """A new file: the old one may have other names, in the model that a test made a copy of by links."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)


def _sums(folder: Path, part: dict[str, Any]) -> bytes:
    count, stride = part["granules"], part["granule_bytes"]
    with (folder / part["file"]).open("rb") as stream:
        stream.seek(part["offset"])
        data = np.frombuffer(stream.read(count * stride), np.uint8)
    return _native.granule_sums(data.ctypes.data, count, stride)
