"""A local server that speaks the Hub's endpoints, with a small model; huggingface_hub is the real one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from penstock.hubs.where import Where
from tests.cpu.checkpoints import random_tensors, save_tensors, save_tokenizer
from tests.cpu.hub.cases import CONFIG, INDEX, NOT_WANTED, Waits
from tests.cpu.hub.server import FakeHub, serving


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model in two shards, with what nobody needs beside it."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_tokenizer(folder, CONFIG)
    tensors = random_tensors(CONFIG)
    weight_map = {}
    for i, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), 1):
        shard = f"model-0000{i}-of-00002.safetensors"
        save_tensors(folder / shard, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for setting, value in {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_IMPLICIT_TOKEN": False}.items():
        monkeypatch.setattr(constants, setting, value)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving({"org/name": {**files, **NOT_WANTED}}) as server:
        yield server


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def where(hub: FakeHub, tmp_path: Path, waits: Waits) -> Where:
    return Where(endpoint=hub.endpoint, hub_cache=tmp_path / "hub", ollama=(), lm_studio=(), sleep=waits)


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bundled model in two formats, and in two files."""
    pytest.importorskip("gguf", reason="the package gguf, which writes GGUF, is not installed")
    from tests.cpu import gguf_models
    from tests.cpu.commands import ROOT

    tale, folder = ROOT / "penstock/assets/tale-llama", tmp_path_factory.mktemp("ggufs")
    words = gguf_models.tokenizer_metadata(tale, "gpt-2")
    for kind in (gguf_models.Kind.Q4_0, gguf_models.Kind.Q8_0):
        gguf_models.convert(tale, folder / f"tale-{kind.name}.gguf", lambda _, kind=kind: kind, words)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    home = {"HOME": str(tmp_path / "home"), "HF_HOME": str(tmp_path / "home/hf"), "HF_ENDPOINT": hub.endpoint}
    return {**os.environ, **home, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "OLLAMA_MODELS": ""}
