"""Looks for tensors of a GGUF file that the model would not use."""

from __future__ import annotations

import re
from collections.abc import Container

from penstock.errors import BrokenModel
from penstock.models.gguf import ROPE_TABLES
from penstock.spec.model import ModelSpec
from penstock.store.header import TensorInfo, quoted

# Tables that follow from the metadata.
_HARMLESS = re.compile(r"blk\.[0-9]+\.attn_rot_embd\.weight|blk\.[0-9]+\.rope_freqs\.weight")


def unused_in_gguf(tensors: dict[str, TensorInfo], used: Container[str], spec: ModelSpec) -> list[str]:
    """Names of tensors outside of layers that the model would not use, to be warned of. Raises BrokenModel for one in a
    layer: the model would compute something else than it was trained to."""
    unused = []
    for name, tensor in tensors.items():
        if name in used or name in ROPE_TABLES or _HARMLESS.fullmatch(name):
            continue
        layer = re.match(r"blk\.([0-9]{1,9})\.", name)
        if layer is None:
            unused.append(name)
        elif int(layer[1]) >= len(spec.layers):
            raise BrokenModel(
                f"{tensor.file}: tensor {quoted(name)} is of layer {int(layer[1])}, counted from 0; block_count says"
                f" {len(spec.layers)}"
            )
        else:
            raise BrokenModel(
                f"{tensor.file}: tensor {quoted(name)} would not be used: a {spec.model_type} model has none such"
            )
    return unused
