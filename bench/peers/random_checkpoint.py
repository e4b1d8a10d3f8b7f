"""A checkpoint of a llama's shape with random weights, as Hugging Face publishes them: one bfloat16 safetensors file.

For what reads checkpoints: `penstock.store.pack`, and transformers with accelerate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.peers.random_gguf import Matrix, load_config, matrices
from penstock.store.packed import read_config
from penstock.store.synth import byte_tokenizer

WEIGHTS = "model.safetensors"
_STD = 0.02
_POOL = 1 << 23  # 16 MiB, beyond a core's caches, around and around
_HEADER_ALIGNMENT = 64

# llama.cpp's names, which `matrices` gives, and theirs.
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NAMES = {"token_embd": "model.embed_tokens", "output": "lm_head"}

Shape = tuple[int, ...]


def write(config_file: Path, target: Path) -> None:
    """Makes the folder `target`: config.json, a byte tokenizer, and the weights, tensor after tensor."""
    config, spec = read_config(config_file)
    aside = target.with_suffix(".tmp")
    aside.mkdir(exist_ok=True)
    (aside / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | load_config(config_file)))
    for name, content in byte_tokenizer(spec).items():
        (aside / name).write_bytes(content)
    shapes = dict(_tensors(config["num_hidden_layers"], config["hidden_size"], list(matrices(config))))
    pool = _bfloat16(_STD * np.random.default_rng(0).standard_normal(_POOL, np.float32))
    with (aside / WEIGHTS).open("wb") as file:
        header = _header(shapes)
        file.write(len(header).to_bytes(8, "little") + header)
        for i, shape in enumerate(shapes.values()):
            count = int(np.prod(shape))
            is_norm = len(shape) == 1
            values = _bfloat16(np.ones(count, np.float32)) if is_norm else np.resize(np.roll(pool, 4099 * i), count)
            values.tofile(file)
    aside.rename(target)


def _tensors(layers: int, hidden: int, wanted: list[Matrix]) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every tensor."""
    for matrix in wanted:
        name = matrix.name
        _, _, inner = name.rpartition(".")
        layer = f"model.layers.{name.split('.')[1]}." if inner in _LAYER_NAMES else ""
        yield f"{layer}{_LAYER_NAMES.get(inner) or _NAMES[name]}.weight", (matrix.rows, matrix.cols)
    for i in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{i}.{norm}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def _header(shapes: dict[str, Shape]) -> bytes:
    """What stands in front of the bytes, by the format's definition: where each tensor lies among them."""
    entries, at = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (at, at + nbytes)}
        at += nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return text + b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves. Cut off rather than rounded: random numbers do not mind."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
