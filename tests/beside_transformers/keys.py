"""`python -m tests.beside_transformers.keys`: keys of configs that change what transformers computes, and not our spec.

Each of the small models of `tests.cpu.variants` is a case. Every key that its class in transformers has or reads is
given other values, one at a time, with the same weights. Where the logits there change, the spec here must change too,
or the config must be refused. Values that transformers refuses, or that need other weights, are left out.

    --cases N | --minutes M    how much (2 minutes)
    --first N                  begin with this case
    --case N                   this one alone

The last line is one JSON object; the exit code is 1 if a key is passed over.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.errors import PenstockError
from penstock.models import spec_from_config
from tests.cpu.oracle import prompt, randomise
from tests.cpu.variants import VARIANTS, Variant
from tests.numbered import search

CHANGED = 1e-4  # by so much a logit has changed
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation", "activation_function")
# What is no part of the model, and formats of numbers.
_OTHERS = ("model_type", "vocab_size", "dtype", "torch_dtype", "quantization_config")

Array = NDArray[np.float32]


def passed_over(variant: Variant) -> Iterator[str]:
    """What transformers heeds and we do not, a line each."""
    model, ids = _model(variant.model_type, variant.keys), prompt(variant, 60)
    expected, weights = _logits(model, ids), model.state_dict()
    said = {"model_type": variant.model_type, **variant.keys}
    spec = spec_from_config(said, variant.name)
    for key in sorted(_keys(model.config)):
        value = getattr(model.config, key, None)
        for other in _values(key, value):
            try:
                changed = _model(variant.model_type, {**variant.keys, key: other})
                changed.load_state_dict(weights)
                off = float(np.abs(_logits(changed, ids) - expected).max())
            except Exception:  # transformers has many ways to refuse a value
                continue
            try:
                is_same = spec_from_config({**said, key: other}, variant.name) == spec
            except PenstockError:
                continue
            if off > CHANGED and is_same:
                yield f"{key} {value!r} → {other!r} changes logits by {off:.2g}"


def _model(model_type: str, keys: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, **json.loads(json.dumps(keys)))  # which writes into them
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **eager)
    randomise(model, embedding_spread=0.6 if model_type.startswith("gemma") else 2.0)
    return model.eval()


def _logits(model: Any, ids: list[int]) -> Array:
    with torch.inference_mode():
        logits: Array = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        return logits


def _keys(config: Any) -> set[str]:
    """The keys that a config has, and those that its model's code reads."""
    where = type(config).__module__
    modules = (where, where.replace("configuration_", "modeling_"))
    code = "".join(inspect.getsource(import_module(module)) for module in modules)
    read = {*re.findall(r"config\.(\w+)", code), *re.findall(r'config, "(\w+)"', code)}
    own = {key for key in (read | set(config.to_dict())) - set(_OTHERS) if not key.startswith("_attn")}
    return {key for key in own if not callable(value := getattr(config, key, None)) and not isinstance(value, dict)}


def _values(key: str, value: Any) -> list[Any]:
    """Other values that a key may have."""
    if key in ACTIVATIONS:
        return ["gelu", "relu"]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(1, value // 2), 2 * value, 0]
    if isinstance(value, float):
        return [1.5 * value + 0.1, value / 2]
    if isinstance(value, list):
        return [value[1:], value[::-1], [1, *value[1:]]] if value else [[0], [1]]
    return [True, 2.0, 8, "x", 0.5] if value is None else []


def judged(number: int) -> tuple[str, list[str]] | None:
    variant = VARIANTS[number]
    if variant.model_type == "gemma3":  # its text model is gemma3_text
        return None
    return f"case {number}: {variant.name}", list(passed_over(variant))


if __name__ == "__main__":
    sys.exit(search(__doc__ or "", judged, len(VARIANTS)))
