"""StableLM 2 and 3B: llama with layer norms, a quarter of each head rotated."""

from __future__ import annotations

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import END_NAMES, LAYER_NAMES, Defaults, Details, decoder
from penstock.models.hf.names import TensorSource, sources_of
from penstock.models.hf.rope import RopeRules
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=4096, kv_heads=32, eps=1e-5)

_ROPE = RopeRules(partial=True, share=0.25)
_LAYER_NAMES = LAYER_NAMES | {
    "attn_in_bias": "model.layers.{}.input_layernorm.bias",
    "ffn_in_bias": "model.layers.{}.post_attention_layernorm.bias",
}
_END_NAMES = END_NAMES | {"edges.final_bias": "model.norm.bias"}


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
    return sources_of(spec, _LAYER_NAMES, _END_NAMES)
