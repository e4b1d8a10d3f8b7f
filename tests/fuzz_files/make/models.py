"""Seeds of what a checkpoint is made of: config.json, model.safetensors and the index of shards."""

from __future__ import annotations

import json
import math
from typing import Any

from tests.fuzz_files.world import CONFIG, MOE, Files, World

_QWEN: dict[str, Any] = {**CONFIG, "attention_bias": True, "tie_word_embeddings": False}
_PHI = {key: value for key, value in CONFIG.items() if key != "head_dim"}
_OPT = {
    "model_type": "opt", "hidden_size": 8, "word_embed_proj_dim": 6, "num_attention_heads": 2, "num_hidden_layers": 1,
    "ffn_dim": 12, "vocab_size": 264, "max_position_embeddings": 512, "activation_function": "relu",
    "torch_dtype": "float16",
}  # fmt: skip
_GLM = {
    **CONFIG, "model_type": "glm4_moe", "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 2, "moe_intermediate_size": 4,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "attention_bias": True, "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

_GOOD: dict[str, dict[str, Any]] = {
    "llama": CONFIG,
    "llama-untied": {**CONFIG, "tie_word_embeddings": False, "eos_token_id": [257, 256], "bos_token_id": 256},
    "llama-biases": {**CONFIG, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
    "llama-llama3": {**CONFIG, "rope_theta": 500000.0, "rope_scaling": _LLAMA3},
    "llama-linear": {**CONFIG, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float32"},
    "llama-yarn": {**CONFIG, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    "mistral": {**CONFIG, "model_type": "mistral", "sliding_window": 16, "torch_dtype": "float16"},
    "qwen2": {**_QWEN, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    "qwen3": {**_QWEN, "model_type": "qwen3", "layer_types": ["full_attention"]},
    "gemma2": {
        **CONFIG, "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 4,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 8, "num_hidden_layers": 2,
    },
    "phi3": {**_PHI, "model_type": "phi3", "pad_token_id": 0, "original_max_position_embeddings": 32},
    "phi3-longrope": {
        **_PHI, "model_type": "phi3", "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
    },
    "qwen2_moe": MOE,
    "qwen2_moe-stacked": MOE,
    "qwen3_moe": {
        **CONFIG, "model_type": "qwen3_moe", "num_hidden_layers": 2, "decoder_sparse_step": 2, "num_experts": 5,
        "num_experts_per_tok": 3, "moe_intermediate_size": 4, "norm_topk_prob": True, "attention_bias": True,
    },
    "mixtral": {**CONFIG, "model_type": "mixtral", "num_local_experts": 3, "sliding_window": 8},
    "mixtral-stacked": {**CONFIG, "model_type": "mixtral", "num_local_experts": 2, "torch_dtype": "float16"},
    "olmoe": {
        **CONFIG, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 2,
        "clip_qkv": None,
    },
    "glm4_moe": _GLM,
    "glm4_moe-stacked": {**_GLM, "use_qk_norm": True, "n_shared_experts": 0},
    "opt": _OPT,
    "opt-after": {**_OPT, "do_layer_norm_before": False, "enable_bias": False, "torch_dtype": "bfloat16"},
}  # fmt: skip

# Each changes the config of a llama.
_BAD: dict[str, dict[str, Any]] = {
    "no-model-type": {"model_type": None},
    "unknown-type": {"model_type": "abacus"},
    "type-a-path": {"model_type": "../../os"},
    "type-a-list": {"model_type": ["llama"]},
    "no-layers": {"num_hidden_layers": 0},
    "negative-heads": {"num_attention_heads": -2},
    "heads-do-not-divide": {"num_key_value_heads": 3},
    "odd-head-dim": {"head_dim": 3},
    "hidden-text": {"hidden_size": "8"},
    "vocab-2-63": {"vocab_size": 2**63},
    "hidden-2-40": {"hidden_size": 2**40},
    "eps-negative": {"rms_norm_eps": -1},
    "activation": {"hidden_act": "tangens"},
    "dtype": {"torch_dtype": "float8_e4m3fn"},
    "rope-kind": {"rope_scaling": {"type": "spiral", "factor": 2}},
    "rope-list": {"rope_scaling": [1, 2]},
    "rope-low-high": {"rope_scaling": {**_LLAMA3, "low_freq_factor": 9.0}},
    "tied-number": {"tie_word_embeddings": 1},
}

# Each changes the config of a model with experts.
_BAD_EXPERTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "experts-none": (MOE, {"num_experts": 0}),
    "experts-many": (MOE, {"num_experts": 10**9}),
    "experts-active": (MOE, {"num_experts_per_tok": 4}),
    "experts-text": (MOE, {"num_experts": "3"}),
    "experts-layers-text": (MOE, {"mlp_only_layers": ["0"]}),
    "experts-step-0": (MOE, {"decoder_sparse_step": 0}),
    "experts-groups": (_GLM, {"n_group": 3}),
    "experts-kept": (_GLM, {"topk_group": 3}),
    "experts-scale": (_GLM, {"routed_scaling_factor": -1}),
    "experts-clipped": (MOE, {"model_type": "olmoe", "clip_qkv": 8.0}),
}

# Config text that is no llama at all, by name: (content, what it must do).
_TEXTS: dict[str, bytes] = {
    "bad-empty": b"",
    "bad-null": b"null",
    "bad-list": b"[]",
    "bad-cut": json.dumps(CONFIG).encode()[:90],
    "bad-utf16": json.dumps(CONFIG).encode("utf-16"),
    "bad-nan": json.dumps({**CONFIG, "rope_theta": float("nan")}).encode(),
    "bad-deep": b'{"model_type": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    "bad-digits": b'{"model_type": "llama", "hidden_size": ' + b"9" * 4000 + b"}",
    "odd-byte-order-mark": b"\xef\xbb\xbf" + json.dumps(CONFIG).encode(),
    "odd-twice": json.dumps(CONFIG).encode()[:-1] + b', "hidden_size": 16, "hidden_size": 8}',
    "odd-layers-4096": json.dumps({**CONFIG, "num_hidden_layers": 4096}).encode(),
    "odd-context-2-31": json.dumps({**CONFIG, "max_position_embeddings": 2**31 - 1}).encode(),
    "odd-quantised": json.dumps({**CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4}}).encode(),
    "odd-wide": json.dumps({**CONFIG, "hidden_size": 2**20, "head_dim": 2**19}).encode(),
    "odd-vocab-2-31": json.dumps({**CONFIG, "vocab_size": 2**31 - 1}).encode(),
    "odd-one-more-layer": json.dumps({**CONFIG, "num_hidden_layers": 2}).encode(),
    "odd-nested": json.dumps({"model_type": "llava", "text_config": CONFIG}).encode(),
    "odd-experts-4096": json.dumps({**MOE, "num_hidden_layers": 9, "num_experts": 4096}).encode(),
    "odd-experts-all-active": json.dumps({**MOE, "num_experts": 4096, "num_experts_per_tok": 4096}).encode(),
    "odd-experts-wide": json.dumps({**_GLM, "moe_intermediate_size": 2**20, "n_shared_experts": 16}).encode(),
}


def configs() -> Files:
    found = {f"good-{name}.json": _json(config) for name, config in _GOOD.items()}
    found |= {f"bad-{name}.json": _json({**CONFIG, **changes}) for name, changes in _BAD.items()}
    found |= {f"bad-{name}.json": _json({**base, **changes}) for name, (base, changes) in _BAD_EXPERTS.items()}
    return found | {f"{name}.json": text for name, text in _TEXTS.items()}


def shards(world: World) -> Files:
    """Whole files: the tensors of the small llama, or nearly."""
    whole = world.base["model.safetensors"]
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    names = list(header)
    down = "model.layers.0.mlp.down_proj.weight"
    last = max(entry["data_offsets"][1] for entry in header.values())

    def with_entry(name: str, **changes: Any) -> bytes:
        return _framed({**header, name: {**header[name], **changes}}, data)

    extra = {"dtype": "BF16", "shape": [8], "data_offsets": [last, last + 16]}
    text = json.dumps(header).encode()
    # An exponent of ones is not finite.
    broken = data[: len(data) // 2] + b"\xff\x7f" * 8 + data[len(data) // 2 + 16 :]
    found = {
        "good-bfloat16": whole,
        "good-float16": world.shard({**CONFIG, "torch_dtype": "float16"}),
        "good-float32": world.shard({**CONFIG, "torch_dtype": "float32"}),
        "good-no-prefix": _framed({name.removeprefix("model."): header[name] for name in names}, data),
        "good-metadata": _framed({"__metadata__": {"format": "pt"}, **header}, data),
        "good-spaces": _raw(text + b" " * 77, data),
        "odd-more-data": whole + bytes(100),
        "odd-unused-tensor": _framed({**header, "rotary.inv_freq": extra}, data + bytes(16)),
        "odd-layer-1": _framed({**header, "model.layers.1.mlp.down_proj.weight": extra}, data + bytes(16)),
        "odd-bias": _framed({**header, "model.layers.0.self_attn.q_proj.bias": extra}, data + bytes(16)),
        "odd-empty-tensor": _framed({**header, "nothing": {**extra, "shape": [0], "data_offsets": [0, 0]}}, data),
        "bad-cut": whole[:-100],
        "bad-no-bytes": b"",
        "bad-prefix": whole[:7],
        "bad-long-header": (2**60).to_bytes(8, "little") + whole[8:],
        "bad-no-json": whole[:8] + b"[" + whole[9:],
        "bad-twice": _raw(text[:-1] + b', "' + down.encode() + b'": {}}', data),
        "bad-overlap": with_entry(down, data_offsets=[0, 192]),
        "bad-negative": with_entry(down, data_offsets=[-192, 0]),
        "bad-2-62": with_entry(down, shape=[2**40, 2**20], data_offsets=[0, 2**61]),
        "bad-shape": with_entry(down, shape=[12, 8]),
        "bad-shape-nested": with_entry(down, shape=[[8], 12]),
        "bad-shape-real": with_entry(down, shape=[8.0, 12.0]),
        "bad-dtype": with_entry(down, dtype="I16"),
        "bad-dtype-nobody": with_entry(down, dtype="F12\n\x1b[2J"),
        "bad-metadata": _framed({"__metadata__": {"format": 1}, **header}, data),
        "bad-missing": _framed({name: header[name] for name in names if name != down}, data),
        "bad-nan": _raw(text, broken),
        "bad-pickle": b"\x80\x04\x95cposix\nsystem\n(S'touch pwned'\ntR." + bytes(40),
    }
    found |= _with_experts(world)
    return {f"{name}.safetensors": content for name, content in found.items()}


def _with_experts(world: World) -> Files:
    """The same of the model with experts, whose matrices stand apart, or all of a layer's in one tensor."""
    apart, stacked = world.experts["model.safetensors"], world.shard(MOE, stacked=True)
    (header, data), (one, joined) = _parted(apart), _parted(stacked)
    experts, both = "model.layers.1.mlp.experts.", "model.layers.1.mlp.experts.gate_up_proj"
    up = f"{experts}2.up_proj.weight"
    room = bytes(2 * math.prod(header[up]["shape"]))
    extra = {**header[up], "data_offsets": [len(data), len(data) + len(room)]}
    more, (begin, end) = one[both]["shape"], one[both]["data_offsets"]
    beside = {**one[both], "data_offsets": [len(data), len(data) + end - begin]}

    def with_both(**changes: Any) -> bytes:
        return _framed({**one, both: {**one[both], **changes}}, joined)

    return {
        "good-experts-apart": apart,
        "good-experts-stacked": stacked,
        "bad-experts-missing": _framed({name: entry for name, entry in header.items() if name != up}, data),
        "bad-experts-one-more": _framed({**header, f"{experts}3.up_proj.weight": extra}, data + room),
        "bad-experts-far": _framed({**header, f"{experts}{9**30}.up_proj.weight": extra}, data + room),
        "bad-experts-both-ways": _framed({**header, both: beside}, data + bytes(end - begin)),
        "bad-experts-stacked-turned": with_both(shape=[more[0], more[2], more[1]]),
        "bad-experts-stacked-flat": with_both(shape=[more[0] * more[1], more[2]]),
        "bad-experts-stacked-fewer": with_both(
            shape=[more[0] - 1, *more[1:]], data_offsets=[begin, begin + 2 * (more[0] - 1) * more[1] * more[2]]
        ),
        "bad-experts-stacked-none": with_both(shape=[0, *more[1:]], data_offsets=[begin, begin]),
        "bad-experts-stacked-far": with_both(shape=[2**40, 2**20, 8], data_offsets=[0, 2**62]),
        "odd-experts-placeholder": _framed({**header, f"{experts}<expert>.up_proj.weight": extra}, data + room),
    }


def _parted(whole: bytes) -> tuple[dict[str, Any], bytes]:
    """A file's header and its data."""
    length = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def indices(world: World) -> Files:
    """model.safetensors.index.json of the llama in two shards."""
    files = {}
    for name, content in world.sharded.items():
        if name.endswith(".safetensors"):
            files[name] = list(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))
    good = {tensor: file for file, tensors in files.items() for tensor in tensors}
    first, (a, b) = next(iter(good)), files
    found: dict[str, Any] = {
        "good-two": {"metadata": {"total_size": 5408}, "weight_map": good},
        "good-bare": {"weight_map": good},
        "bad-missing-file": {"weight_map": {**good, first: "model-00003-of-00002.safetensors"}},
        "bad-traversal": {"weight_map": {**good, first: f"../model/{a}"}},
        "bad-absolute": {"weight_map": {**good, first: "/etc/passwd"}},
        "bad-empty-name": {"weight_map": {**good, first: ""}},
        "bad-dot": {"weight_map": {**good, first: "."}},
        "bad-swapped": {"weight_map": {name: b if file == a else a for name, file in good.items()}},
        "bad-list": {"weight_map": list(good)},
        "bad-number": {"weight_map": {**good, first: 1}},
        "bad-config": {"weight_map": {**good, first: "config.json"}},
        "bad-few": {"weight_map": {first: a}},
        "bad-no-map": {"metadata": {}},
        "odd-more": {"weight_map": {**good, "model.layers.1.mlp.down_proj.weight": a}},
    }
    return {f"{name}.json": _json(content) for name, content in found.items()}


def _framed(header: dict[str, Any], data: bytes) -> bytes:
    return _raw(json.dumps(header).encode(), data)


def _raw(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"
