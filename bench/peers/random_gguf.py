"""A GGUF of the shape of a llama or a qwen3_moe with random weights, for llama.cpp: every matrix in Q4_0, 4.5 bits a
weight.

The usual Q4_0 file keeps the head in Q6_K. Here it is Q4_0 too, so that both engines read the same bytes a token.
Routers are float32, and have the very rows that `penstock synth` gives them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.rope import frequencies
from penstock.spec.format import parse_format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import parts
from penstock.store.packed import read_config
from penstock.store.quantize import decode
from penstock.store.synth import ROUTED_OUT, RandomWeights

BLOCK_WEIGHTS, BLOCK_BYTES = 32, 18  # Q4_0: a float16 scale, then 32 codes of 4 bits; value = (code - 8) * scale
_WEIGHT_STD = 0.02
_CODE_STD = 4.61  # of 16 equally likely codes
_POOL_BLOCKS = 1 << 19  # 9 MiB, beyond a core's caches, around and around: drawing all of an 8B takes minutes

Array = NDArray[Any]


class Matrix(NamedTuple):
    """`name`: as llama.cpp has it. `experts`: so many of this shape lie one after the other, and a token goes to
    `active` of them; 0 and 1 where there are none."""

    name: str
    rows: int
    cols: int
    experts: int = 0
    active: int = 1

    @property
    def nbytes(self) -> int:
        return self.rows * self.cols // BLOCK_WEIGHTS * BLOCK_BYTES * max(1, self.experts)

    @property
    def bytes_per_token(self) -> int:
        return self.nbytes // max(1, self.experts) * self.active


def matrices(config: dict[str, Any]) -> Iterator[Matrix]:
    """All quantised matrices of a config.json."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    yield Matrix("token_embd", vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        yield Matrix(f"blk.{i}.attn_q", q, hidden)
        yield Matrix(f"blk.{i}.attn_k", kv, hidden)
        yield Matrix(f"blk.{i}.attn_v", kv, hidden)
        yield Matrix(f"blk.{i}.attn_output", hidden, q)
        neurons, end, many = config["intermediate_size"], "", (0, 1)
        if has_experts(config):
            neurons, end = config["moe_intermediate_size"], "_exps"
            many = (config["num_experts"], config["num_experts_per_tok"])
        yield Matrix(f"blk.{i}.ffn_gate{end}", neurons, hidden, *many)
        yield Matrix(f"blk.{i}.ffn_up{end}", neurons, hidden, *many)
        yield Matrix(f"blk.{i}.ffn_down{end}", hidden, neurons, *many)
    if not config["tie_word_embeddings"]:
        yield Matrix("output", vocab, hidden)


def has_experts(config: dict[str, Any]) -> bool:
    return bool(config["model_type"] == "qwen3_moe")


def bytes_per_token(config: dict[str, Any]) -> int:
    """Bytes of weights that a decode step reads: all matrices, of the embedding a row alone unless it is the head, of
    experts those that are active."""
    read = [each for each in matrices(config) if each.name != "token_embd"]
    if config["tie_word_embeddings"]:
        read.append(Matrix("output", config["vocab_size"], config["hidden_size"]))
    return sum(each.bytes_per_token for each in read)


def write(config_file: Path, target: Path, router_skew: float = 0.0) -> None:
    """Tensor after tensor: no more than one of them is in memory. `router_skew`: as `penstock synth` has it."""
    # Here, so that benches without llama.cpp, which share what else is in this file, need not have it.
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

    config, spec = read_config(config_file)
    layers = range(config["num_hidden_layers"])
    aside = target.with_suffix(".tmp")
    writer = GGUFWriter(aside, "qwen3moe" if has_experts(config) else "llama")
    writer.add_name(config_file.stem)
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(2)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if has_experts(config):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_tokenizer_model("none")  # token ids in, logits out

    ones = np.ones(config["hidden_size"], np.float32)
    norms = [f"blk.{i}.{kind}_norm" for i in layers for kind in ("attn", "ffn")]
    vectors: dict[str, Array] = dict.fromkeys((*norms, "output_norm"), ones)
    if has_experts(config):
        heads = [f"blk.{i}.attn_{kind}_norm" for i in layers for kind in "qk"]
        vectors |= dict.fromkeys(heads, np.ones(config["head_dim"], np.float32))
        vectors |= {f"blk.{i}.ffn_gate_inp": rows for i, rows in enumerate(routers(spec, router_skew))}
    rope = spec.layers[0].attention.rope
    assert rope is not None
    if rope.kind == "llama3":  # llama.cpp takes the scaling as divisors of the frequencies
        plain = replace(rope, kind="default", factors=())
        vectors["rope_freqs"] = frequencies(plain, spec.max_positions)[0] / frequencies(rope, spec.max_positions)[0]

    q4_0 = GGMLQuantizationType.Q4_0
    for name, vector in vectors.items():
        writer.add_tensor_info(f"{name}.weight", vector.shape, vector.dtype, vector.nbytes)
    for each in matrices(config):
        shape = (*([each.experts] if each.experts else []), each.rows, each.cols // BLOCK_WEIGHTS * BLOCK_BYTES)
        writer.add_tensor_info(f"{each.name}.weight", shape, np.dtype(np.uint8), each.nbytes, q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for vector in vectors.values():
        writer.write_tensor_data(vector)
    pool = _blocks(np.random.default_rng(0))
    damped = _blocks(np.random.default_rng(0), ROUTED_OUT) if has_experts(config) else pool
    for i, each in enumerate(matrices(config)):
        blocks = np.roll(damped if each.name.endswith("attn_output") else pool, 4099 * i, axis=0)
        writer.write_tensor_data(np.resize(blocks, (each.nbytes // BLOCK_BYTES, BLOCK_BYTES)))
    writer.close()
    aside.rename(target)


def routers(spec: ModelSpec, router_skew: float) -> Iterator[Array]:
    """float32 [X, D] of each layer: what `penstock synth` packs."""
    made = RandomWeights(spec, 0, router_skew)
    for part in parts(spec, parse_format("int4")):
        if part.kind == "router":
            granule, scores = np.empty(part.granule_bytes, np.uint8), part.block("scores")
            made.fill(part, 0, 1, granule)
            stored = granule[scores.offset : scores.offset + scores.nbytes]
            yield decode(stored, scores.rows, scores.cols, scores.format, scores.tiled).astype(np.float32)


def _blocks(rng: np.random.Generator, times: float = 1.0) -> Array:
    """Valid blocks, uint8 [n, 18]. Scales have either sign: codes are -8 to 7, and their mean must not add up."""
    scales = times * _WEIGHT_STD / _CODE_STD * rng.uniform(0.75, 1.25, _POOL_BLOCKS) * rng.choice((-1, 1), _POOL_BLOCKS)
    blocks = rng.integers(0, 256, (_POOL_BLOCKS, BLOCK_BYTES), np.uint8)
    blocks[:, :2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks


def load_config(config_file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config_file.read_text())
    return found
