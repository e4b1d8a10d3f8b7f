"""Gemma 3 with pictures: its text model alone, which `text_config` describes. What sees pictures is left out."""

from __future__ import annotations

from penstock.models import gemma3_text
from penstock.models.hf.config import Config
from penstock.models.hf.names import TensorSource
from penstock.spec.model import ModelSpec

# Published files leave out of `text_config` what is the same in the class of transformers, sizes too.
_SIZES = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
}  # fmt: skip


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    text = config.inner("text_config")
    model_type = text.text("model_type", "gemma3_text")
    if model_type != "gemma3_text":
        raise text.unsupported("model_type", f"{model_type[:40]!r} is not gemma3_text")
    if text.has("final_logit_softcapping"):  # transformers caps logits of `gemma3_text` alone
        raise text.unsupported("final_logit_softcapping", "is set; penstock runs gemma3 without it")
    # These two are the whole model's.
    outer = {key: config.data[key] for key in ("dtype", "torch_dtype") if config.has(key)}
    outer["tie_word_embeddings"] = config.flag("tie_word_embeddings", True)
    if outer.keys() & {"dtype", "torch_dtype"}:
        outer = {"dtype": None, "torch_dtype": None} | outer
    return gemma3_text.spec(Config({**_SIZES, **text.data, **outer}, config.where, text.prefix), "gemma3")


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    places = gemma3_text.sources(spec)
    return {key: source._replace(tensor=f"language_model.{source.tensor}") for key, source in places.items()}
