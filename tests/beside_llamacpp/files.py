"""Writes the GGUF file of a case with random weights, and has llama.cpp's own quantiser make others of it."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray

from penstock.runtime import host
from tests.beside_llamacpp.draws import VOCABULARY, Case
from tests.cpu.gguf_files import write
from tests.cpu.gguf_models import any_tokenizer

Array = NDArray[Any]


def write_floats(case: Case, file: Path) -> None:
    """Matrices in float16, norms and biases in float32, as the converter writes them."""
    metadata: dict[str, Any] = {f"{case.shape.architecture}.{key}": value for key, value in case.keys.items()}
    metadata |= any_tokenizer(VOCABULARY)
    tensors = _tensors(case)
    if case.shuffled:
        rng = random.Random(case.number)
        metadata = dict(rng.sample(list(metadata.items()), len(metadata)))
        tensors = dict(rng.sample(list(tensors.items()), len(tensors)))
    write(file, case.shape.architecture, metadata, tensors)


def quantise(file: Path, to: Path, mix: str, pure: bool = False, overrides: tuple[tuple[str, str], ...] = ()) -> None:
    """`mix`: as llama.cpp's quantiser calls it, in small letters. Quantised tensors of `file` may be quantised again.

    Raises RuntimeError where it fails."""
    how = llama_cpp.llama_model_quantize_default_params()
    name = mix.upper() if mix == "all_f32" else f"MOSTLY_{mix.upper()}"
    how.ftype, how.pure, how.allow_requantize = getattr(llama_cpp, f"LLAMA_FTYPE_{name}"), pure, True
    how.nthread = host.usable_cpus()
    kind = llama_cpp.llama_model_tensor_override
    of_names = [kind(part.encode(), gguf.GGMLQuantizationType[what.upper()].value) for part, what in overrides]
    table = (kind * (len(of_names) + 1))(*of_names, kind(None, 0))  # an entry without a name ends it
    if overrides:
        how.tt_overrides = table
    if llama_cpp.llama_model_quantize(str(file).encode(), str(to).encode(), ctypes.byref(how)):
        raise RuntimeError(f"llama.cpp did not quantise {file.name} to {mix}")


def rewritten(file: Path, folder: Path, files: int, alignment: int) -> Path:
    """The model of `file` in so many files with tensors at such offsets; returns the first. Metadata stand in the first
    alone. llama.cpp's quantiser does not do it: it pads tensors to 32 bytes whatever alignment it says."""
    reader = gguf.GGUFReader(file)
    architecture = str(reader.fields["general.architecture"].contents())
    count = len(reader.tensors)
    names = [folder / f"split-{i + 1:05}-of-{files:05}.gguf" for i in range(files)]
    for nth, each in enumerate(names):
        writer = gguf.GGUFWriter(each, architecture)
        if nth == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key not in ("general.architecture", "general.alignment"):
                    kind = field.types[0]
                    sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                    writer.add_key_value(key, field.contents(), kind, sub)
        if alignment != 32:
            writer.add_custom_alignment(alignment)
        writer.add_uint16("split.no", nth)
        writer.add_uint16("split.count", files)
        writer.add_int32("split.tensors.count", count)
        for tensor in reader.tensors[count * nth // files : count * (nth + 1) // files]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names[0]


def _tensors(case: Case) -> dict[str, Any]:
    shape, rng = case.shape, np.random.default_rng(case.number)
    pool = rng.standard_normal(1 << 22, dtype=np.float32)

    def matrix(*dims: int, gain: float = 1.0) -> Array:
        """Outputs of a spread of `gain` for inputs of 1: numbers of a pool, begun at random places."""
        columns = dims[-1]
        rows = int(np.prod(dims[:-1]))
        begins = rng.integers(0, len(pool) - columns, rows)
        flat = np.empty((rows, columns), np.float16)
        scale = np.float32(gain / np.sqrt(columns))
        for row, begin in enumerate(begins):
            flat[row] = pool[begin : begin + columns] * scale
        return flat.reshape(dims)

    def norm(width: int, gain: float = 1.0) -> Array:
        return (gain * rng.uniform(0.6, 1.4, width)).astype(np.float32)

    found: dict[str, Any] = {"token_embd.weight": matrix(VOCABULARY, shape.hidden, gain=np.sqrt(shape.hidden))}
    if shape.architecture.startswith("gemma"):  # whose embeddings are scaled by the root of their width
        found["token_embd.weight"] = matrix(VOCABULARY, shape.hidden)
    found["output_norm.weight"] = norm(shape.hidden)
    if not case.tied:
        found["output.weight"] = matrix(VOCABULARY, shape.hidden)
    if case.rope == "divisors":
        found["rope_freqs.weight"] = _between(rng, shape.head_dim // 2, 8.0)
    if case.rope == "long and short":
        found["rope_factors_long.weight"] = _between(rng, shape.head_dim // 2, 30.0)
        found["rope_factors_short.weight"] = _between(rng, shape.head_dim // 2, 1.5)
    for i in range(case.layers):
        layer = _layer(case, matrix, norm)
        for part in case.biases:
            weight = layer[f"{part}.weight"]
            layer[f"{part}.bias"] = rng.normal(0, 0.3, weight.shape[:-1]).astype(np.float32)
        if case.fused:
            for kind in ("weight", "bias") if "attn_q.bias" in layer else ("weight",):
                layer[f"attn_qkv.{kind}"] = np.concatenate([layer.pop(f"attn_{which}.{kind}") for which in "qkv"])
        if shape.architecture == "gpt-oss":
            layer["attn_sinks.weight"] = rng.normal(0, 2, shape.heads).astype(np.float32)
        found |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
    return found


def _between(rng: np.random.Generator, count: int, most: float) -> Array:
    return np.sort(rng.uniform(1, most, count)).astype(np.float32)


def _layer(case: Case, matrix: Any, norm: Any) -> dict[str, Array]:
    """Queries and keys are such that scores spread by more than 1, so that a wrong position or window is seen."""
    shape, kind = case.shape, case.shape.architecture
    hidden, q_rows, kv_rows = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = {"attn_norm.weight": norm(hidden), "attn_output.weight": matrix(hidden, q_rows)}
    q, k, v = matrix(q_rows, hidden, gain=1.5), matrix(kv_rows, hidden, gain=1.5), matrix(kv_rows, hidden)
    if kind == "phi3":
        layer["attn_qkv.weight"] = np.concatenate([q, k, v])
    else:
        layer |= {"attn_q.weight": q, "attn_k.weight": k, "attn_v.weight": v}
    if kind in ("qwen3", "qwen3moe", "gemma3"):
        layer |= {f"attn_{which}_norm.weight": norm(shape.head_dim, 1.4) for which in "qk"}
    if kind != "gpt-oss":
        layer["ffn_norm.weight"] = norm(hidden)
    if kind == "gpt-oss" or kind.startswith("gemma"):
        layer["post_attention_norm.weight"] = norm(hidden)
    if kind.startswith("gemma"):
        layer["post_ffw_norm.weight"] = norm(hidden)
    if shape.experts:
        layer["ffn_gate_inp.weight"] = matrix(shape.experts, hidden, gain=2).astype(np.float32)
        for part in ("gate", "up"):
            layer[f"ffn_{part}_exps.weight"] = matrix(shape.experts, shape.neurons, hidden)
        layer["ffn_down_exps.weight"] = matrix(shape.experts, hidden, shape.neurons)
    elif kind == "phi3":
        layer |= {"ffn_up.weight": matrix(2 * shape.neurons, hidden), "ffn_down.weight": matrix(hidden, shape.neurons)}
    else:
        layer |= {f"ffn_{part}.weight": matrix(shape.neurons, hidden) for part in ("gate", "up")}
        layer["ffn_down.weight"] = matrix(hidden, shape.neurons)
    return layer
