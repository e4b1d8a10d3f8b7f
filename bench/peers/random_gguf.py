"""A GGUF of a llama's shape with random weights, for llama.cpp: every matrix in Q4_0, 4.5 bits a weight.

The usual Q4_0 file keeps the head in Q6_K. Here it is Q4_0 too, so that both engines read the same bytes a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.rope import frequencies
from penstock.store.packed import read_config

BLOCK_WEIGHTS, BLOCK_BYTES = 32, 18  # Q4_0: a float16 scale, then 32 codes of 4 bits; value = (code - 8) * scale
_WEIGHT_STD = 0.02
_CODE_STD = 4.61  # of 16 equally likely codes
_POOL_BLOCKS = 1 << 19  # 9 MiB, beyond a core's caches, around and around: drawing all of an 8B takes minutes

Array = NDArray[Any]


def matrices(config: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(name, rows, columns) of all matrices of a llama's config.json, as llama.cpp names them."""
    hidden, neurons, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    yield "token_embd", vocab, hidden
    for i in range(config["num_hidden_layers"]):
        yield f"blk.{i}.attn_q", q, hidden
        yield f"blk.{i}.attn_k", kv, hidden
        yield f"blk.{i}.attn_v", kv, hidden
        yield f"blk.{i}.attn_output", hidden, q
        yield f"blk.{i}.ffn_gate", neurons, hidden
        yield f"blk.{i}.ffn_up", neurons, hidden
        yield f"blk.{i}.ffn_down", hidden, neurons
    if not config["tie_word_embeddings"]:
        yield "output", vocab, hidden


def bytes_per_token(config: dict[str, Any]) -> int:
    """Bytes of weights that a decode step reads: all matrices, of the embedding a row alone unless it is the head."""
    read = [(rows, cols) for name, rows, cols in matrices(config) if name != "token_embd"]
    if config["tie_word_embeddings"]:
        read.append((config["vocab_size"], config["hidden_size"]))
    return sum(rows * cols // BLOCK_WEIGHTS * BLOCK_BYTES for rows, cols in read)


def write(config_file: Path, target: Path) -> None:
    """Tensor after tensor: no more than one of them is in memory."""
    # Here, so that benches without llama.cpp, which share what else is in this file, need not have it.
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

    config, spec = read_config(config_file)
    aside = target.with_suffix(".tmp")
    writer = GGUFWriter(aside, "llama")
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
    writer.add_tokenizer_model("none")  # token ids in, logits out

    ones = np.ones(config["hidden_size"], np.float32)
    norms = [f"blk.{i}.{kind}_norm" for i in range(config["num_hidden_layers"]) for kind in ("attn", "ffn")]
    vectors = dict.fromkeys((*norms, "output_norm"), ones)
    rope = spec.layers[0].attention.rope
    assert rope is not None
    if rope.kind == "llama3":  # llama.cpp takes the scaling as divisors of the frequencies
        plain = replace(rope, kind="default", factors=())
        vectors["rope_freqs"] = frequencies(plain, spec.max_positions)[0] / frequencies(rope, spec.max_positions)[0]

    q4_0 = GGMLQuantizationType.Q4_0
    for name, vector in vectors.items():
        writer.add_tensor_info(f"{name}.weight", vector.shape, vector.dtype, vector.nbytes)
    for name, rows, cols in matrices(config):
        shape = (rows, cols // BLOCK_WEIGHTS * BLOCK_BYTES)
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.uint8), rows * shape[1], q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for vector in vectors.values():
        writer.write_tensor_data(vector)
    pool = _blocks(np.random.default_rng(0))
    for i, (_, rows, cols) in enumerate(matrices(config)):
        blocks = rows * cols // BLOCK_WEIGHTS
        writer.write_tensor_data(np.resize(np.roll(pool, 4099 * i, axis=0), (blocks, BLOCK_BYTES)))
    writer.close()
    aside.rename(target)


def _blocks(rng: np.random.Generator) -> Array:
    """Valid blocks, uint8 [n, 18]. Scales have either sign: codes are -8 to 7, and their mean must not add up."""
    scales = _WEIGHT_STD / _CODE_STD * rng.uniform(0.75, 1.25, _POOL_BLOCKS) * rng.choice((-1, 1), _POOL_BLOCKS)
    blocks = rng.integers(0, 256, (_POOL_BLOCKS, BLOCK_BYTES), np.uint8)
    blocks[:, :2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks


def load_config(config_file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config_file.read_text())
    return found
