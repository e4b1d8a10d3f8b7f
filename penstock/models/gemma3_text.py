"""Gemma 3 without pictures: Gemma 2's norms and windows, RMS norms on each head's q and k, and two ropes: one for
layers that see everything, one for layers with a window, of which there are five for each of the others."""

from __future__ import annotations

from typing import Any

from penstock.models.hf.config import MAX_LAYERS, Config
from penstock.models.hf.decoder import (
    END_NAMES,
    FULL,
    NORMED_OUT_NAMES,
    SLIDING,
    Defaults,
    Details,
    decoder,
    layer_types_of,
)
from penstock.models.hf.names import TensorSource, sources_of
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=131_072, kv_heads=4, head_dim=256, tied=True, activation="gelu_pytorch_tanh")
_THETA, _LOCAL_THETA = 1e6, 1e4  # of layers that see everything, and of layers with a window

_HEAD_NORMS = ("q_norm", "k_norm")


def spec(config: Config, model_type: str = "gemma3_text") -> ModelSpec:
    """`model_type`: under which its tensors are found. Raises BrokenModel and UnsupportedModel."""
    if config.has("use_bidirectional_attention") and config.flag("use_bidirectional_attention", False):
        raise config.unsupported("use_bidirectional_attention", "is set; penstock runs causal models")
    if config.has("attn_logit_softcapping"):  # transformers' class ignores it: what it would mean is not known
        raise config.unsupported("attn_logit_softcapping", "is set; penstock runs Gemma 3 without it")
    attention_bias = config.flag("attention_bias", False)
    details = Details(
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        qk_norm=True,
        scale=config.real("query_pre_attn_scalar", 256) ** -0.5,
        logit_softcap=config.optional_real("final_logit_softcapping", None) or 0.0,
        norm_offset=1.0,
        norm_out=True,
        scale_embedding=True,
        activation_key="hidden_activation",
    )
    every = config.whole("sliding_window_pattern", 6, hi=MAX_LAYERS)
    return decoder(
        Config({**config.data, "rope_scaling": None, "rope_parameters": _ropes(config)}, config.where, config.prefix),
        model_type,
        DEFAULTS,
        details,
        window=config.optional_whole("sliding_window", 4096),
        layer_types=layer_types_of(config, lambda i: (i + 1) % every > 0),
    )


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    # Norms of heads are kept with their 1 added: `spec.model.NormSpec.offset` is that of the other norms alone.
    sources = sources_of(spec, NORMED_OUT_NAMES, END_NAMES)
    return {key: s._replace(added=-spec.norm.offset) if key[1] in _HEAD_NORMS else s for key, s in sources.items()}


def _ropes(config: Config) -> dict[str, Any]:
    """Both ropes by the type of their layers. Old files have `rope_scaling`, which is of layers that see everything
    alone. Raises BrokenModel, and UnsupportedModel for one rope for both."""
    given = config.inner("rope_parameters") if config.has("rope_parameters") else Config({}, config.where)
    if given.data and not {FULL, SLIDING} & given.data.keys():
        raise config.unsupported("rope_parameters", f"should have {FULL} and {SLIDING}, each with a rope of its own")
    full, local = (dict(given.inner(kind).data) if given.has(kind) else {} for kind in (FULL, SLIDING))
    if config.has("rope_scaling"):
        full |= config.inner("rope_scaling").data
    full.setdefault("rope_theta", config.real("rope_theta", _THETA, lo=1.001))
    local.setdefault("rope_theta", config.real("rope_local_base_freq", _LOCAL_THETA, lo=1.001))
    return {FULL: full, SLIDING: local}
