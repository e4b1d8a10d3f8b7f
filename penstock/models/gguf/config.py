"""Makes the config.json of a model type out of the metadata of a GGUF file.

A key of the metadata is the architecture and a name: "llama.block_count". What transformers keeps in config.json and a
GGUF file does not say follows from the architecture, as llama.cpp has it: Qwen 3's experts have normed scores, Gemma 2
of 46 layers and Gemma 3 of 62 scale queries by another width. Only gpt-oss' yarn is as it was trained (`truncate`
false), where llama.cpp rounds the ends of its ramp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import BrokenModel, UnsupportedModel
from penstock.models.gguf.ollama import in_usual_words
from penstock.models.hf.config import MAX_LAYERS, MAX_WIDTH, Config, short
from penstock.models.hf.rope import mscale

# Keys that change what a model computes, and which llama.cpp heeds in none of the architectures below. A file that has
# one was made for something else.
_PATTERN = "attention.sliding_window_pattern"  # only the two architectures below whose layers differ so may have it
_STRANGE = (
    "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.output_scale",
    "attention.temperature_scale", "attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla",
    _PATTERN, "logit_scale", "residual_scale", "embedding_scale", "expert_shared_count",
    "expert_group_count", "leading_dense_block_count", "use_parallel_residual", "router_logit_softcapping",
)  # fmt: skip


class _File:
    """The metadata of one file, and what its tensors tell."""

    def __init__(
        self, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], tables: Mapping[str, list[float]],
        where: str,
    ) -> None:  # fmt: skip
        said = Config(dict(metadata), where).text("general.architecture")
        prefix = f"{said}."
        own = {key.removeprefix(prefix): _one(value) for key, value in metadata.items() if key.startswith(prefix)}
        self.architecture, keys = in_usual_words(said, own)
        self.shapes, self.tables, self.where = shapes, tables, where
        self.keys = Config(keys, where, prefix)

    def whole(self, key: str, default: int | None = None) -> int:
        return self.keys.whole(key, default)

    def has_bias(self, *names: str) -> bool:
        """Whether one of these tensors has a bias in layer 0."""
        return any(f"blk.0.{name}.bias" in self.shapes for name in names)

    def attention_bias(self) -> bool:
        """Whether q, k and v have biases, be they in one tensor or apart."""
        return self.has_bias("attn_q", "attn_qkv")


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], tables: Mapping[str, list[float]], where: str
) -> dict[str, Any]:
    """The content of a config.json. `metadata`: numbers, strings, flags, lists of these. `shapes`: of the file's
    tensors, by name. `tables`: the values of those that ROPE_TABLES names. `where`: the file, for errors.

    Raises UnsupportedModel for an architecture that penstock does not run, or a model of it with parts that it does not
    run; BrokenModel for a key that is missing or ill-typed. `spec_from_config` checks the rest.
    """
    file = _File(metadata, shapes, tables, where)
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{where}: general.architecture {short(file.architecture)} is not one of {', '.join(ARCHITECTURES)}"
        )
    allowed = (_PATTERN,) if file.architecture in ("gemma3", "gpt-oss") else ()
    strange = [key for key in _STRANGE if file.keys.data.get(key) and key not in allowed]
    if strange or file.keys.data.get("attention.causal") is False:
        key = strange[0] if strange else "attention.causal"
        raise file.keys.unsupported(key, f"{short(file.keys.data[key])} is not supported for {file.architecture}")
    return ARCHITECTURES[file.architecture](file)


def _common(file: _File, model_type: str, **more: Any) -> dict[str, Any]:
    """What all types have. Raises BrokenModel, UnsupportedModel."""
    keys, shapes = file.keys, file.shapes
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise BrokenModel(f"{file.where} lacks the matrix token_embd.weight: it holds a vocabulary alone, or no model")
    width, heads = keys.whole("embedding_length", hi=MAX_WIDTH), keys.whole("attention.head_count", hi=MAX_WIDTH)
    if not keys.has("attention.key_length") and width % heads:
        raise keys.broken("attention.head_count", f"{heads} should divide embedding_length {width}")
    head_dim = keys.whole("attention.key_length", width // heads, hi=MAX_WIDTH)
    value_length = keys.whole("attention.value_length", head_dim)
    if value_length != head_dim:
        raise keys.unsupported("attention.value_length", f"{value_length} differs from the keys' {head_dim}")
    return {
        "model_type": model_type,
        "vocab_size": embedding[0],
        "hidden_size": width,
        "num_hidden_layers": file.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads, hi=MAX_WIDTH),
        "head_dim": head_dim,
        "max_position_embeddings": file.whole("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon", lo=0.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        **_rope(file, head_dim),
        **more,
    }


def _rope(file: _File, head_dim: int) -> dict[str, Any]:
    """rope_theta, and rope_scaling where there is any. Raises BrokenModel, UnsupportedModel."""
    keys = file.keys
    rotated = keys.whole("rope.dimension_count", head_dim)
    rope: dict[str, Any] = {"rope_theta": keys.real("rope.freq_base", 10_000.0)}
    if rotated != head_dim:
        if file.architecture != "phi3":
            raise keys.unsupported("rope.dimension_count", f"{rotated} is a part of each head of {head_dim} only")
        rope["partial_rotary_factor"] = rotated / head_dim
    # A file of Llama 3.1 has no factors in its metadata but a divisor for each frequency. longrope has such divisors.
    divisors = file.tables.get("rope_freqs.weight")
    long, brief = (file.tables.get(f"rope_factors_{which}.weight") for which in ("long", "short"))
    if (long is None) != (brief is None):
        raise BrokenModel(f"{file.where} has one of rope_factors_long.weight and rope_factors_short.weight alone")
    factor_key = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
    factor = keys.real(factor_key, 1.0, lo=0.0) or 1.0  # 0 stands for none
    # What llama.cpp takes where a file names a factor and no type.
    kind = keys.text("rope.scaling.type", "linear" if factor != 1.0 else "none")
    beside_divisors = ("none", "longrope", "linear") if divisors is not None else ("none", "longrope")
    if (divisors is not None or long is not None) and kind not in beside_divisors:
        raise keys.unsupported("rope.scaling.type", f"{short(kind)} beside a table of divisors is not supported")
    attn_key = "rope.scaling.attn_factor"
    has_tables = divisors is None and long is not None
    if not has_tables and kind != "yarn" and keys.has(attn_key) and keys.real(attn_key) != 1.0:
        raise keys.unsupported(attn_key, f"{short(keys.data[attn_key])} is not supported but for longrope and yarn")
    if divisors is not None:
        stretch = factor if kind == "linear" else 1.0
        both = [divisor * stretch for divisor in divisors]
        same = {"short_factor": both, "long_factor": both, "attention_factor": 1.0}
        return {**rope, "rope_scaling": {"rope_type": "longrope", **same}}
    if long is not None and brief is not None:
        scaling: dict[str, Any] = {"rope_type": "longrope", "short_factor": brief, "long_factor": long}
        if keys.has(attn_key):
            scaling["attention_factor"] = keys.real(attn_key)
        return {**rope, "rope_scaling": scaling, **_original(file)}
    if kind == "longrope":
        raise keys.unsupported("rope.scaling.type", "is longrope, and the file has no rope_factors_long.weight")
    if kind == "none":
        return rope
    if kind == "linear":
        return {**rope, "rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind != "yarn":
        raise keys.unsupported("rope.scaling.type", f"{short(kind)} is not one of none, linear, yarn")
    return {**rope, "rope_scaling": _yarn(file, factor)}


def _yarn(file: _File, factor: float) -> dict[str, Any]:
    """A rope_scaling. `attn_factor` multiplies what cos and sin are multiplied with anyway."""
    keys = file.keys
    scaling = {"rope_type": "yarn", "factor": factor, **_original(file)}
    for name in ("beta_fast", "beta_slow"):
        if keys.has(f"rope.scaling.yarn_{name}"):
            scaling[name] = keys.real(f"rope.scaling.yarn_{name}")
    for key in (
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_log_multiplier",
        "rope.scaling.extrapolation_factor",
    ):
        if keys.has(key) and keys.real(key, lo=0.0) != (0.0 if key.endswith("multiplier") else 1.0):
            raise keys.unsupported(key, f"{short(keys.data[key])} is not supported")
    if keys.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = keys.real("rope.scaling.attn_factor") * mscale(factor, 1.0)
    return scaling


def _original(file: _File) -> dict[str, Any]:
    key = "rope.scaling.original_context_length"
    return {"original_max_position_embeddings": file.whole(key)} if file.keys.has(key) else {}


def _llama(file: _File) -> dict[str, Any]:
    """Llama, Mistral and the many that are published as these; with experts, Mixtral."""
    if file.keys.data.get("expert_count"):
        return _common(
            file,
            "mixtral",
            intermediate_size=file.whole("feed_forward_length"),
            num_local_experts=file.whole("expert_count"),
            num_experts_per_tok=file.whole("expert_used_count"),
        )
    biases = {"attention_bias": file.attention_bias(), "mlp_bias": file.has_bias("ffn_up")}
    model_type, of_output = "llama", file.has_bias("attn_output")
    if of_output != biases["attention_bias"]:
        # As Qwen's first models have, where they are published as llamas. No config of a llama says so.
        model_type, biases = "seed_oss", {**biases, "attention_out_bias": of_output}
    return _common(file, model_type, intermediate_size=file.whole("feed_forward_length"), **biases)


def _qwen2(file: _File) -> dict[str, Any]:
    return _common(file, "qwen2", intermediate_size=file.whole("feed_forward_length"))


def _qwen3(file: _File) -> dict[str, Any]:
    biases = {"attention_bias": file.attention_bias()}
    return _common(file, "qwen3", intermediate_size=file.whole("feed_forward_length"), **biases)


def _qwen3_moe(file: _File) -> dict[str, Any]:
    return _common(
        file,
        "qwen3_moe",
        attention_bias=file.attention_bias(),
        moe_intermediate_size=file.whole("expert_feed_forward_length"),
        num_experts=file.whole("expert_count"),
        num_experts_per_tok=file.whole("expert_used_count"),
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _gemma2(file: _File) -> dict[str, Any]:
    config = _common(file, "gemma2", intermediate_size=file.whole("feed_forward_length"))
    keys, of_27b = file.keys, config["num_hidden_layers"] == 46
    width = config["hidden_size"] // config["num_attention_heads"] if of_27b else config["head_dim"]
    return {
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width,
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0),
        "sliding_window": file.whole("attention.sliding_window", 4096),
    }


def _gemma3(file: _File) -> dict[str, Any]:
    """The text model. The rope of layers that see everything may be scaled, and others' has a base of its own."""
    config = _common(file, "gemma3_text", intermediate_size=file.whole("feed_forward_length"))
    keys, of_27b = file.keys, config["num_hidden_layers"] == 62
    width = config["hidden_size"] // config["num_attention_heads"] if of_27b else config["head_dim"]
    cap = keys.real("final_logit_softcapping") if keys.data.get("final_logit_softcapping") else None
    return {
        **config,
        "attention_bias": file.attention_bias(),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width,
        "final_logit_softcapping": cap,
        "sliding_window": file.whole("attention.sliding_window"),
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 10_000.0),
        "layer_types": _layer_types(file, 6),
    }


