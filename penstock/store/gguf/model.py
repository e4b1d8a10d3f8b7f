"""Reads of a model in GGUF what is beside its weights: the config.json that it stands for, and the small files."""

from __future__ import annotations

import os
from array import array
from typing import Any

from penstock.errors import BrokenModel
from penstock.models.gguf import ROPE_TABLES, config_from_gguf
from penstock.store.files import open_regular, reading
from penstock.store.gguf.files import Gguf
from penstock.store.gguf.header import Value
from penstock.store.gguf.tokenizer import text_files
from penstock.store.header import KINDS, TensorInfo, quoted

_MAX_LIST = 4096  # values of a list that a config may need: one for each layer
MAX_TABLE_BYTES = 1 << 16

# general.file_type: what llama.cpp's quantiser was asked for. It names the mixture of formats in a file.
_FILE_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 8: "q5_0", 9: "q5_1", 10: "q2_k", 11: "q3_k_s", 12: "q3_k_m",
    13: "q3_k_l", 14: "q4_k_s", 15: "q4_k_m", 16: "q5_k_s", 17: "q5_k_m", 18: "q6_k", 21: "q2_k_s", 25: "iq4_nl",
    30: "iq4_xs", 32: "bf16", 38: "mxfp4_moe",
}  # fmt: skip


def read_gguf_config(gguf: Gguf) -> dict[str, Any]:
    """The content of the config.json that a model in GGUF stands for. Its number format is that of matrices that are no
    blocks; where all are blocks it is float16, as their scales are. Raises as `config_from_gguf`, StorageFailed."""
    metadata = {key: plain for key, value in gguf.metadata.items() if (plain := _plain(value)) is not None}
    tables = {name: _table(gguf.tensors[name]) for name in ROPE_TABLES if name in gguf.tensors}
    shapes = {name: tensor.shape for name, tensor in gguf.tensors.items()}
    config = config_from_gguf(metadata, shapes, tables, str(gguf.file))
    floats = {tensor.dtype for tensor in gguf.tensors.values() if len(tensor.shape) > 1} & KINDS.keys()
    dtype = KINDS[floats.pop()] if len(floats) == 1 else "float32" if floats else "float16"
    return {**config, "torch_dtype": dtype}


def gguf_text_files(gguf: Gguf) -> dict[str, bytes]:
    """The files of the model's tokenizer, by name. Raises as `text_files`."""
    name = gguf.metadata.get("general.name")
    return text_files(gguf.metadata, str(gguf.file), name if isinstance(name, str) else "")


def mixture_label(gguf: Gguf) -> str:
    """What the mixture of formats in a file is called, "" where the file does not say."""
    file_type = gguf.metadata.get("general.file_type")
    return _FILE_TYPES.get(file_type, "") if isinstance(file_type, int) else ""


def _plain(value: Value) -> Any:
    """A value as JSON has it; None for what no config has."""
    if isinstance(value, array):
        return value.tolist() if len(value) <= _MAX_LIST else None
    return value if isinstance(value, bool | int | float | str) else None


def _table(tensor: TensorInfo) -> list[float]:
    """The numbers of a small tensor. Raises BrokenModel where it is not small, or not float32."""
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.nbytes > MAX_TABLE_BYTES:
        raise BrokenModel(
            f"{tensor.file}: tensor {quoted(tensor.name)} should be a list of up to {MAX_TABLE_BYTES // 4} numbers in"
            f" F32, not {tensor.dtype} {list(tensor.shape)}"
        )
    with reading(tensor.file), os.fdopen(open_regular(tensor.file), "rb", buffering=0) as stream:
        content = os.pread(stream.fileno(), tensor.nbytes, tensor.offset)
    if len(content) < tensor.nbytes:
        raise BrokenModel(f"{tensor.file} is truncated: tensor {quoted(tensor.name)} ends early")
    return array("f", content).tolist()
