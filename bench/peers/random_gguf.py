"""A GGUF of the shape of a llama, a qwen3_moe, a gpt_oss or a nemotron with random weights, for llama.cpp.

By default every matrix is in Q4_0, 4.5 bits a weight: the usual Q4_0 file keeps the head in Q6_K, and without that both
engines read the same bytes a token. MIXES are what llama.cpp's own quantiser makes of a llama, and MXFP4 is how gpt-oss
is published: experts in MXFP4, all other matrices in Q8_0. Routers are float32, and have the very rows that `penstock
synth` gives them.
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
from penstock.store.gguf.blocks import BLOCK_FORMATS
from penstock.store.packed import read_config
from penstock.store.quantize import decode
from penstock.store.random_blocks import spread
from penstock.store.synth import ROUTED_OUT, RandomWeights

_BY_NAME = {each.name: each for each in BLOCK_FORMATS.values()}
_WEIGHT_STD = 0.02
_POOL_BYTES = 9 << 20  # beyond a core's caches, around and around: drawing all of an 8B takes minutes
_HALVES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}  # where the float16 numbers of a block lie
MIXES = ("q4_k_m", "q4_0")
MXFP4 = "mxfp4"
_ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}  # all others are llamas
_BIAS_STD = 0.02  # of biases and sinks

Array = NDArray[Any]


class Matrix(NamedTuple):
    """`name`: as llama.cpp has it. `experts`: so many of this shape lie one after the other, and a token goes to
    `active` of them; 0 and 1 where there are none."""

    name: str
    rows: int
    cols: int
    experts: int = 0
    active: int = 1
    kind: str = "Q4_0"

    @property
    def row_bytes(self) -> int:
        return self.cols // _BY_NAME[self.kind].numbers * _BY_NAME[self.kind].nbytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes * max(1, self.experts)

    @property
    def bytes_per_token(self) -> int:
        return self.nbytes // max(1, self.experts) * self.active


def matrices(config: dict[str, Any], mix: str | None = None) -> Iterator[Matrix]:
    """All quantised matrices of a config.json. `mix`: one of MIXES, or MXFP4, which gpt_oss always has; None is Q4_0
    throughout."""
    mix = MXFP4 if config["model_type"] == "gpt_oss" else mix
    for each in _shapes(config):
        yield each if mix is None else each._replace(kind=_kind_in(mix, each.name, config))


def _kind_in(mix: str, name: str, config: dict[str, Any]) -> str:
    """The format of a matrix in a file of llama.cpp's quantiser (llama-quant.cpp: of Q4_K_M, v and down are Q6_K in the
    first and the last eighth of the layers, and in each third one between). What gives logits is Q6_K."""
    layers = config["num_hidden_layers"]
    if mix == MXFP4:
        return "MXFP4" if name.endswith("_exps") else "Q8_0"
    if name == ("token_embd" if config["tie_word_embeddings"] else "output"):
        return "Q6_K"
    if mix == "q4_0":
        return "Q4_0"
    if name.endswith(("attn_v", "ffn_down")):
        layer, eighth = int(name.split(".")[1]), layers // 8
        if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return "Q4_K"


def _shapes(config: dict[str, Any]) -> Iterator[Matrix]:
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
            neurons, end = config.get("moe_intermediate_size", neurons), "_exps"
            many = (experts_of(config), config["num_experts_per_tok"])
        if not is_nemotron(config):
            yield Matrix(f"blk.{i}.ffn_gate{end}", neurons, hidden, *many)
        yield Matrix(f"blk.{i}.ffn_up{end}", neurons, hidden, *many)
        yield Matrix(f"blk.{i}.ffn_down{end}", hidden, neurons, *many)
    if not config["tie_word_embeddings"]:
        yield Matrix("output", vocab, hidden)


def has_experts(config: dict[str, Any]) -> bool:
    return config["model_type"] in _ARCHITECTURES


def experts_of(config: dict[str, Any]) -> int:
    return int(config.get("num_experts") or config["num_local_experts"])


def is_nemotron(config: dict[str, Any]) -> bool:
    return bool(config["model_type"] == "nemotron")


def bytes_per_token(config: dict[str, Any]) -> int:
    """Bytes of weights that a decode step reads: all matrices, of the embedding a row alone unless it is the head, of
    experts those that are active."""
    read = [each for each in matrices(config) if each.name != "token_embd"]
    if config["tie_word_embeddings"]:
        read.append(Matrix("output", config["vocab_size"], config["hidden_size"]))
    return sum(each.bytes_per_token for each in read)


def write(config_file: Path, target: Path, router_skew: float = 0.0, mix: str | None = None) -> None:
    """Tensor after tensor: no more than one of them is in memory. `router_skew`: as `penstock synth` has it. `mix`: as
    in `matrices`. A file of a mix has a vocabulary too, so that a command can answer a text."""
    # Here, so that benches without llama.cpp, which share what else is in this file, need not have it.
    from gguf import GGMLQuantizationType, GGUFWriter

    config, spec = read_config(config_file)
    aside = target.with_suffix(".tmp")
    writer = GGUFWriter(aside, _ARCHITECTURES.get(config["model_type"], "nemotron" if is_nemotron(config) else "llama"))
    writer.add_name(config_file.stem)
    _add_metadata(writer, config, mix)
    vectors = _vectors(config, spec, router_skew)
    for tensor, vector in vectors.items():
        writer.add_tensor_info(tensor, vector.shape, vector.dtype, vector.nbytes)
    for each in matrices(config, mix):
        shape = (*([each.experts] if each.experts else []), each.rows, each.row_bytes)
        kind = GGMLQuantizationType[each.kind]
        writer.add_tensor_info(f"{each.name}.weight", shape, np.dtype(np.uint8), each.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for vector in vectors.values():
        writer.write_tensor_data(vector)
    pools: dict[tuple[str, float], Array] = {}
    for i, each in enumerate(matrices(config, mix)):
        times = ROUTED_OUT if has_experts(config) and each.name.endswith("attn_output") else 1.0
        pool = pools.setdefault((each.kind, times), _blocks(each.kind, times))
        blocks = np.roll(pool, 4099 * i, axis=0)
        writer.write_tensor_data(np.resize(blocks, (each.nbytes // pool.shape[1], pool.shape[1])))
    writer.close()
    aside.rename(target)


def _add_metadata(writer: Any, config: dict[str, Any], mix: str | None) -> None:
    """What the file says of the model beside its tensors."""
    from gguf import LlamaFileType, RopeScalingType

    of_mix = {"q4_k_m": LlamaFileType.MOSTLY_Q4_K_M, MXFP4: LlamaFileType.MOSTLY_MXFP4_MOE}
    writer.add_file_type(of_mix.get(mix or "", LlamaFileType.MOSTLY_Q4_0))
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
    writer.add_rope_dimension_count(int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(config["rope_theta"])
    if is_nemotron(config):
        writer.add_layer_norm_eps(config["norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if has_experts(config):
        writer.add_expert_count(experts_of(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if config["model_type"] == "gpt_oss":
        scaling = config["rope_scaling"]
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if mix is None:
        writer.add_tokenizer_model("none")  # token ids in, logits out
    else:
        _add_vocabulary(writer, config["vocab_size"])


def _vectors(config: dict[str, Any], spec: ModelSpec, router_skew: float) -> dict[str, Array]:
    """Every tensor that is no matrix in blocks, by name, float32: norms, routers, biases and factors of RoPE."""
    layers, is_oss = range(config["num_hidden_layers"]), config["model_type"] == "gpt_oss"
    ones = np.ones(config["hidden_size"], np.float32)
    norms = [f"blk.{i}.{kind}_norm" for i in layers for kind in ("attn", "post_attention" if is_oss else "ffn")]
    norms.append("output_norm")
    vectors: dict[str, Array] = {f"{norm}.weight": ones for norm in norms}
    if is_nemotron(config):  # its layer norms have biases, and their weights are 1 + w
        vectors |= {f"{norm}.bias": np.zeros_like(ones) for norm in norms}
    if has_experts(config):
        heads = [f"blk.{i}.attn_{kind}_norm.weight" for i in layers for kind in "qk"]
        vectors |= {} if is_oss else dict.fromkeys(heads, np.ones(config["head_dim"], np.float32))
        vectors |= {f"blk.{i}.ffn_gate_inp.weight": rows for i, rows in enumerate(routers(spec, router_skew))}
    if is_oss:
        vectors |= _biases(config)
    rope = spec.layers[0].attention.rope
    assert rope is not None
    if rope.kind == "llama3":  # llama.cpp takes the scaling as divisors of the frequencies
        plain = replace(rope, kind="default", factors=())
        vectors["rope_freqs.weight"] = (
            frequencies(plain, spec.max_positions)[0] / frequencies(rope, spec.max_positions)[0]
        )
    return vectors


def _biases(config: dict[str, Any]) -> dict[str, Array]:
    """Biases of all matrices of a gpt_oss' layers, and its sinks, float32."""
    rng = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_sinks.weight": (config["num_attention_heads"],), "ffn_gate_inp.bias": (experts_of(config),),
    }  # fmt: skip
    for each in matrices(config):
        if each.name.startswith("blk.0."):
            shape = (each.rows,) if not each.experts else (each.experts, each.rows)
            shapes[f"{each.name.removeprefix('blk.0.')}.bias"] = shape
    return {
        f"blk.{i}.{name}": rng.normal(0, _BIAS_STD, shape).astype(np.float32)
        for i in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    }


