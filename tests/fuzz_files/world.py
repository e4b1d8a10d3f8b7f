"""The honest files that a case's one strange file lies among: a checkpoint of 6 KB, the same packed, and a machine.

A case sees a folder of its own:

    model/            the checkpoint or the packed model that the command names
    in/               other files that flags name: plans, machines, texts
    cwd/              where the user stands, with modules that nobody may import
    home/             $HOME; only home/.cache/penstock may change
    out/              what the command was told to write
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.runtime.probe import machine_file
from tests.cpu.checkpoints import random_tensors, save_tensors, stacked_tensors
from tests.fuzz_files.corpus import SEEDS, Seed

Files = dict[str, bytes]

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 12,
    "vocab_size": 264,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
# A checkpoint with experts, in a layer behind a dense one.
MOE: dict[str, Any] = {
    **CONFIG,
    "model_type": "qwen2_moe",
    "num_hidden_layers": 2,
    "mlp_only_layers": [0],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 4,
}
# A checkpoint whose neurons fire or do not, with a granule of them that is not full.
RELU: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "ffn_dim": 70,
    "vocab_size": 264,
    "max_position_embeddings": 512,
    "activation_function": "relu",
    "torch_dtype": "bfloat16",
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Whoever imports one of them leaves a file behind, and a changed folder is a finding.
TRAPS = ("json.py", "numpy.py", "site.py", "tokenizers.py", "penstock/__init__.py")
_TRAP = b"open(__file__ + '.was-imported', 'w').close()\nraise ImportError('from where the user stands')\n"
# What a probe of this machine would have found.
MACHINE = SEEDS / "machine" / "good-two-cores.json"
# Files keep this time, so that what notes it (a packing's state) stays the same from case to case.
TIME_NS = 1_700_000_000 * 10**9


@dataclass(frozen=True)
class Place:
    """The folders of a case."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def given(self) -> Path:
        return self.root / "in"

    @property
    def cwd(self) -> Path:
        return self.root / "cwd"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def cache(self) -> Path:
        return self.home / ".cache" / "penstock"

    @property
    def out(self) -> Path:
        return self.root / "out"

    def clear(self) -> None:
        """Empty folders, the traps, and a cache that knows the machine."""
        for entry in os.scandir(self.root):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        for folder in (self.model, self.given, self.cwd, self.home, self.out):
            folder.mkdir()
        for name in TRAPS:
            put(self.cwd / name, _TRAP)
        put(machine_file(self.cache), MACHINE.read_bytes())


def put(file: Path, content: bytes) -> Path:
    """A file of the time that all have."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    os.utime(file, ns=(TIME_NS, TIME_NS))
    return file


def put_all(folder: Path, files: Files) -> None:
    for name, content in files.items():
        put(folder / name, content)


class World:
    """Made once, in `folder`. `run` calls the command line in a child and returns its exit code: whatever starts
    threads must not be called in the process that goes on forking."""

    def __init__(self, folder: Path, run: Callable[[list[str]], int]) -> None:
        self._folder, self._run = folder, run
        self._checkpoints: dict[str, Files] = {}

    @cached_property
    def tokenizer(self) -> Files:
        """A byte tokenizer's files, with a chat template."""
        from penstock.models import spec_from_config
        from penstock.store.synth import byte_tokenizer

        found = dict(byte_tokenizer(spec_from_config(CONFIG, "CONFIG")))
        config = {**json.loads(found["tokenizer_config.json"]), "chat_template": TEMPLATE}
        return {**found, "tokenizer_config.json": json.dumps(config).encode()}

    def checkpoint(self, config: bytes | None = None, stacked: bool = False) -> Files:
        """`config`: with weights of the shapes that it leads to. `stacked`: all experts of a layer in one tensor."""
        text = json.dumps(CONFIG).encode() if config is None else config
        return {"config.json": text, "model.safetensors": self.shard(json.loads(text), stacked), **self.tokenizer}

    def shard(self, config: dict[str, Any] = CONFIG, stacked: bool = False) -> bytes:
        """model.safetensors with random weights of the shapes that a config leads to."""
        names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
        file = self._folder / "shard"
        tensors = random_tensors(config, names[config.get("torch_dtype", "float32")])
        save_tensors(file, stacked_tensors(config, tensors) if stacked else tensors)
        return file.read_bytes()

    @cached_property
    def base(self) -> Files:
        return self.checkpoint()

    @cached_property
    def experts(self) -> Files:
        """The checkpoint with experts."""
        return self.checkpoint(json.dumps(MOE).encode())

    @cached_property
    def packed(self) -> Files:
        """The checkpoint packed in int4, which has every kind of block."""
        return self.packed_from(self.base)

    @cached_property
    def packed_experts(self) -> Files:
        """The checkpoint with experts, packed in int4."""
        return self.packed_from(self.experts)

    @cached_property
    def packed_neurons(self) -> Files:
        """The checkpoint whose neurons fire or do not, packed in int4 neuron by neuron."""
        return self.packed_from(self.checkpoint(json.dumps(RELU).encode()), "int4-neurons")

    def packed_of(self, seed: Seed) -> Files:
        """The packed model that a seed's name says."""
        name = seed.path.name
        if "neurons" in name:
            return self.packed_neurons
        return self.packed_experts if "experts" in name else self.packed

    def packed_from(self, files: Files, weights: str = "int4") -> Files:
        source, target = self._folder / "source", self._folder / "packed"
        for folder in (source, target):
            shutil.rmtree(folder, ignore_errors=True)
        put_all(source, files)
        code = self._run(["pack", str(source), str(target), "--weights", weights])
        assert code == 0, f"packing the honest checkpoint ended with {code}"
        return {str(file.relative_to(target)): file.read_bytes() for file in target.rglob("*") if file.is_file()}

    def checkpoint_of(self, seed: Seed) -> Files:
        """The checkpoint of a seed that is a model's config as it should be."""
        if seed.name not in self._checkpoints:
            self._checkpoints[seed.name] = self.checkpoint(seed.content, "stacked" in seed.path.name)
        return self._checkpoints[seed.name]

    @cached_property
    def sharded(self) -> Files:
        """The checkpoint in two shards, without their index."""
        files = {name: content for name, content in self.base.items() if name != "model.safetensors"}
        tensors = list(random_tensors(CONFIG, "BF16").items())
        for i, share in enumerate((tensors[:4], tensors[4:])):
            save_tensors(self._folder / "shard", dict(share))
            files[f"model-{i + 1:05d}-of-00002.safetensors"] = (self._folder / "shard").read_bytes()
        return files
