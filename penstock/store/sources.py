"""Where the blocks of a model stand in a checkpoint that is at hand."""

from __future__ import annotations

from penstock.models import TensorSource, sources, stacked_sources
from penstock.models.hf.names import EXPERT
from penstock.spec.model import ModelSpec
from penstock.store.checkpoint import Checkpoint


def sources_in(checkpoint: Checkpoint, spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    """Where every block stands in this checkpoint: experts' matrices stand apart, or in one tensor."""
    found, other = sources(spec), stacked_sources(spec)
    first = next((key for key, source in found.items() if EXPERT in source.tensor), None)
    if first is None or other is None or checkpoint.has(found[first].of_expert(0)):
        return found
    return other if checkpoint.has(other[first].tensor) else found
