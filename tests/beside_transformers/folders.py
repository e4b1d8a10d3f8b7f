"""Makes the folder of a case: transformers makes a model with random weights and saves it; the packers of tests
quantise some. Beside it lies, where it is quantised, one with the same numbers in float32."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM

from tests.beside_transformers.draws import VOCABULARY, Case
from tests.cpu import quantised
from tests.cpu.oracle import randomise
from tests.cpu.quantised import Quantise, compressed
from tests.cpu.test_gpt_oss import publish

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
_ROWS = {"num_bits": 8, "type": "int", "strategy": "channel"}
METHODS: dict[str, tuple[Quantise, dict[str, Any]]] = {
    "gptq": (quantised.gptq(group=128), _GPTQ),
    "gptq-act-order": (quantised.gptq(group=128, order="apart"), _GPTQ | {"desc_act": True}),
    "gptq-8": (quantised.gptq(bits=8, group=32), _GPTQ | {"bits": 8, "group_size": 32}),
    "awq": (quantised.awq(128), {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}),
    "fp8-blocks": (
        quantised.float8(128, 128, "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "fp8-rows": (quantised.float8(1), {"quant_method": "fbgemm_fp8"}),
    "packed": (quantised.packed(group=128), compressed(_INT4)),
    "packed-zeros": (quantised.packed(group=128, symmetric=False), compressed(_INT4 | {"symmetric": False})),
    "int8": (quantised.integers(), compressed(_ROWS, "int-quantized")),
}  # fmt: skip


def make(case: Case, folder: Path) -> tuple[Path, Path]:
    """(the case's folder, the one that transformers reads)."""
    plain = folder / "plain"
    _save(case, plain)
    if not case.quantised:
        return plain, plain
    to = folder / "quantised"
    if case.quantised == "mxfp4":
        publish(plain, to, np.random.default_rng(case.number))
        return to, plain
    method, config = METHODS[case.quantised]
    return to, quantised.write(plain, to, method, config)


def _save(case: Case, folder: Path) -> None:
    torch.manual_seed(case.number)
    kind = case.config["model_type"]
    keys = {key: value for key, value in case.config.items() if key not in ("model_type", "torch_dtype")}
    keys = deepcopy(keys)  # transformers writes into them
    config = AutoConfig.for_model(kind, **keys)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model, embedding_spread=0.6 if kind.startswith("gemma") else 2.0)
    dtype = getattr(torch, "float32" if case.quantised == "mxfp4" else case.dtype)
    how: dict[str, Any] = {"save_original_format": False} if case.stacked else {}
    model.to(dtype).save_pretrained(folder, **how)
    if case.files > 1:
        _split(folder, case.files, random.Random(case.number))
    if case.as_published:
        said = {**case.config, "torch_dtype": case.dtype, "architectures": [type(model).__name__]}
        (folder / "config.json").write_text(json.dumps(said))
    Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0")).save(
        str(folder / "tokenizer.json")
    )


def _split(folder: Path, files: int, rng: random.Random) -> None:
    """Tensors in so many files, in no order, as an index says; with odd names of files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = rng.sample(sorted(tensors), len(tensors))
    where = {name: f"model-{rng.randrange(files) + 1:05}-of-{files:05}.safetensors" for name in names}
    for file in set(where.values()):
        held = {name: tensors[name] for name in names if where[name] == file}
        save_file(held, folder / file, {"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
