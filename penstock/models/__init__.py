"""Reads `config.json` of every model type that penstock runs: one file per Hugging Face `model_type`, named as the
type.

A file is found by its name, so a new type is a new file and nothing to register. It holds two functions:

    spec(config)   the content of `config.json` as a ModelSpec; raises what `hf.config` raises
    sources(spec)  where in the checkpoint every block of `spec.parts.parts` stands

A type with experts has a third function and a constant:

    stacked_sources(spec)  as `sources`, for a checkpoint whose experts stand in one tensor with three axes
    COUNT_KEYS             the keys of config.json that count the experts; the first that a config has is read

A type that is published quantised has more:

    QUANT_METHODS          the values of `quant_method` in config.json that it is published with
    weights(spec, method)  the formats of such a model

Code that types share lives in the folder `hf`. The folder `planned` holds types that do not run yet. This package uses
the standard library only, since `penstock plan` runs on this alone.
"""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol, cast

from penstock.errors import BadRequest, BrokenModel, UnsupportedModel
from penstock.models.hf.config import Config, short
from penstock.models.hf.experts import count_key
from penstock.models.hf.names import TensorSource, short_name
from penstock.models.hf.quantization import KEY, MXFP4, quantization_of
from penstock.models.hf.refused import REFUSED
from penstock.spec.format import Format
from penstock.spec.model import Layer, ModelSpec

__all__ = [
    "TensorSource", "model_types", "own_weights", "planned_types", "quant_method", "says_experts", "sources",
    "spec_from_config", "stacked_sources", "switches",
]  # fmt: skip

# Flags of config.json that decide which weights a model has, of all types together.
_SWITCHES = (
    "attention_bias", "mlp_bias", "enable_bias", "bias", "tie_word_embeddings", "layer_norm_elementwise_affine",
    "_remove_final_layer_norm",
)  # fmt: skip


class _ModelType(Protocol):
    def spec(self, config: Config) -> ModelSpec: ...

    def sources(self, spec: ModelSpec) -> dict[tuple[str, str], TensorSource]: ...


def model_types() -> tuple[str, ...]:
    """The `model_type`s that there is a file for, sorted. Folders are no types: they hold code that types share."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg))


def planned_types() -> tuple[str, ...]:
    """The `model_type`s that can be planned and do not run yet, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules([f"{path}/planned" for path in __path__])))


def spec_from_config(config: dict[str, Any], where: str, *, to_plan: bool = False) -> ModelSpec:
    """The architecture that a parsed `config.json` describes. `where` names the file in errors. `to_plan`: it is only
    planned, so types that do not run yet will do.

    Keys that the file leaves out have the defaults of the transformers class of that type. The shape keys (sizes,
    layers, heads) have no defaults, since a default would describe another model.

    Raises UnsupportedModel for a type, activation, rope or number format that penstock does not run, and
    BrokenModel for a key that is missing, ill-typed or absurd, naming it.
    """
    reader = Config(config, where)
    module = _find(reader.text("model_type"), where, to_plan)
    how = quantization_of(config, where)
    if how is None and config.get(KEY) is not None and quant_method(config, where) is None:
        raise UnsupportedModel(f"{where}: {KEY} says {MXFP4}, and no {reader.text('model_type')} is published so")
    try:
        spec = module.spec(reader)
    except BadRequest as error:
        raise BrokenModel(f"{where}: {error.message}") from None
    return spec if how is None or not how.ordered else _ordered(spec, where)


def _ordered(spec: ModelSpec, where: str) -> ModelSpec:
    """The spec of a model whose matrices were quantised in act-order. Raises UnsupportedModel where matrices that may
    have orders of their own read the same h."""
    layers: dict[Layer, Layer] = {}  # layers that are alike stay one object
    for layer in spec.layers:
        if layer.routed is not None or layer.parallel_norms or not layer.norm_in:
            raise UnsupportedModel(
                f"{where}: {KEY} says desc_act, which is not run for a {spec.model_type}: of models with experts, with"
                " FFNs beside attention or without norms before blocks only checkpoints with desc_act false run"
            )
        layers.setdefault(layer, replace(layer, ordered=True))
    return replace(spec, layers=tuple(layers[layer] for layer in spec.layers))


