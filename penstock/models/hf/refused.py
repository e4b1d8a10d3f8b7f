"""Model types that people have and that penstock does not run, with the reason. All others are refused by their name
alone."""

from __future__ import annotations

from types import MappingProxyType

_DELTA = "most of its layers have a gated delta rule instead of attention"
_MAMBA = "some of its layers have a state space (Mamba) instead of attention, or beside it"
_LATENT = "its attention is latent: K and V are kept compressed"

# model_type → why, as a clause. Sources: the layers of transformers' class of each type.
REFUSED = MappingProxyType({
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear"), _DELTA),
    **dict.fromkeys(
        ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "zamba", "zamba2"), _MAMBA
    ),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "it has a state space (Mamba), and no attention"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash"), _LATENT),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "most of its layers have short convolutions instead of attention"),
    "minimax": "most of its layers have linear (lightning) attention",
    "recurrent_gemma": "most of its layers are recurrent",
    "rwkv": "it is recurrent, and has no attention",
})  # fmt: skip
