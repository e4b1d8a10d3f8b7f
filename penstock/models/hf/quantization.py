"""Reads the `quantization_config` of a config.json: to what a checkpoint's weights were quantised, and how they lie.

Methods that penstock reads, by `quant_method`:

    gptq                 AutoGPTQ, GPTQModel: integers of 4 or 8 bits, packed along the inputs of a matrix
    awq                  AutoAWQ, version gemm: 4 bits, packed along the outputs
    fp8, fbgemm_fp8      float8 (e4m3): a scale for each block (DeepSeek: 128 x 128), each row, or each matrix
    compressed-tensors   vLLM's: formats pack-quantized (4 or 8 bits), int-quantized (8 bits), float-quantized (float8)

    mxfp4                gpt-oss' own: `models.gpt_oss` says of what, `store.mxfp4` reads the tensors

Every other one is refused by its name. `store.quantised` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import UnsupportedModel
from penstock.models.hf.config import MAX_WIDTH, Config, short
from penstock.spec.blocks import BLOCKS

KEY, MXFP4 = "quantization_config", "mxfp4"
CODES = ("qweight", "weight_packed")  # what tensors of codes are called, and no matrix of floats is
_GROUP = 32  # columns of a group are a multiple of this: kernels round activations by so many
_FLOAT8 = "float8"
_MOST_NAMES = 1 << 14


@dataclass(frozen=True, slots=True)
class Quantization:
    """What most matrices [out, in] of a checkpoint were quantised to.

    `layout`: how their tensors lie: gptq, awq, packed, bytes (int-quantized) or float8. `kind`: the format that holds
    the numbers. `bits`: of a code. `group`: columns of a scale, 0 for a whole row. `block_rows`: rows of a scale, 0 for
    all of them. `zero_is_less`: zero points are stored less one. `symmetric`: there are no zero points in the file.
    `ordered`: the columns of a group may lie apart in a matrix (act-order). `skipped`: names of modules, or parts of
    names, that were left as they were; a dot at the end of one ends a name.
    `head`: lm_head was quantised too.
    """

    layout: str
    kind: str
    bits: int
    group: int
    block_rows: int = 1
    zero_is_less: bool = False
    symmetric: bool = False
    ordered: bool = False
    skipped: tuple[str, ...] = ()
    head: bool = False

    def skips(self, module: str) -> bool:
        """Whether a module, such as `model.layers.0.mlp.up_proj`, was left as it was, as far as names tell. Weights'
        headers tell for certain."""
        return any(name in f"{module}." for name in self.skipped)


def quantization_of(config: Mapping[str, Any], where: str) -> Quantization | None:
    """What a parsed config.json says; None where it says nothing, or mxfp4. `where` names the file in errors.

    Raises UnsupportedModel for a method or a setting that penstock does not read, BrokenModel for keys that are missing
    or make no sense."""
    if config.get(KEY) is None:
        return None
    keys = Config(config[KEY], where, f"{KEY}.")
    if not keys.has("quant_method") and any(keys.data.get(f"load_in_{bits}bit") is True for bits in (4, 8)):
        raise _unknown(where, "bitsandbytes")
    method = keys.text("quant_method").lower()
    if method == MXFP4:
        return None
    if method not in _METHODS:
        raise _unknown(where, method)
    return _METHODS[method](keys)


def _unknown(where: str, method: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{where}: {KEY} says quant_method {short(method)}, which is not one of {', '.join(_METHODS)}, {MXFP4}"
    )


def _gptq(keys: Config) -> Quantization:
    bits = _bits(keys, "bits", 4)
    form = keys.text("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise keys.unsupported("checkpoint_format", f"{short(form)} is not one of gptq, gptq_v2")
    if keys.data.get("is_marlin_format") is True:
        raise keys.unsupported("is_marlin_format", "true: weights in Marlin's order are not read")
    if keys.has("pack_dtype") and keys.text("pack_dtype") != "int32":
        raise keys.unsupported("pack_dtype", f"{short(keys.data['pack_dtype'])} is not int32")
    skipped = list(_names(keys, "modules_to_not_convert"))
    for name, changes in (keys.inner("dynamic").data if keys.has("dynamic") else {}).items():
        if not name.startswith("-:") and changes:
            raise keys.unsupported("dynamic", f"has settings of its own for {short(name)}")
        skipped.append(_plain("re:" + name.removeprefix("-:")))
    group = _group(keys, "group_size", 128)
    ordered = keys.flag("desc_act", False) and not keys.flag("static_groups", False) and group > 0
    return Quantization(
        "gptq", _kind(bits, group), bits, group, zero_is_less=form == "gptq", ordered=ordered,
        skipped=_known(skipped), head=keys.flag("lm_head", False),
    )  # fmt: skip


def _awq(keys: Config) -> Quantization:
    _bits(keys, "w_bit" if keys.has("w_bit") else "bits", 4, known=(4,))
    version = keys.text("version", "gemm").lower()
    if version != "gemm":
        raise keys.unsupported("version", f"{short(version)} is not gemm")
    group = _group(keys, "q_group_size" if keys.has("q_group_size") else "group_size", 128)
    return Quantization("awq", _kind(4, group), 4, group, skipped=_known(_names(keys, "modules_to_not_convert")))


def _fp8(keys: Config) -> Quantization:
    skipped = _known((*_names(keys, "modules_to_not_convert"), *_names(keys, "ignored_layers")))
    form = keys.text("fmt", "e4m3").lower()
    if form not in ("e4m3", "e4m3fn", "float8_e4m3fn"):
        raise keys.unsupported("fmt", f"{short(form)} is not e4m3")
    if not keys.has("weight_block_size"):
        return Quantization("float8", _FLOAT8, 8, 0, 0, skipped=skipped)
    rows, columns = _block(keys, "weight_block_size")
    return Quantization("float8", _FLOAT8, 8, columns, rows, skipped=skipped)


def _compressed(keys: Config) -> Quantization:
    form = keys.text("format", "pack-quantized")
    layouts = {"pack-quantized": "packed", "int-quantized": "bytes", "float-quantized": "float8"}
    if form not in layouts:
        raise keys.unsupported("format", f"{short(form)} is not one of {', '.join(layouts)}")
    if keys.has("sparsity_config") and keys.inner("sparsity_config").text("format", "dense") != "dense":
        raise keys.unsupported("sparsity_config", "says that weights are sparse, which is not read")
    if keys.has("transform_config") and any(keys.inner("transform_config").data.values()):
        raise keys.unsupported("transform_config", "says that activations are turned by a matrix, which is not run")
    groups = keys.inner("config_groups")
    if not 1 <= len(groups.data) <= 16:
        raise keys.unsupported("config_groups", f"has {len(groups.data)} groups")
    quantised = {_weights_of(groups.inner(name), layouts[form]) for name in groups.data}
    if len(quantised) > 1:
        raise keys.unsupported("config_groups", "has groups of other weights than the first one's")
    how = quantised.pop()
    return replace(how, skipped=_known(map(_plain, _names(keys, "ignore"))), head=True)


def _weights_of(group: Config, layout: str) -> Quantization:
    """One of compressed-tensors' groups."""
    own = group.text("format") if group.has("format") else ""
    weights = group.inner("weights")
    is_float = weights.text("type", "int") == "float"
    if is_float != (layout == "float8"):
        raise weights.unsupported("type", f"{short(weights.data.get('type', 'int'))} is not what {own or 'format'} has")
    bits = _bits(weights, "num_bits", 8, known=(8,) if layout in ("bytes", "float8") else (4, 8))
    strategy = weights.text("strategy", "group" if weights.has("group_size") else "tensor")
    size, rows = 0, 1
    if strategy == "block" and is_float:
        rows, size = _block(weights, "block_structure")
    elif strategy == "group" and not is_float:
        size = _group(weights, "group_size", 128)
    elif strategy not in ("channel", "tensor"):
        raise weights.unsupported("strategy", f"{short(strategy)} is not one of group, channel, tensor, block")
    elif strategy == "tensor":
        rows = 0
    ordered = layout == "packed" and size > 0 and weights.data.get("actorder") in ("group", "dynamic", True)
    kind, symmetric = _FLOAT8 if is_float else _kind(bits, size), weights.flag("symmetric", True)
    return Quantization(layout, kind, bits, size, rows, symmetric=symmetric, ordered=ordered)


