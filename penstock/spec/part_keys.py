"""Parts by their keys, and the keys of those that a layer's block, a norm or the head is made of (`spec/parts`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from penstock.spec.format import Format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import Part, parts


@lru_cache(maxsize=64)
def parts_by_key(model: ModelSpec, weights: Format) -> Mapping[str, Part]:
    return MappingProxyType({part.key: part for part in parts(model, weights)})


def norm_before(spec: ModelSpec, layer: int | None) -> tuple[str, bool, int]:
    """(key of its part, whether the model has it, values of a row) of the norm before a layer's blocks, or before the
    head where `layer` is None."""
    if layer is None:
        return "edges", spec.final_norm, spec.d_embed
    return f"{layer}.norms", spec.layers[layer].norm_in, spec.d_model


def block_keys(model: ModelSpec, layer: int, kind: str) -> tuple[str, ...]:
    """Keys of the parts whose units make up a layer's block, in the order in which they are computed. `kind`: attn or
    ffn."""
    routed = model.layers[layer].routed
    if kind == "attn" or routed is None:
        return (f"{layer}.{kind}",)
    return (f"{layer}.experts",) if routed.shared is None else (f"{layer}.shared", f"{layer}.experts")


def head_key(model: ModelSpec) -> str:
    return "embed" if model.tied else "head"


def gathered_key(model: ModelSpec) -> str:
    """The key of the part of which only single rows are read: the embedding of an untied model. A tied embedding is the
    head too, and read as a whole; then the key is ""."""
    return "" if model.tied else "embed"
