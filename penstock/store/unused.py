"""Looks for tensors of a checkpoint that the model would not use, and refuses those that contradict config.json.

Most unused tensors are harmless. Some show that config.json is of another model: with 4 layers of 5, or without the
biases that the weights were trained with, a model computes nonsense and nobody notices.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import BrokenModel
from penstock.models import says_experts, sources, switches
from penstock.models.hf.names import EXPERT, short_name
from penstock.spec.format import FLOAT32
from penstock.spec.model import ModelSpec
from penstock.spec.part_keys import head_key
from penstock.spec.parts import parts
from penstock.store.checkpoint import RAW_DTYPES, Checkpoint
from penstock.store.gguf.unused import unused_in_gguf
from penstock.store.header import TensorInfo, quoted
from penstock.store.quantize import widen
from penstock.store.sources import sources_in
from penstock.units import MIB

# Tables that follow from config.json, and a version number that OPT's first checkpoints have.
_HARMLESS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|decoder\.version)")
_COMPARED_BYTES = 8 * MIB  # of each of two matrices, at a time
_NAMED = 3  # unused tensors that a warning names


def check_unused(checkpoint: Checkpoint, config: dict[str, Any], spec: ModelSpec) -> None:
    """Refuses a checkpoint with unused weights that its config.json should make use of. Warns of other unused weights.

    These unused weights are refused:
    - weights inside a layer, and of layers and experts beyond the last;
    - biases of matrices and norms that are used;
    - weights that another value of a flag in config.json would make use of;
    - a head that differs from the embedding that it is tied to.

    Layers behind the last one that guess tokens ahead are only warned of. Raises BrokenModel, which names the tensor
    and the words of config.json; StorageFailed.
    """
    blocks, experts = sources_in(checkpoint, spec), {part.key: part.experts for part in parts(spec, FLOAT32)}
    used = {checkpoint.find(name).name for (key, _), source in blocks.items() for name in source.tensors(experts[key])}
    if checkpoint.gguf is not None:
        if unused_names := unused_in_gguf(checkpoint.tensors, used, spec):
            warnings.warn(_list(checkpoint.folder, unused_names), stacklevel=2)
        return
    unused = {name: t for name, t in checkpoint.tensors.items() if name not in used and not _HARMLESS.fullmatch(name)}
    for name in [name for name in unused if name.endswith(".bias")]:
        # AutoGPTQ's first versions gave every matrix a bias, of zeros where the model has none.
        if f"{name.removesuffix('bias')}weight" in checkpoint.pieces and _is_zero(checkpoint, unused[name]):
            del unused[name]
    if spec.tied:
        head = sources(replace(spec, tied=False))["head", "rows"].tensor
        embedding = checkpoint.find(blocks[head_key(spec), "rows"].tensor)
        for name in (head, short_name(head)):
            if name in unused and _equal(checkpoint, embedding, unused[name]):
                del unused[name]
    if not unused:
        return
    flags, weights = switches(config, str(checkpoint.folder)), {short_name(name) for name in used}
    layers, stems = _layers(spec), _stems(spec)
    ahead = config.get("num_nextn_predict_layers")  # layers behind the last one, which guess tokens ahead (GLM)
    guessing = ahead if isinstance(ahead, int) and not isinstance(ahead, bool) else 0
    for name, tensor in unused.items():
        named, short = f"{tensor.file}: tensor {quoted(name)}", short_name(name)
        layer, count = _layer(short, layers), len(spec.layers)
        if layer is not None and count <= layer < count + guessing:
            continue  # such a layer is only warned of
        if layer is not None and layer >= count:
            raise BrokenModel(
                f"{named} is of layer {layer}, counted from 0; config.json says num_hidden_layers {count}"
            )
        expert = _number(short, stems[layer]) if layer in stems else None
        if expert is not None and expert >= experts[f"{layer}.experts"]:
            raise BrokenModel(f"{named} is of expert {expert}, counted from 0; config.json {says_experts(config)}")
        if short in flags:
            raise BrokenModel(f"{named} would not be used: config.json {flags[short]}")
        if layer is not None or (short.endswith(".bias") and short.removesuffix("bias") + "weight" in weights):
            raise BrokenModel(f"{named} would not be used: by its config.json a {spec.model_type} model has none such")
    warnings.warn(_list(checkpoint.folder, unused), stacklevel=2)


def _layers(spec: ModelSpec) -> set[str]:
    """The prefixes of names of tensors inside layers, up to the layer's number: {"layers"}, in most models."""
    number = {part.key: part.layer for part in parts(spec, FLOAT32)}
    return {
        short_name(source.tensor).partition(f".{number[key]}.")[0]
        for (key, _), source in sources(spec).items()
        if number[key] >= 0
    }


def _layer(short: str, layers: Iterable[str]) -> int | None:
    """The number of the layer that a tensor lies in; None for one outside of the layers."""
    return next((number for prefix in layers if (number := _number(short, f"{prefix}.")) is not None), None)


def _stems(spec: ModelSpec) -> dict[int, str]:
    """For each layer with experts the prefix of the names of their tensors, up to the expert's number."""
    number = {part.key: part.layer for part in parts(spec, FLOAT32)}
    names = ((number[key], source.tensor) for (key, _), source in sources(spec).items())
    return {layer: short_name(name).partition(EXPERT)[0] for layer, name in names if EXPERT in name}


def _number(short: str, prefix: str) -> int | None:
    """The number behind the prefix of a name, which ends at a point; None where there is none."""
    number = short.removeprefix(prefix).partition(".")[0]
    return int(number[:9]) if short.startswith(prefix) and number.isascii() and number.isdigit() else None


def _equal(checkpoint: Checkpoint, one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two matrices hold the same numbers: transformers ties a head only if they do."""
    if one.shape != other.shape or not one.nbytes or not {one.dtype, other.dtype} <= RAW_DTYPES.keys():
        return False
    rows = one.shape[0]
    step = max(1, _COMPARED_BYTES * rows // one.nbytes)
    for lo in range(0, rows, step):
        a, b = (checkpoint.read(tensor.name, 0, lo, min(lo + step, rows)) for tensor in (one, other))
        same = a.tobytes() == b.tobytes() if one.dtype == other.dtype else np.array_equal(widen(a), widen(b))
        if not same:
            return False
    return True


def _is_zero(checkpoint: Checkpoint, tensor: TensorInfo) -> bool:
    """Whether all numbers of a vector are zeros."""
    if tensor.dtype not in RAW_DTYPES or len(tensor.shape) != 1:
        return False
    return not bool(widen(checkpoint.read(tensor.name, 0, 0, tensor.shape[0])).any())


def _list(folder: Path, unused: Iterable[str]) -> str:
    names = sorted(unused)
    shown = ", ".join(quoted(name) for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{folder}: {len(names)} tensor{'s are' if len(names) > 1 else ' is'} not used: {shown}{more}"