_METHODS = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": lambda keys: Quantization(
        "float8", _FLOAT8, 8, 0, 1, skipped=_known(_names(keys, "modules_to_not_convert"))
    ),
    "compressed-tensors": _compressed,
}


def _bits(keys: Config, key: str, default: int, known: tuple[int, ...] = (4, 8)) -> int:
    bits = keys.whole(key, default)
    if bits not in known:
        raise keys.unsupported(key, f"{bits} is not one of {', '.join(map(str, known))}")
    return bits


def _group(keys: Config, key: str, default: int) -> int:
    """Columns of a group, 0 for a whole row (-1 in files). Raises BrokenModel, UnsupportedModel."""
    if keys.data.get(key, default) in (-1, None):
        return 0
    group = keys.whole(key, default, hi=MAX_WIDTH)
    if group % _GROUP:
        raise keys.unsupported(key, f"{group} is no multiple of {_GROUP}")
    return group


def _block(keys: Config, key: str) -> tuple[int, int]:
    """Rows and columns of a scale of float8. Raises BrokenModel, UnsupportedModel."""
    value, columns = keys.data.get(key), BLOCKS[_FLOAT8].columns
    good = isinstance(value, list) and len(value) == 2
    if not good or any(isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_WIDTH for n in value or ()):
        raise keys.broken(key, f"should be a list of two whole numbers, not {short(value)}")
    assert isinstance(value, list)
    if value[1] % columns:
        raise keys.unsupported(key, f"{short(value)} has scales for other than multiples of {columns} columns")
    return value[0], value[1]


def _kind(bits: int, group: int) -> str:
    """The format for integers of so many bits with a scale for `group` columns, 0 for a whole row."""
    kinds = (kind for kind in BLOCKS if kind.startswith(f"uint{bits}_"))
    return max((kind for kind in kinds if group % BLOCKS[kind].scaled == 0), key=lambda kind: BLOCKS[kind].scaled)


def _names(keys: Config, key: str) -> tuple[str, ...]:
    """A list of names of modules. Raises BrokenModel."""
    value = keys.data.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > _MOST_NAMES or not all(isinstance(name, str) for name in value):
        raise keys.broken(key, f"should be a list of names, not {short(value)}")
    return tuple(value)


def _plain(pattern: str) -> str:
    """A regular expression for names without what stands around the name, "" where that is no plain name. Where the
    name ends there, as `mlp.gate$` does, a dot follows it. Patterns are not evaluated: they come from anybody, and one
    may take forever."""
    ends = "." if pattern.endswith("$") or not pattern.startswith("re:") else ""
    name = pattern.removeprefix("re:").removeprefix("^").removesuffix("$").removeprefix(".*").removesuffix(".*")
    name = name.replace("\\.", ".")
    return name + ends if name and all(c.isalnum() or c in "._" for c in name) else ""


def _known(names: Any) -> tuple[str, ...]:
    return tuple(name for name in names if name)
