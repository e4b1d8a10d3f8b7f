"""Writes checkpoints of transformers as GGUF files, as llama.cpp's converter does: an independent way from one to the
other, by the package `gguf`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import AutoConfig

from tests.cpu import gguf_files

Array = NDArray[Any]
Kind = gguf.GGMLQuantizationType

ARCHITECTURES = {
    "llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2", "phi3": "phi3", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "smollm3": "smollm3",
}  # fmt: skip
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_GPT_OSS = {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
_EXPERTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}

# Where in a block its float16 scales stand.
_HALVES: dict[Kind, tuple[int, ...]] = {
    Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,), Kind.MXFP4: (),
}  # fmt: skip

# The format of each matrix, by its name in the file.
Choice = Callable[[str], Kind]


def read_tensors(folder: Path) -> dict[str, Array]:
    """Of a checkpoint in one file, in float32."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).to(torch.float32).numpy() for name in file.keys()}  # noqa: SIM118


def as_gguf(tensors: dict[str, Array], config: Any) -> dict[str, Array]:
    """The tensors by their names in GGUF, changed as the converter changes them."""
    found: dict[str, Array] = {}
    experts: dict[tuple[str, str], dict[int, Array]] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if stem in _ENDS:
            found[f"{_ENDS[stem]}.{kind}"] = tensor
            continue
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        if inner == "self_attn.sinks":
            found[f"blk.{layer}.attn_sinks.weight"] = tensor
            continue
        if ".experts." in inner and config.model_type == "gpt_oss":  # turned, with gate and up in turns
            which, bias = inner.split(".experts.")[1].removesuffix("_bias"), inner.endswith("_bias")
            kind, turned = ("bias", tensor) if bias else ("weight", tensor.swapaxes(1, 2))
            if which == "down_proj":
                found[f"blk.{layer}.ffn_down_exps.{kind}"] = turned
            else:
                found[f"blk.{layer}.ffn_gate_exps.{kind}"] = turned[:, 0::2]
                found[f"blk.{layer}.ffn_up_exps.{kind}"] = turned[:, 1::2]
            continue
        if ".experts." in inner:
            number = inner.split(".experts.")[1].split(".")
            if number[0].isdigit():
                experts.setdefault((layer, _EXPERTS[number[1]]), {})[int(number[0])] = tensor
            elif number[0] == "gate_up_proj":  # all experts in one tensor: gate, then up
                half = tensor.shape[1] // 2
                found[f"blk.{layer}.ffn_gate_exps.weight"] = tensor[:, :half]
                found[f"blk.{layer}.ffn_up_exps.weight"] = tensor[:, half:]
            else:
                found[f"blk.{layer}.ffn_down_exps.weight"] = tensor
            continue
        inner, _, kind = inner.rpartition(".")
        table = _LAYER | (_GEMMA if config.model_type in ("gemma2", "gemma3_text") else {})
        table |= _GPT_OSS if config.model_type == "gpt_oss" else {}
        found[f"blk.{layer}.{table[inner]}.{kind}"] = tensor
    for (layer, which), each in experts.items():
        found[f"blk.{layer}.ffn_{which}_exps.weight"] = np.stack([each[i] for i in range(len(each))])
    if config.model_type in ("llama", "mixtral", "smollm3"):
        for name, tensor in found.items():
            if ".attn_q." in name or ".attn_k." in name:
                heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
                halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
                found[name] = halves.swapaxes(1, 2).reshape(tensor.shape)
    if config.model_type in ("gemma2", "gemma3_text"):
        found = {name: tensor + 1 if "norm" in name else tensor for name, tensor in found.items()}
    return {name: np.ascontiguousarray(tensor) for name, tensor in found.items()}


