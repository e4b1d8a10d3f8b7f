"""Finds the tensors of a checkpoint that hold each block of a model."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.errors import UnsupportedModel
from penstock.models import TensorSource, sources, stacked_sources
from penstock.models.gguf import gguf_sources
from penstock.spec.model import ModelSpec
from penstock.spec.parts import Part
from penstock.spec.widened import ONE_INPUT
from penstock.store.checkpoint import Checkpoint
from penstock.store.header import quoted


def sources_in(checkpoint: Checkpoint, spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    """(part, block) → its tensor in this checkpoint. Some checkpoints have a tensor for each expert's matrix, others
    stack the matrices of all experts in one tensor. gpt-oss has two ways to stack them."""
    if checkpoint.gguf is not None:
        return gguf_sources(spec, checkpoint.gguf.metadata["general.architecture"], checkpoint.tensors)
    apart, stacked = sources(spec), stacked_sources(spec)
    of_experts = next((key for key in apart if key[0].endswith(".experts")), None)
    if of_experts is None or stacked is None or checkpoint.has(apart[of_experts].of_expert(0)):
        return apart
    return stacked if checkpoint.has(stacked[of_experts].tensor) else apart


def moved_neurons(
    checkpoint: Checkpoint, parts: Sequence[Part], sources: Mapping[tuple[str, str], TensorSource]
) -> dict[int, array[int]]:
    """Layer → the order of the columns of its `down`, in which its neurons are packed. Raises UnsupportedModel where
    matrices that read the same input have different orders, or the head or the embedding has one."""
    moved: dict[int, array[int]] = {}
    for part in parts:
        if part.kind in ("embed", "head"):
            _require_no_order(checkpoint, sources[part.key, "rows"].tensor)
        for names in ONE_INPUT:  # which can lie in one order only
            tensors = [sources[part.key, block.name].tensor for block in part.blocks if block.name in names]
            for other in tensors[1:]:
                if not np.array_equal(checkpoint.order_of(tensors[0]), checkpoint.order_of(other)):
                    raise UnsupportedModel(
                        f"{checkpoint.folder}: {quoted(tensors[0])} and {quoted(other)} were quantised in different"
                        " orders of columns (act-order), and read the same input; checkpoints with desc_act false run"
                    )
        if part.kind == "ffn":
            moved[part.layer] = array("I", checkpoint.order_of(sources[part.key, "down"].tensor).tolist())
    return moved


def _require_no_order(checkpoint: Checkpoint, name: str) -> None:
    """Nothing brings the head's input into an order, nor an embedding's rows out of it."""
    order = checkpoint.order_of(name)
    if not np.array_equal(order, np.arange(len(order))):
        raise UnsupportedModel(
            f"{checkpoint.folder}: {quoted(name)} was quantised in an order of columns of its own (act-order), which"
            " runs in layers alone; checkpoints with desc_act false run"
        )
