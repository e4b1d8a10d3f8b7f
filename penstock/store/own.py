"""The number formats that a checkpoint's own tensors have: those that packing keeps where nobody asks for others."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from penstock.errors import BadRequest, UnsupportedModel
from penstock.spec.blocks import GROUP
from penstock.spec.format import FLOAT32, Format, mixture
from penstock.spec.model import ModelSpec
from penstock.spec.parts import PINNED, parts
from penstock.spec.widened import as_kept, cuts_groups
from penstock.store.blocks import format_of
from penstock.store.checkpoint import Checkpoint
from penstock.store.gguf.header import is_gguf
from penstock.store.gguf.model import mixture_label
from penstock.store.header import KINDS, TensorInfo, quoted
from penstock.store.packed import read_config, read_opened
from penstock.store.sources import sources_in
from penstock.units import format_bytes


def own_format(src: Path) -> Format:
    """The format that `pack` gives to the weights of a checkpoint where no other one is asked for. Raises as `pack`."""
    return own_model(src)[1]


def own_model(src: Path, wanted: Format | None = None) -> tuple[ModelSpec, Format]:
    """The spec and the formats that `pack` gives to a checkpoint whose weights are `wanted` in a format, None for its
    own. Reads headers, and no weights. The header of a GGUF file is read once: one with 128 thousand tokens takes
    40 ms. Raises as `pack`."""
    spec = None if is_gguf(src) else read_config(src)[1]
    with Checkpoint.open(src) as checkpoint:
        if spec is None:
            assert checkpoint.gguf is not None
            spec = read_opened(checkpoint.gguf, src)[1]
        checkpoint.require_order(may_lack_it=True)
        spec = replace(spec, dtype=own_dtype(checkpoint, spec))
        own = own_weights(checkpoint, spec)
        if wanted is not None and wanted != own:
            require_floats(checkpoint, spec, own)
        return spec, wanted or own


def own_dtype(checkpoint: Checkpoint, spec: ModelSpec) -> str:
    """The narrowest format that holds every matrix exactly, of those that do not lie in blocks. It follows from the
    headers, whatever config.json says. Where all lie in blocks it is float16, as their scales are."""
    dtypes = _dtypes(checkpoint, spec) & KINDS.keys()
    return KINDS[dtypes.pop()] if len(dtypes) == 1 else "float32" if dtypes else "float16"


def own_weights(checkpoint: Checkpoint, spec: ModelSpec) -> Format:
    """The formats that hold every matrix exactly. `spec`: with `own_dtype`. Where all are floats in a folder they get
    the same format, else each its own (but for `as_kept`). Raises UnsupportedModel for formats that a model
    cannot have."""
    if checkpoint.gguf is None and _dtypes(checkpoint, spec) <= KINDS.keys():
        return Format(spec.dtype)
    table: dict[str, Format] = {}
    for key, block, kind, tensor in _matrices(checkpoint, spec):
        fmt = format_of(tensor.dtype)
        assert fmt is not None  # `weights` has found it
        if kind not in PINNED and table.setdefault(f"{key}.{block}", fmt) != fmt:
            raise UnsupportedModel(f"{checkpoint.folder} has experts of a layer in {fmt.name} and in another format")
    mixed = mixture(as_kept(table, spec), mixture_label(checkpoint.gguf) if checkpoint.gguf is not None else "")
    try:
        parts(spec, mixed)
    except BadRequest as error:
        raise UnsupportedModel(f"{checkpoint.folder}: {error.message}") from None
    return mixed


def tell_widened(checkpoint: Checkpoint, spec: ModelSpec, own: Format) -> None:
    """Warns of matrices that `own` has in more bytes than the checkpoint (`as_kept`)."""
    by_key = {part.key: part for part in parts(spec, own)}
    beside, cut = dict[str, int](), dict[str, int]()
    for key, block, _, tensor in _matrices(checkpoint, spec):
        if tensor.dtype not in KINDS and own.of(key, block) == FLOAT32:
            (cut if cuts_groups(by_key[key].block(block)) else beside)[tensor.name] = tensor.nbytes
    for widened, why in (
        (beside, "floats multiply the same rows"),
        (cut, f"heads end within a group of {GROUP} columns"),
    ):
        if widened:
            size = format_bytes(sum(widened.values()))
            warnings.warn(
                f"{checkpoint.folder}: {len(widened)} quantised matrices ({size}) are held in float32, since {why}:"
                f" {quoted(min(widened))}",
                stacklevel=2,
            )


def require_floats(checkpoint: Checkpoint, spec: ModelSpec, own: Format) -> None:
    """Raises UnsupportedModel where matrices are quantised already. `own`: of these."""
    if not _dtypes(checkpoint, spec) <= KINDS.keys():
        raise UnsupportedModel(
            f"{checkpoint.folder} is quantised ({own.name}), and penstock keeps its numbers: go without --weights"
        )


def _dtypes(checkpoint: Checkpoint, spec: ModelSpec) -> set[str]:
    """Element types of all tensors that are matrices."""
    return {tensor.dtype for _, _, _, tensor in _matrices(checkpoint, spec)}


def _matrices(checkpoint: Checkpoint, spec: ModelSpec) -> Iterator[tuple[str, str, str, TensorInfo]]:
    """(part, block, kind of the part, tensor) of every tensor that is a matrix. Raises as `Checkpoint.weights`."""
    by_key = {part.key: part for part in parts(spec, FLOAT32)}
    for (key, block), source in sources_in(checkpoint, spec).items():
        if (b := by_key[key].block(block)).tiled or b.rows > 1:
            for name in source.tensors(by_key[key].experts):
                yield key, block, by_key[key].kind, checkpoint.weights(name)
