"""Packs a checkpoint into a packed model, granule by granule, for `penstock pack`.

Peak memory is the sum of these: a base of some 60 MiB, four stages of 8 MiB, what each encoding thread has read, and
the two largest tensors that are cut by columns (`down`, `o`). The columns of a granule lie apart in the file. So such a
tensor is read once, and kept until all its granules are made.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import BadRequest
from penstock.models import says_experts
from penstock.spec.format import Format
from penstock.spec.model import ModelSpec
from penstock.spec.order import hot_to_cold
from penstock.spec.parts import parts
from penstock.spec.profile import Profile
from penstock.store import pooling
from penstock.store.checkpoint import Checkpoint
from penstock.store.files import MAX_COPIED_BYTES, read_bytes
from penstock.store.gguf.header import is_gguf
from penstock.store.gguf.model import gguf_text_files
from penstock.store.manifest import CONFIG, COPIED
from penstock.store.own import own_dtype, own_weights, require_floats, tell_widened
from penstock.store.packed import is_packed, read_config, read_opened
from penstock.store.packing import Packing
from penstock.store.profile_file import file_of
from penstock.store.quantize import require_own
from penstock.store.sources import moved_neurons, sources_in
from penstock.store.unused import check_unused
from penstock.store.verify import verify
from penstock.store.writer import SHARD_BYTES, Progress, Waiting, Writing

__all__ = ["COPIED", "pack", "verify"]


def pack(
    src: Path,
    dst: Path,
    weights: Format | None = None,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    spread: Path | None = None,
    *,
    profile: Profile | None = None,
    check: Callable[[Path], None] | None = None,
    waiting: Waiting | None = None,
    writing: Writing | None = None,
) -> Path:
    """Packs the checkpoint `src`, a folder or a GGUF file, into the new folder `dst` and returns `dst`.

    `weights`: the format of every matrix, None for the checkpoint's own: a GGUF file keeps its numbers. Positions and
    projections always keep the checkpoint's own; norms and biases become float32. `spread`: a folder on a second disk,
    which gets half of the bytes, so that both disks can be read at once. `profile`: of this model, which counted
    neurons: each layer's lie hot to cold (`spec.order`), and the profile is kept beside the packed model.
    `progress(bytes_done, bytes_total, part_key)` is called some hundred times per GB. `check(folder)`: another check of
    the checkpoint's small files, which may raise; it is called before anything is written, after the quicker checks
    here. `waiting`, `writing`: for a `dst` that several processes may want at once (`store.writer`).

    After an interrupted call the same call goes on where that stopped.

    Raises BadRequest where `src` is no checkpoint or `dst` is there already; BrokenModel; UnsupportedModel;
    StorageFailed, which for a full disk has the bytes needed and free.
    """
    if is_packed(src):
        raise BadRequest(f"{src} is packed already: give the checkpoint that it was packed from")
    with opened(src, weights, profile) as job, ThreadPoolExecutor(threads(), "penstock-pack") as pool:
        if check is not None:
            with job.text_folder() as folder:
                check(folder)
        beside = {} if profile is None else file_of(profile)
        return job.write(dst, job.filler(pool), progress, shard_bytes, spread, waiting, writing, beside)


@contextmanager
def opened(src: Path, weights: Format | None, profile: Profile | None = None) -> Iterator[Packing]:
    """Opens a checkpoint for packing: reads and checks headers, shapes and small files. Raises as `pack`."""
    if not is_gguf(src):
        config, spec = read_config(src)
    with Checkpoint.open(folder := src if src.is_dir() or is_gguf(src) else src.parent) as checkpoint:
        if checkpoint.gguf is not None:
            config, spec = read_opened(checkpoint.gguf, src)
        checkpoint.require_order()
        own = own_dtype(checkpoint, spec)
        spec = replace(spec, dtype=own)
        kept = own_weights(checkpoint, spec)
        if weights is not None and weights != kept:
            require_own(weights)
            require_floats(checkpoint, spec, kept)
        if profile is not None and checkpoint.pieces:
            raise BadRequest(f"{src} is quantised: its neurons cannot lie in another order, go without --profile")
        weights = weights or kept
        if checkpoint.gguf is not None:
            said = pooling.said_by(pooling.of_gguf(checkpoint.gguf.metadata))
            extras = gguf_text_files(checkpoint.gguf) | {CONFIG: _as_json({**config, "torch_dtype": own, **said})}
        else:
            extras = {
                name: read_bytes(folder / name, MAX_COPIED_BYTES) for name in COPIED if os.path.lexists(folder / name)
            }
            said = pooling.said_by(pooling.of_folder(folder))
            extras[CONFIG] = _config_bytes(folder / CONFIG, config, own, said)
        orders = {} if profile is None else orders_by(profile, spec)
        packing = Packing(checkpoint, parts(spec, weights), sources_in(checkpoint, spec), weights, extras, orders)
        packing.check_shapes(says_experts(config))
        if any(layer.ordered for layer in spec.layers):
            packing = replace(packing, moved=moved_neurons(checkpoint, packing.parts, packing.sources))
            if spec.fires:
                packing = replace(packing, orders=packing.moved)
        check_unused(checkpoint, config, spec)
        tell_widened(checkpoint, spec, weights)
        yield packing


def orders_by(
    profile: Profile, spec: ModelSpec, before: Mapping[int, Sequence[int]] | None = None, together: int = 1
) -> dict[int, array[int]]:
    """The order of each layer's neurons, hot to cold. `before`, `together`: as for `hot_to_cold`. Raises BadRequest for
    a profile that counted no neurons."""
    profile.check(spec, profile.name)
    if not profile.neurons:
        raise BadRequest(
            f"the profile of {profile.name} counted no neurons: the model has no ReLU, so all of them fire"
        )
    before = before or {}
    return {n.layer: hot_to_cold(n.counted(), before.get(n.layer), together) for n in profile.neurons}


def threads() -> int:
    """How many threads read and encode."""
    # A thread that reads computes nothing, and a disk wants some reads at once. More than 8 only wait for it.
    return min(8, len(os.sched_getaffinity(0)) + 3)


def _config_bytes(file: Path, config: dict[str, Any], own: str, said: dict[str, str]) -> bytes:
    """The content of the packed model's config.json: the checkpoint's, but with the number format corrected to `own`
    where it says another one, for the packed parts must follow from it, and with what it `said` elsewhere."""
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    if str(config.get(key, "float32")).removeprefix("torch.") == own and not said:
        return read_bytes(file, MAX_COPIED_BYTES)
    return _as_json({**config, key: own, **said})


def _as_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
