"""Says which tensors of a GGUF file hold the blocks of a model, and what was done to them when the file was made.

Two things were done. In llama's and SmolLM 3's files the rows of each head of q and k are in another order: the first
half of a head's dimensions and the second were interleaved, since llama.cpp rotates neighbours where transformers
rotates halves. And the weights of Gemma's norms have 1 added, which transformers adds when it runs the model.
"""

from __future__ import annotations

from collections.abc import Container

from penstock.models.gguf.ollama import GPT_OSS, is_fused
from penstock.models.gguf.ollama import names as ollama_names
from penstock.models.hf.names import EXPERT, TensorSource, sources_of
from penstock.spec.model import ModelSpec

# Divisors of rope frequencies, a table for each model.
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_LAYER = {
    "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight", "o": "attn_output.weight",
    "q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias", "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight",
    "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias", "up_bias": "ffn_up.bias", "down_bias": "ffn_down.bias",
    "attn_in": "attn_norm.weight", "ffn_in": "ffn_norm.weight",
    "attn_out": "post_attention_norm.weight", "ffn_out": "post_ffw_norm.weight",
    "router.scores": "ffn_gate_inp.weight",
    "router.bias": "ffn_gate_inp.bias", "sinks": "attn_sinks.weight",
    "experts.gate_bias": "ffn_gate_exps.bias", "experts.up_bias": "ffn_up_exps.bias",
    "experts_down_bias": "ffn_down_exps.bias",
    "experts.gate": "ffn_gate_exps.weight", "experts.up": "ffn_up_exps.weight", "experts.down": "ffn_down_exps.weight",
}  # fmt: skip
# Mixtral's first files have a tensor for each matrix of each expert.
_APART = {f"experts.{block}": f"ffn_{block}.{EXPERT}.weight" for block in ("gate", "up", "down")}
_ENDS = {"embed.rows": "token_embd.weight", "edges.final": "output_norm.weight", "head.rows": "output.weight"}
_INTERLEAVED = ("q", "k", "q_bias", "k_bias")
_NORMS = ("attn_in", "attn_out", "ffn_in", "ffn_out", "final")  # norms of heads keep the 1 (`models.gemma3_text`)


def gguf_sources(spec: ModelSpec, architecture: str, tensors: Container[str]) -> dict[tuple[str, str], TensorSource]:
    """(part key, block name) → its place among the `tensors` of a file of this architecture."""
    attention, ffn = spec.layers[0].attention, spec.layers[0].ffns[0]
    layer, offsets, stacked = dict(_LAYER), dict[str, int](), True
    q_rows, kv_rows = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    is_gpt_oss = architecture in ("gpt-oss", GPT_OSS)
    in_turns = is_gpt_oss and is_fused(tensors)
    if architecture == "phi3":
        layer |= {"gate": "ffn_up.weight"}
        offsets |= {"up": ffn.neurons}
    if "blk.0.attn_qkv.weight" in tensors:  # llama.cpp's converter writes it of any architecture (--fuse-qkv)
        layer |= {block: "attn_qkv.weight" for block in "qkv"} | {f"{block}_bias": "attn_qkv.bias" for block in "qkv"}
        rows = {"k": q_rows, "v": q_rows + kv_rows}
        offsets |= rows | {f"{block}_bias": row for block, row in rows.items()}
    if is_gpt_oss:
        layer |= {"ffn_in": "post_attention_norm.weight"} | ollama_names(tensors)
        if in_turns:
            offsets |= {"experts.up": 1, "experts.up_bias": 1}
    if spec.is_routed and "blk.0.ffn_gate.0.weight" in tensors:
        layer, stacked = layer | _APART, False
    names = {block: f"blk.{{}}.{name}" for block, name in layer.items()}
    sources = sources_of(spec, names, _ENDS, offsets, stacked=stacked)
    if architecture in ("llama", "smollm3"):
        heads = {key: source for key, source in sources.items() if key[1] in _INTERLEAVED}
        sources |= {key: source._replace(interleaved=attention.head_dim) for key, source in heads.items()}
    if spec.norm.offset:
        norms = {key: source for key, source in sources.items() if key[1] in _NORMS}
        sources |= {key: source._replace(added=spec.norm.offset) for key, source in norms.items()}
    for (key, block), source in sources.items():
        if in_turns and key.endswith(".experts") and block in ("gate", "up", "gate_bias", "up_bias"):
            sources[key, block] = source._replace(step=2)
        routed = spec.layers[int(key.partition(".")[0])].routed if block == "experts_down_bias" else None
        if routed is not None:
            sources[key, block] = source._replace(folded=routed.experts)
    return sources
