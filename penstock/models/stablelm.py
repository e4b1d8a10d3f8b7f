"""StableLM 2 and 3B: llama with layer norms, a quarter of each head rotated."""

from __future__ import annotations

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import LAYER_NORM_END_NAMES, LAYER_NORM_NAMES, Defaults, Details, decoder
from penstock.models.hf.names import TensorSource, sources_of
from penstock.models.hf.rope import RopeRules
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=4096, kv_heads=32, eps=1e-5)

_ROPE = RopeRules(partial=True, share=0.25)


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel. The latter also for a norm for each head, and for FFNs beside attention:
    both are StableLM 2 12B's."""
    for key in ("qk_layernorm", "use_parallel_residual"):
        if config.flag(key, False):
            raise config.unsupported(key, "is set; penstock runs stablelm without it")
    details = Details(
        qkv_bias=config.flag("use_qkv_bias", False), norm="layer", norm_eps_key="layer_norm_eps", rope=_ROPE
    )
    return decoder(config, "stablelm", DEFAULTS, details)


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    return sources_of(spec, LAYER_NORM_NAMES, LAYER_NORM_END_NAMES)
