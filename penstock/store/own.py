"""The number formats that a checkpoint's own tensors have: those that packing keeps where nobody asks for others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from penstock.errors import UnsupportedModel
from penstock.spec.format import FLOAT32, Format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import PINNED, parts
from penstock.store.blocks import format_of
from penstock.store.checkpoint import KINDS, Checkpoint
from penstock.store.packed import read_config
from penstock.store.sources import sources_in


def own_format(src: Path) -> Format:
    """The format that `pack` gives to the weights of a checkpoint where no other one is asked for. Reads headers, and
    no weights. Raises as `pack`."""
    _, spec = read_config(src)
    with Checkpoint.open(src) as checkpoint:
        return own_weights(checkpoint, replace(spec, dtype=own_dtype(checkpoint, spec)))


def own_dtype(checkpoint: Checkpoint, spec: ModelSpec) -> str:
    """The narrowest format that holds every matrix exactly, of those that do not lie in blocks. It follows from the
    headers, whatever config.json says. Where all lie in blocks it is float16, as their scales are."""
    dtypes = {dtype for _, dtype in _dtypes(checkpoint, spec)} & KINDS.keys()
    return KINDS[dtypes.pop()] if len(dtypes) == 1 else "float32" if dtypes else "float16"


def own_weights(checkpoint: Checkpoint, spec: ModelSpec) -> Format:
    """The format that holds every matrix exactly. `spec`: with `own_dtype`. Raises UnsupportedModel where matrices in
    blocks have several."""
    dtypes = {dtype for kind, dtype in _dtypes(checkpoint, spec) if kind not in PINNED}
    if checkpoint.gguf is not None and len(dtypes) == 1 and dtypes <= KINDS.keys():
        return Format(KINDS[dtypes.pop()])  # routers are float32 there, whatever all else is
    if dtypes <= KINDS.keys():
        return Format(spec.dtype)
    formats = {format_of(dtype) for dtype in dtypes}
    only = formats.pop()
    if formats or only is None or only.in_blocks:
        raise UnsupportedModel(
            f"{checkpoint.folder} has matrices in {', '.join(sorted(dtypes))}: of GGUF files this version runs those in"
            " F32, F16, BF16 or Q4_1 alone"
        )
    return only


def require_floats(checkpoint: Checkpoint, spec: ModelSpec, own: Format) -> None:
    """Raises UnsupportedModel where matrices are quantised already. `own`: of these."""
    if not {dtype for _, dtype in _dtypes(checkpoint, spec)} <= KINDS.keys():
        raise UnsupportedModel(
            f"{checkpoint.folder} is quantised ({own.name}), and penstock keeps its numbers: go without --weights"
        )


def _dtypes(checkpoint: Checkpoint, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """(kind of its part, element type) of every tensor that is a matrix."""
    by_key = {part.key: part for part in parts(spec, FLOAT32)}
    for (key, block), source in sources_in(checkpoint, spec).items():
        if (b := by_key[key].block(block)).tiled or b.rows > 1:
            for name in source.tensors(by_key[key].experts):
                yield by_key[key].kind, checkpoint.weights(name).dtype