def _metadata(config: Any, architecture: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Metadata, and the tensors that it is written as."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = dict(config.rope_parameters)
    if config.model_type == "gemma3_text":
        local, rope = rope["sliding_attention"], dict(rope["full_attention"])
    dims = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    own: dict[str, Any] = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": head_dim,
        "attention.value_length": head_dim, "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]), "rope.dimension_count": dims, "vocab_size": config.vocab_size,
        "feed_forward_length": config.intermediate_size,
    }  # fmt: skip
    tables: dict[str, Array] = {}
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        tables["rope_freqs.weight"] = _llama3_divisors(rope, head_dim)
    elif kind == "longrope":
        factor = config.max_position_embeddings / config.original_max_position_embeddings
        own["rope.scaling.original_context_length"] = config.original_max_position_embeddings
        own["rope.scaling.attn_factor"] = float(
            np.sqrt(1 + np.log(factor) / np.log(config.original_max_position_embeddings)) if factor > 1 else 1.0
        )
        for which in ("long", "short"):
            tables[f"rope_factors_{which}.weight"] = np.array(rope[f"{which}_factor"], np.float32)
    elif kind in ("linear", "yarn"):
        own |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        if kind == "yarn":
            own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if architecture == "gemma2":
        own |= {
            "attn_logit_softcapping": float(config.attn_logit_softcapping),
            "final_logit_softcapping": float(config.final_logit_softcapping),
        }
    if architecture == "gemma3":
        own["rope.freq_base_swa"] = float(local["rope_theta"])
        if config.final_logit_softcapping:
            own["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if architecture in ("gemma2", "gemma3", "gpt-oss", "phi3") and config.sliding_window:
        own["attention.sliding_window"] = config.sliding_window
    if architecture == "gpt-oss":
        own |= {"expert_feed_forward_length": config.intermediate_size}
    if architecture == "qwen3moe":
        own |= {"expert_feed_forward_length": config.moe_intermediate_size}
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        own |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    return {f"{architecture}.{key}": value for key, value in own.items()}, tables


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> Array:
    """What frequencies are divided by, by Llama 3.1's rule: none of the high ones, `factor` of the low ones, between
    these by turns."""
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    original = rope["original_max_position_embeddings"]
    low, high, factor = (rope[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(wavelengths < original / high, 1.0, np.where(wavelengths > original / low, factor, between))
    return divisors.astype(np.float32)


def tokenizer_metadata(folder: Path, pre: str) -> dict[str, Any]:
    """What the converter writes of a byte-level BPE tokenizer."""
    state = json.loads((folder / "tokenizer.json").read_text())
    by_id = sorted({**state["model"]["vocab"], **{t["content"]: t["id"] for t in state["added_tokens"]}}.items(),
                   key=lambda each: each[1])  # fmt: skip
    special = {token["id"]: 3 if token["special"] else 4 for token in state["added_tokens"]}
    config = json.loads((folder / "config.json").read_text())
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [text for text, _ in by_id],
        "tokenizer.ggml.token_type": [special.get(i, 1) for _, i in by_id], "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.add_bos_token": state["post_processor"] is not None,
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }  # fmt: skip


def random_blocks(shape: tuple[int, ...], kind: Kind, name: str) -> Array:
    """Random numbers of a spread as trained ones have, in a format that the package does not quantise to."""
    rng = np.random.default_rng(list(name.encode()))
    columns, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // columns, nbytes), np.uint8)
    if kind == Kind.MXFP4:
        blocks[:, 0] = rng.integers(118, 122, len(blocks))
    else:
        scale = np.float16(1e-3)
        for at in _HALVES[kind]:
            blocks[:, at : at + 2] = np.array([scale]).view(np.uint8)
        scale = np.float16(5e-5 / gguf.quants.dequantize(blocks[:256], kind).std())
        for at in _HALVES[kind]:
            blocks[:, at : at + 2] = np.array([scale]).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def any_tokenizer(size: int) -> dict[str, Any]:
    """A vocabulary of words that nothing is asked of."""
    tokens = [f"<word {i}>" for i in range(size)]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * size, "tokenizer.ggml.merges": ["a b"],
    }  # fmt: skip


def convert(
    folder: Path, file: Path, choose: Choice = lambda _: Kind.F32, metadata: dict[str, Any] | None = None,
    given: dict[str, Array] | None = None, **more: Any,
) -> dict[str, Array]:  # fmt: skip
    """Writes a checkpoint's folder as a GGUF file. `choose`: the format of each matrix; norms, biases and routers are
    float32. `given`: raw blocks of tensors that are quantised already. Returns what the file's tensors hold, widened
    by the package, by their names there."""
    config = AutoConfig.from_pretrained(folder)
    architecture = ARCHITECTURES[config.model_type]
    own, tables = _metadata(config, architecture)
    written: dict[str, Any] = dict(tables)
    held: dict[str, Array] = {}
    for name, tensor in as_gguf(read_tensors(folder), config).items():
        plain = tensor.ndim == 1 or "ffn_gate_inp" in name or name.endswith(".bias")
        kind = Kind.F32 if plain else choose(name)
        if given and name in given:
            raw = given[name]
        else:
            raw = random_blocks(tensor.shape, kind, name) if kind in _HALVES else gguf.quants.quantize(tensor, kind)
        written[name] = (raw, kind)
        held[name] = gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(tensor.shape)
    words = {} if metadata and "tokenizer.ggml.model" in metadata else any_tokenizer(config.vocab_size)
    gguf_files.write(file, architecture, {**own, **words, **(metadata or {})}, written, **more)
    return held
