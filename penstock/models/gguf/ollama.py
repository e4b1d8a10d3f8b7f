"""Says in llama.cpp's words what Ollama's own conversions of a model have in others: Gemma 3 and gpt-oss.

Ollama has most of its models from llama.cpp's converter. These two it converted by itself, and its engine knows what
their files leave out. Sources: Ollama's model/models/gemma3 and model/models/gptoss, which read them, and its
convert/convert_gemma3.go and convert_gptoss.go, which wrote them.

    gemma3    rope.global.freq_base and rope.local.freq_base, or neither; yarn's betas without its name; no epsilon; no
              scaling of the rope, which the models of 34, 48 and 62 layers have; caps on logits where the model of 26
              layers has none
    gptoss    its architecture's name; a factor of the rope without its type, which is yarn; attn_out, attn_sinks and
              ffn_norm among its tensors; no name of a pre-tokenizer. Its first version has q, k and v in one tensor,
              attn_qkv, the rows of k after those of q, and of v after these; and gate and up of all experts in one,
              ffn_gate_up_exps, row by row in turns, as OpenAI published them
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

GPT_OSS = "gptoss"
GPT_OSS_PRE = "gpt-4o"  # how gpt-oss' tokenizer cuts texts, by llama.cpp's name of it
# Layers of the Gemma 3 models that were trained for longer contexts by stretching their rope, and of the smallest with
# a window.
_STRETCHED, _SMALL = (34, 48, 62), 26
_STRETCH = 8.0
_THETA, _LOCAL_THETA, _EPSILON = 1e6, 1e4, 1e-6


def in_usual_words(architecture: str, keys: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The architecture and its keys, without their prefix, as llama.cpp's converter would have written them. `keys`:
    those of the file."""
    own = dict(keys)
    if architecture == GPT_OSS:
        if "rope.scaling.factor" in own:
            own.setdefault("rope.scaling.type", "yarn")
        return "gpt-oss", own
    if architecture != "gemma3" or ("rope.freq_base" in own and "rope.local.freq_base" not in own):
        return architecture, own
    own.setdefault("rope.freq_base", own.get("rope.global.freq_base", _THETA))
    own.setdefault("rope.freq_base_swa", own.get("rope.local.freq_base", _LOCAL_THETA))
    own.setdefault("attention.layer_norm_rms_epsilon", _EPSILON)
    for beta in ("beta_fast", "beta_slow"):
        if f"rope.scaling.{beta}" in own:
            own.setdefault(f"rope.scaling.yarn_{beta}", own[f"rope.scaling.{beta}"])
    if own.get("block_count") in _STRETCHED and "rope.scaling.type" not in own:
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": _STRETCH}
    if own.get("block_count") == _SMALL:
        own.pop("final_logit_softcapping", None)
    return architecture, own


def is_fused(tensors: Container[str]) -> bool:
    """Whether a gpt-oss file has gate and up of its experts in one tensor, row by row in turns."""
    return "blk.0.ffn_gate_up_exps.weight" in tensors


def names(tensors: Container[str]) -> dict[str, str]:
    """Block → its tensor behind "blk.N.", of those that Ollama calls otherwise than llama.cpp in gpt-oss' files."""
    found: dict[str, str] = {}
    if "blk.0.attn_out.weight" in tensors:
        found |= {"o": "attn_out.weight", "o_bias": "attn_out.bias"}
    if "blk.0.attn_sinks" in tensors:
        found["sinks"] = "attn_sinks"
    if "blk.0.ffn_norm.weight" in tensors:
        found["ffn_in"] = "ffn_norm.weight"
    if is_fused(tensors):
        for block in ("gate", "up"):
            found[f"experts.{block}"] = "ffn_gate_up_exps.weight"
            found[f"experts.{block}_bias"] = "ffn_gate_up_exps.bias"
    return found