def quant_method(config: dict[str, Any], where: str) -> str | None:
    """The `quant_method` of a parsed config.json, where its type is published so (`QUANT_METHODS`). Else None. `where`
    names the file in errors. Raises BrokenModel."""
    reader = Config(config, where)
    if not reader.has(KEY):
        return None
    method = reader.inner(KEY).text("quant_method")
    module = _find(reader.text("model_type"), where)
    return method if method in getattr(module, "QUANT_METHODS", ()) else None


def own_weights(config: dict[str, Any], spec: ModelSpec, where: str) -> Format:
    """The formats of the weights of a checkpoint with this config.json, as far as that says: those of its
    `quant_method`, or `spec.dtype`. Raises BrokenModel."""
    method = None if spec.cannot_run else quant_method(config, where)
    if method is None:
        return Format(spec.dtype)
    return cast(Format, import_module(f"{__name__}.{spec.model_type}").weights(spec, method))


def switches(config: dict[str, Any], where: str) -> dict[str, str]:
    """Explains tensors that a model does not use because of a flag in its config.json. Returns the tensor's
    `short_name` → the flag as config.json has it: {"layers.0.self_attn.q_proj.bias": "says attention_bias false"}.
    These are the tensors that the model would use with another value of the flag."""
    said: dict[str, str] = {}
    for key in _SWITCHES:
        says = _says(config, key)
        for value in (True, False):
            try:
                spec = spec_from_config({**config, key: value}, where)
            except (BrokenModel, UnsupportedModel):
                continue
            for source in sources(spec).values():  # no flag decides how many experts there are
                said.setdefault(short_name(source.tensor), says)
    return said


def says_experts(config: dict[str, Any]) -> str:
    """What a config.json says of the number of experts, as words for an error: "says num_experts 8". It is "" for a
    type without experts. Raises UnsupportedModel for a type that there is no file for."""
    keys = getattr(_find(config["model_type"], "config.json"), "COUNT_KEYS", ())
    return _says(config, count_key(config, keys)) if keys else ""


def _says(config: dict[str, Any], key: str) -> str:
    return f"says {key} {str(config[key]).lower()}" if key in config else f"leaves out {key}"


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    """(part key, block name) → its place in the checkpoint, for every block of `spec.parts.parts`. Raises
    UnsupportedModel for a type that does not run."""
    return _find(spec.model_type, "the plan").sources(spec)


def stacked_sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource] | None:
    """As `sources`, where all experts of a layer stand in one tensor. None for a type without experts. Raises as
    `sources`."""
    function = getattr(_find(spec.model_type, "the plan"), "stacked_sources", None)
    return None if function is None else cast("dict[tuple[str, str], TensorSource]", function(spec))


def _find(model_type: str, where: str, to_plan: bool = False) -> _ModelType:
    # Looked up among the names of our own files, so no string of a config ever reaches the import system.
    types = model_types()
    if model_type in types:
        return cast(_ModelType, import_module(f"{__name__}.{model_type}"))
    if model_type in REFUSED:
        raise UnsupportedModel(f"{where}: models of type {model_type} are not run: {REFUSED[model_type]}")
    if model_type not in planned_types():
        raise UnsupportedModel(f"{where}: model_type {short(model_type)} is not one of {', '.join(types)}")
    module = import_module(f"{__name__}.planned.{model_type}")
    if not to_plan:
        lacks = module.CANNOT_RUN
        raise UnsupportedModel(f"{where}: model_type {model_type} can be planned and does not run yet: {lacks}")
    return cast(_ModelType, module)
