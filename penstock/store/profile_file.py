"""Keeps the profile of a model's routers, or of its neurons, in a file beside its packed weights."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import StorageFailed
from penstock.spec import profile as profiles
from penstock.spec.model import ModelSpec
from penstock.spec.profile import Profile
from penstock.store import manifest as manifests
from penstock.store.files import read_text, storage_errors, write_bytes

FILE = manifests.PROFILE
MAX_BYTES = 64 << 20


def file_of(profile: Profile) -> dict[str, bytes]:
    """The profile's file beside a packed model, by its name."""
    return {FILE: profiles.dumps(profile).encode()}


def require_place(folder: Path) -> None:
    """Raises StorageFailed where no file can be kept beside a packed model: reading a text for it takes minutes."""
    if not os.access(folder, os.W_OK):
        raise StorageFailed(
            f"{folder} cannot be written, and what is found is kept there: copy the model to where it can be"
        )


def keep(profile: Profile, folder: Path) -> Path:
    """Writes the profile beside a packed model and returns its file. Raises StorageFailed."""
    file = folder / FILE
    with storage_errors("write", file):
        write_bytes(file, profiles.dumps(profile).encode())
    return file


def kept(folder: Path, spec: ModelSpec) -> Profile | None:
    """The profile beside a packed model; None where there is none. Raises BadRequest and BrokenModel where it is of
    another model, or damaged."""
    file = folder / FILE
    return read(file, spec) if os.path.lexists(file) else None


def read(file: Path, spec: ModelSpec) -> Profile:
    """The profile in a file, which is of this model. Raises as `kept`."""
    profile = profiles.loads(read_text(file, MAX_BYTES), str(file))
    profile.check(spec, str(file))
    return profile