def _gpt_oss(file: _File) -> dict[str, Any]:
    config = _common(
        file,
        "gpt_oss",
        attention_bias=file.attention_bias(),
        intermediate_size=file.whole("expert_feed_forward_length", file.keys.data.get("feed_forward_length")),
        num_local_experts=file.whole("expert_count"),
        num_experts_per_tok=file.whole("expert_used_count"),
        sliding_window=file.whole("attention.sliding_window"),
        layer_types=_layer_types(file, 2),
    )
    scaling = config.get("rope_scaling") or {"rope_type": "default"}  # without any, the type's own would count
    return {**config, "rope_scaling": {**scaling, **({"truncate": False} if scaling["rope_type"] == "yarn" else {})}}


def _smollm3(file: _File) -> dict[str, Any]:
    """Which layers have no rope no file says: every fourth."""
    biases = {"attention_bias": file.attention_bias(), "mlp_bias": file.has_bias("ffn_up")}
    return _common(
        file, "smollm3", intermediate_size=file.whole("feed_forward_length"), no_rope_layer_interval=4, **biases
    )


def _layer_types(file: _File, every: int) -> list[str]:
    """Of each layer whether it has the window. By default every `every`-th has none; a file may have another number, or
    say so layer by layer. Raises BrokenModel."""
    count = file.keys.whole("block_count", hi=MAX_LAYERS)
    said = file.keys.data.get(_PATTERN, every)
    if isinstance(said, bool):
        windows = [said] * count
    elif isinstance(said, list):
        if len(said) != count or not all(isinstance(each, bool) for each in said):
            raise file.keys.broken(_PATTERN, f"should be {count} flags, not {short(said)}")
        windows = said
    else:
        period = file.keys.whole(_PATTERN, every, hi=MAX_LAYERS)
        windows = [(i + 1) % period != 0 for i in range(count)]
    return ["sliding_attention" if window else "full_attention" for window in windows]


def _phi3(file: _File) -> dict[str, Any]:
    """Phi-4's files have a window of 0: none."""
    config = _common(file, "phi3", intermediate_size=file.whole("feed_forward_length"))
    window = file.keys.whole("attention.sliding_window", 0, lo=0)
    return {**config, "sliding_window": window if window and window < config["max_position_embeddings"] else None}


# By general.architecture: what makes its config.json.
ARCHITECTURES: dict[str, Callable[[_File], dict[str, Any]]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3moe": _qwen3_moe, "gemma2": _gemma2, "phi3": _phi3,
    "gemma3": _gemma3, "gpt-oss": _gpt_oss, "smollm3": _smollm3,
}  # fmt: skip


def _one(value: Any) -> Any:
    """The one value of a list with a value for each layer, where all are the same."""
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return value[0] if all(each == value[0] for each in value) else value
    return value
