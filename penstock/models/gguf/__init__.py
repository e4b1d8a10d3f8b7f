"""Reads which model a GGUF file holds: its metadata as the config.json of one of the model types, its tensors' names.

So a model has one spec, whatever file it comes from. `general.architecture` names the architecture; `ARCHITECTURES`
says which model types these are.
"""

from __future__ import annotations

from penstock.models.gguf.config import ARCHITECTURES, config_from_gguf
from penstock.models.gguf.names import ROPE_TABLES, gguf_sources

__all__ = ["ARCHITECTURES", "ROPE_TABLES", "config_from_gguf", "gguf_sources"]
