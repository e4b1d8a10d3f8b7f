"""Finds the tensors of a checkpoint that hold each block of a model."""

from __future__ import annotations

from penstock.models import TensorSource, sources, stacked_sources
from penstock.models.gguf import gguf_sources
from penstock.spec.model import ModelSpec
from penstock.store.checkpoint import Checkpoint


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