def _add_vocabulary(writer: Any, size: int) -> None:
    """`size` tokens of byte-level BPE: all bytes, then words that no text has. Nothing ends an answer."""
    from gguf import TokenType
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*alphabet, *(f"<{i}>" for i in range(len(alphabet), size))])
    writer.add_token_types([TokenType.NORMAL] * size)
    writer.add_token_merges([f"{alphabet[65]} {alphabet[66]}"])
    writer.add_eos_token_id(size - 1)


def routers(spec: ModelSpec, router_skew: float) -> Iterator[Array]:
    """float32 [X, D] of each layer: what `penstock synth` packs."""
    made = RandomWeights(spec, 0, router_skew)
    for part in parts(spec, parse_format("int4")):
        if part.kind == "router":
            granule, scores = np.empty(part.granule_bytes, np.uint8), part.block("scores")
            made.fill(part, 0, 1, granule)
            stored = granule[scores.offset : scores.offset + scores.nbytes]
            yield decode(stored, scores.rows, scores.cols, scores.format, scores.tiled).astype(np.float32)


def _blocks(kind: str, times: float = 1.0) -> Array:
    """Valid blocks, uint8 [n, bytes], of numbers with a mean of 0. Scales have either sign."""
    count, rng = _POOL_BYTES // _BY_NAME[kind].nbytes, np.random.default_rng(0)
    deviation, of_minimum = spread(kind.lower())
    if kind == "MXFP4":  # a power of two, whose mean over three of them is about what is wanted
        blocks = rng.integers(0, 256, (count, _BY_NAME[kind].nbytes), np.uint8)
        blocks[:, 0] = round(127.6 + np.log2(times * _WEIGHT_STD / deviation)) - 1 + rng.integers(0, 3, count)
        return blocks
    scales = times * _WEIGHT_STD / deviation * rng.uniform(0.75, 1.25, count) * rng.choice((-1, 1), count)
    blocks = rng.integers(0, 256, (count, _BY_NAME[kind].nbytes), np.uint8)
    for at, number in zip(_HALVES[kind], (scales, scales * of_minimum), strict=False):
        blocks[:, at : at + 2] = number.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks


def load_config(config_file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config_file.read_text())
    return found
