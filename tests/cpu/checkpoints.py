"""Small checkpoints for the tests of the store: random tensors of whatever shapes a config leads to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.models import sources, spec_from_config, stacked_sources
from penstock.spec.format import FLOAT32
from penstock.spec.parts import parts
from penstock.store.synth import byte_tokenizer

Array = NDArray[Any]

# Odd on purpose: 172 neurons are 64 + 64 + 44, 203 tokens 3 · 64 + 11, and 72 columns a group of 64 and a tail of 8.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_hidden_layers": 2,
    "intermediate_size": 172,
    "vocab_size": 203,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
PHI3 = {**LLAMA, "model_type": "phi3", "pad_token_id": 0}  # q, k, v in one tensor, gate and up in another
del PHI3["head_dim"]
MOE = {  # 44 neurons of an expert, a shared one behind a gate
    **LLAMA, "model_type": "qwen2_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 44,
    "shared_expert_intermediate_size": 100,
}  # fmt: skip
EXPERTS = {  # by type; a normed bias, groups, all heads normed together
    "qwen2_moe": MOE,
    "qwen3_moe": {**MOE, "model_type": "qwen3_moe", "mlp_only_layers": [0]},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 3, "intermediate_size": 44},
    "olmoe": {**LLAMA, "model_type": "olmoe", "num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 70},
    "glm4_moe": {
        **LLAMA, "model_type": "glm4_moe", "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3,
        "topk_group": 2, "moe_intermediate_size": 44, "first_k_dense_replace": 1, "head_dim": 16,
    },
}  # fmt: skip
OPT = {
    "model_type": "opt",
    "hidden_size": 72,
    "word_embed_proj_dim": 40,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "ffn_dim": 172,
    "vocab_size": 203,
    "max_position_embeddings": 30,
    "do_layer_norm_before": True,
    "torch_dtype": "float32",
}

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def shapes(config: dict[str, Any], stacked: bool = False) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape, from the sources of every block. `stacked`: all experts of a layer in one tensor."""
    spec = spec_from_config(config, "test")
    by_key = {part.key: part for part in parts(spec, FLOAT32)}
    found: dict[str, tuple[int, ...]] = {}
    where = stacked_sources(spec) if stacked else sources(spec)
    assert where is not None
    for (key, name), source in where.items():
        part, block = by_key[key], by_key[key].block(name)
        vector = block.rows == 1 and not block.tiled
        extent = block.cols if vector or source.axis == 1 else block.rows
        end = source.offset + source.step * (extent * part.rows // part.granule_rows - 1) + 1
        if source.stride:
            end = source.offset + (part.granules - 1) * source.stride + extent
        shape: tuple[int, ...] = (end,) if vector else (end, block.cols) if source.axis == 0 else (block.rows, end)
        shape = (source.folded, block.cols // source.folded) if source.folded else shape
        shape = shape[::-1] if source.turned else shape
        for tensor in source.tensors(part.experts):
            whole = (part.experts, *shape) if source.stacked else shape
            found[tensor] = max(found.get(tensor, whole), whole)
    return found


def random_tensors(config: dict[str, Any], dtype: str = "F32", seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(DTYPES[dtype]) for name, shape in shapes(config).items()}


def stacked_tensors(config: dict[str, Any], apart: dict[str, Array]) -> dict[str, Array]:
    """The same numbers with all experts of a layer in one tensor."""
    spec = spec_from_config(config, "test")
    by_key = {part.key: part for part in parts(spec, FLOAT32)}
    where, found = stacked_sources(spec), dict[str, Array]()
    assert where is not None
    for block, source in sources(spec).items():
        other, part = where[block], by_key[block[0]]
        if not other.stacked:
            found[other.tensor] = apart[source.tensor]
            continue
        matrices = np.stack([apart[name] for name in source.tensors(part.experts)])
        whole = found.setdefault(other.tensor, np.zeros(shapes(config, True)[other.tensor], matrices.dtype))
        whole[:, other.offset : other.offset + matrices.shape[1]] = matrices
    return found


def save_tensors(file: Path, tensors: dict[str, Array]) -> None:
    """A safetensors file, by the format's definition."""
    names = {dtype: name for name, dtype in DTYPES.items()} | {np.dtype(np.int8): "I8", np.dtype(np.float64): "F64"}
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            stream.write(tensor.tobytes())


def save_checkpoint(
    folder: Path, config: dict[str, Any], tensors: dict[str, Array] | None = None, dtype: str = "F32"
) -> dict[str, Array]:
    """config.json and model.safetensors in a new folder. Returns the tensors."""
    folder.mkdir(parents=True)
    tensors = random_tensors(config, dtype) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": NAMES[dtype]}))
    save_tensors(folder / "model.safetensors", tensors)
    return tensors


def save_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """What makes a checkpoint one that can be run: a byte tokenizer and what goes with it."""
    for name, content in byte_tokenizer(spec_from_config(config, "test")).items():
        (folder / name).write_bytes(content)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}
