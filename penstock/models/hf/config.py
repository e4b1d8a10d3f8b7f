"""Reads values of a `config.json` that anybody may have written, and checks their types and bounds.

JSON's `null` is not the same as an absent key. transformers gives an absent key its class default, and `null` a meaning
of its own (Mistral: without the key `sliding_window` the window is 4096, with `null` there is none). The `optional_…`
reads keep that difference. The others refuse `null`.
"""

from __future__ import annotations

import math
from typing import Any

from penstock.errors import BrokenModel, UnsupportedModel

# No width (neurons, heads, d_model) of any model comes near this. A file with a larger one is broken, not big. A limit
# of 2**24 allowed granules of 2 GiB, which `synth` made before anything refused them.
MAX_WIDTH = 2**20
# So much is planned within seconds: 4096 layers took 26 s, a vocabulary of 2**31 a minute. The largest models of today
# have some 130 layers and 262,208 tokens.
MAX_LAYERS, MAX_VOCAB = 512, 2**22
MAX_COUNT = 2**31 - 1

_DTYPES = ("float32", "bfloat16", "float16")

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    # Five spellings of the tanh approximation. They differ in rounding only.
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu2",
    "relu_squared": "relu2",
}


def short(value: Any) -> str:
    """A value as it stands in an error line: `repr`, at most 40 characters."""
    if isinstance(value, int) and abs(value) >= 10**30:
        # repr of a huge int is slow, and beyond 4300 digits Python refuses it.
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a list that holds a huge int, or nests too deep
        text = f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "..."


class Config:
    """One JSON object of a config. `where` names the file in errors, `prefix` the object inside it (`"rope_scaling."`).

    Raises BrokenModel if `data` is no object."""

    def __init__(self, data: Any, where: str, prefix: str = "") -> None:
        self.where = where
        self.prefix = prefix
        if not isinstance(data, dict):
            name = f"{where}: {prefix[:-1]}" if prefix else where
            raise BrokenModel(f"{name} should be a JSON object, not {short(data)}")
        self.data: dict[str, Any] = data

    def broken(self, key: str, complaint: str) -> BrokenModel:
        return BrokenModel(f"{self.where}: {self.prefix}{key} {complaint}")

    def unsupported(self, key: str, complaint: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.where}: {self.prefix}{key} {complaint}")

    def has(self, key: str) -> bool:
        """Whether the object has the key with a value other than null."""
        return self.data.get(key) is not None

    def whole(self, key: str, default: int | None = None, *, lo: int = 1, hi: int = MAX_COUNT) -> int:
        """A whole number in lo..hi. Without a default the key must be there. Raises BrokenModel."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.broken(key, f"should be a whole number, not {short(value)}")
        if not lo <= value <= hi:
            raise self.broken(key, f"should be from {lo} to {hi}, not {short(value)}")
        return value

    def optional_whole(self, key: str, default: int | None, *, hi: int = MAX_COUNT) -> int | None:
        """A whole number in 1..hi, None for null, the default where the key is absent. Raises BrokenModel."""
        if key not in self.data:
            return default
        return None if self.data[key] is None else self.whole(key, hi=hi)

    def real(self, key: str, default: float | None = None, *, lo: float = 1e-12, hi: float = 1e12) -> float:
        """A finite number in lo..hi. Without a default the key must be there. Raises BrokenModel."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.broken(key, f"should be a number, not {short(value)}")
        # Compared before the conversion: float() of a huge int overflows. NaN fails every comparison.
        if not lo <= value <= hi:
            raise self.broken(key, f"should be from {lo:g} to {hi:g}, not {short(value)}")
        return float(value)

    def optional_real(self, key: str, default: float | None) -> float | None:
        """A positive number, None for null, the default where the key is absent. Raises BrokenModel."""
        if key not in self.data:
            return default
        return None if self.data[key] is None else self.real(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false. Raises BrokenModel."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.broken(key, f"should be true or false, not {short(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Without a default the key must be there. Raises BrokenModel."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.broken(key, f"should be a string, not {short(value)}")
        return value

    def reals(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers. Raises BrokenModel."""
        values = self._get(key, None)
        if not isinstance(values, list) or len(values) != count:
            raise self.broken(key, f"should be a list of {count} numbers, not {short(values)}")
        items = Config({f"{key}[{i}]": value for i, value in enumerate(values)}, self.where, self.prefix)
        return tuple(items.real(name) for name in items.data)

    def inner(self, key: str) -> Config:
        """The object under `key`. Raises BrokenModel."""
        return Config(self._get(key, None), self.where, f"{self.prefix}{key}.")

    def activation(self, key: str, default: str) -> str:
        """One of `spec.model.ACTIVATIONS`. Raises UnsupportedModel."""
        name = self.text(key, default)
        if name not in _ACTIVATIONS:
            raise self.unsupported(key, f"{short(name)} is not one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def dtype(self) -> str:
        """The checkpoint's number format, under its new (`dtype`) or old (`torch_dtype`) key.

        It is float32 where neither is set, as transformers assumes. Packing goes by the tensors' own headers instead.
        Raises UnsupportedModel.
        """
        key = "dtype" if self.has("dtype") else "torch_dtype"
        if not self.has(key):
            return "float32"
        name = self.text(key).removeprefix("torch.")
        if name not in _DTYPES:
            raise self.unsupported(key, f"{short(name)} is not one of {', '.join(_DTYPES)}")
        return name

    def _get(self, key: str, default: Any) -> Any:
        value = self.data.get(key, default)
        if value is None and key not in self.data:
            raise self.broken(key, "is missing")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.broken(key, f"should be a finite number, not {value}")
        return value
