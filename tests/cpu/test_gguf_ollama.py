"""GGUF files as Ollama's own converter writes them: the packed bytes, and the model, of llama.cpp's converter."""

from __future__ import annotations

import json
import struct
from array import array
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the package gguf, which writes GGUF, is not installed")

from penstock.errors import BrokenModel, UnsupportedModel
from penstock.models.gguf import config_from_gguf
from penstock.store.gguf.files import open_gguf
from penstock.store.gguf.header import Strings
from penstock.store.gguf.tokenizer import text_files
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from tests.cpu import gguf_files, gguf_models
from tests.cpu.engines import load
from tests.cpu.first_runs import engine_of, opened
from tests.cpu.gguf_models import Kind
from tests.cpu.oracle import save
from tests.cpu.test_gguf_models import by_name, converted
from tests.cpu.test_gpt_oss import SHAPES

RENAMED = {"attn_output": "attn_out", "attn_sinks.weight": "attn_sinks", "post_attention_norm": "ffn_norm"}


def fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """With q, k and v in one tensor, and gate and up in another one, row by row in turns, as the first version has
    them. A tensor is an array, or one of blocks with its kind."""

    def joined(names: list[str], in_turns: bool) -> Any:
        given = [tensors.pop(name) for name in names]
        arrays = [each[0] if isinstance(each, tuple) else each for each in given]
        if in_turns:
            experts, rows = arrays[0].shape[:2]
            whole = np.stack(arrays, axis=2).reshape(experts, 2 * rows, *arrays[0].shape[2:])
        else:
            whole = np.concatenate(arrays)
        return (np.ascontiguousarray(whole), given[0][1]) if isinstance(given[0], tuple) else whole

    for layer in {name.split(".")[1] for name in tensors if name.startswith("blk.")}:
        for kind in ("weight", "bias"):
            qkv, halves = (f"blk.{layer}.attn_{each}.{kind}" for each in "qkv"), ("gate", "up")
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = joined(list(qkv), False)
            experts = [f"blk.{layer}.ffn_{half}_exps.{kind}" for half in halves]
            tensors[f"blk.{layer}.ffn_gate_up_exps.{kind}"] = joined(experts, True)
    return tensors


def as_ollama_has_it(file: Path, to: Path, mxfp4: int, first: bool = False) -> Path:
    """A gpt-oss file of llama.cpp's form in Ollama's. `mxfp4`: the number of that format. 4 is Ollama's own, in which
    codes beside each other are of neighbours. `first`: as its first version wrote it."""
    found, content = open_gguf(file), file.read_bytes()
    metadata = {
        key.replace("gpt-oss.", "gptoss."): value.texts() if isinstance(value, Strings) else
        value.tolist() if isinstance(value, array) else value
        for key, value in found.metadata.items() if not key.startswith("general.")
    }  # fmt: skip
    for key in ("rope.scaling.type", "expert_feed_forward_length"):
        del metadata[f"gptoss.{key}"]
    del metadata["tokenizer.ggml.pre"]
    tensors: dict[str, Any] = {}
    for name, tensor in found.tensors.items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        raw = np.frombuffer(content, np.uint8, tensor.nbytes, tensor.offset)
        if tensor.dtype == "Q8_0":
            tensors[name] = raw.reshape(*tensor.shape[:-1], -1), Kind.Q8_0
            continue
        if tensor.dtype != "MXFP4":
            tensors[name] = raw.view(np.float32).reshape(tensor.shape)
            continue
        blocks = raw.reshape(-1, 17).copy()
        if mxfp4 == 4:
            codes = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)
            blocks[:, 1:] = codes[:, ::2] | codes[:, 1::2] << 4
        tensors[name] = blocks.reshape(*tensor.shape[:-1], -1), Kind.MXFP4
    tensors = fused(tensors) if first else tensors
    gguf_files.write(to, "gptoss", metadata, tensors)
    written = bytearray(to.read_bytes())
    for name, value in tensors.items():
        if isinstance(value, tuple) and value[1] == Kind.MXFP4:
            at = written.index(gguf_files.string(name)) + 8 + len(name) + 4 + 8 * 3
            assert written[at : at + 4] == struct.pack("<I", 39)
            written[at : at + 4] = struct.pack("<I", mxfp4)
    return gguf_files.save(to, bytes(written))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("mxfp4", [39, 4])
def test_gpt_oss_packs_to_the_bytes_of_the_other_converter(mxfp4: int, first: bool, tmp_path: Path) -> None:
    save(SHAPES["wider"], tmp_path / "hf")

    def choose(name: str) -> Kind:
        return Kind.MXFP4 if "_exps.weight" in name else Kind.F32

    gguf_models.convert(tmp_path / "hf", tmp_path / "usual.gguf", choose)
    as_ollama_has_it(tmp_path / "usual.gguf", tmp_path / "theirs.gguf", mxfp4, first)
    usual, theirs = (open_packed(pack(tmp_path / f"{which}.gguf", tmp_path / which)) for which in ("usual", "theirs"))
    assert replace(usual.spec, tokenizer_bytes=0) == replace(theirs.spec, tokenizer_bytes=0)
    assert usual.sums == theirs.sums and usual.weights == theirs.weights
    cut = [json.loads((tmp_path / which / "tokenizer.json").read_text()) for which in ("usual", "theirs")]
    words = gguf_models.any_tokenizer(300) | {"tokenizer.ggml.pre": "gpt-4o"}
    named = text_files({key: _typed(value) for key, value in words.items()}, "a.gguf")["tokenizer.json"]
    assert cut[1]["pre_tokenizer"] == json.loads(named)["pre_tokenizer"] != cut[0]["pre_tokenizer"]


@pytest.mark.parametrize("kinds", ["float32", "quantised"])
def test_fused_gpt_oss_gives_the_logits_of_the_split_one_to_the_bit(kinds: str, tmp_path: Path) -> None:
    """Loaded from the file, and packed. With q, k and v in q8_0, and in floats experts too."""
    save(SHAPES["wider"], tmp_path / "hf")

    def choose(name: str) -> Kind:
        if kinds == "float32":
            return Kind.F32
        qkv = any(f".attn_{each}." in name for each in "qkv")
        return Kind.MXFP4 if "_exps.weight" in name else Kind.Q8_0 if qkv else Kind.F32

    gguf_models.convert(tmp_path / "hf", tmp_path / "usual.gguf", choose)
    as_ollama_has_it(tmp_path / "usual.gguf", tmp_path / "split.gguf", 39)
    as_ollama_has_it(tmp_path / "usual.gguf", tmp_path / "fused.gguf", 39, first=True)
    found = {}
    for which in ("split", "fused"):
        header = open_gguf(tmp_path / f"{which}.gguf")
        assert ("blk.0.attn_qkv.weight" in header.tensors) == (which == "fused")
        assert ("blk.0.ffn_gate_up_exps.weight" in header.tensors) == (which == "fused")
        with closing(engine_of(opened(tmp_path / f"{which}.gguf", tmp_path / which), score=True)) as engine:
            found[which] = engine.logits([1, 5, 9, 200, 7, 3])
            engine.write_copy()
        (copy,) = (tmp_path / which / "models").iterdir()
        with load(copy, score=True) as engine:
            np.testing.assert_array_equal(engine.logits([1, 5, 9, 200, 7, 3]), found[which])
    assert np.ptp(found["split"]) > 0
    np.testing.assert_array_equal(found["fused"], found["split"])


def test_a_fused_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    save(SHAPES["wider"], tmp_path / "hf")
    gguf_models.convert(tmp_path / "hf", tmp_path / "usual.gguf")
    as_ollama_has_it(tmp_path / "usual.gguf", tmp_path / "fused.gguf", 39, first=True)
    found, content = open_gguf(tmp_path / "fused.gguf"), (tmp_path / "fused.gguf").read_bytes()
    tensors = {
        name: np.frombuffer(content, np.float32, int(np.prod(t.shape)), t.offset).reshape(t.shape)
        for name, t in found.tensors.items()
    }
    tensors["blk.0.ffn_gate_up_exps.weight"] = tensors["blk.0.ffn_gate_up_exps.weight"][:, :-2]
    metadata = {
        key: value.texts() if isinstance(value, Strings) else value.tolist() if isinstance(value, array) else value
        for key, value in found.metadata.items() if not key.startswith("general.")
    }  # fmt: skip
    gguf_files.write(tmp_path / "cut.gguf", "gptoss", metadata, tensors)
    with pytest.raises(BrokenModel, match=r"ffn_gate_up_exps\.weight.* has shape"):
        pack(tmp_path / "cut.gguf", tmp_path / "cut")


def _typed(value: Any) -> Any:
    """A value as a header gives it."""
    if isinstance(value, list) and isinstance(value[0], str):
        return Strings(b"".join(gguf_files.string(text) for text in value), len(value), "here")
    return array("i", value) if isinstance(value, list) else value


def _gemma3(layers: int, **keys: Any) -> dict[str, Any]:
    own = {
        "block_count": layers, "context_length": 131072, "embedding_length": 2560, "attention.head_count": 8,
        "attention.head_count_kv": 4, "attention.key_length": 256, "attention.value_length": 256,
        "attention.sliding_window": 1024, "feed_forward_length": 10240, **keys,
    }  # fmt: skip
    metadata = {"general.architecture": "gemma3", **{f"gemma3.{key}": value for key, value in own.items()}}
    return config_from_gguf(metadata, {"token_embd.weight": (262144, 2560)}, {}, "a.gguf")


STRETCHED = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize("layers, scaling", [(26, None), (34, STRETCHED), (48, STRETCHED), (62, STRETCHED), (18, None)])
def test_gemma_3_has_the_ropes_that_its_files_leave_out(layers: int, scaling: dict[str, Any] | None) -> None:
    for keys in ({}, {"rope.global.freq_base": 1e6, "rope.local.freq_base": 1e4, "final_logit_softcapping": 30.0}):
        config = _gemma3(layers, **keys)
        assert config["rope_theta"] == 1e6 and config["rope_local_base_freq"] == 1e4
        assert config["rms_norm_eps"] == 1e-6 and config.get("rope_scaling") == scaling
        assert layers != 26 or config["final_logit_softcapping"] is None


def test_gemma_3_stretched_by_yarn_keeps_its_betas() -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 8192}
    betas = {"rope.scaling.beta_fast": 64.0, "rope.scaling.beta_slow": 2.0, "rope.scaling.extrapolation_factor": 1.0}
    scaling = _gemma3(34, **yarn, **betas)["rope_scaling"]
    assert (scaling["rope_type"], scaling["beta_fast"], scaling["beta_slow"]) == ("yarn", 64.0, 2.0)
    with pytest.raises(UnsupportedModel, match=r"extrapolation_factor.*0.5"):
        _gemma3(34, **yarn, **(betas | {"rope.scaling.extrapolation_factor": 0.5}))


def test_gemma_3_of_llama_cpp_is_as_it_says() -> None:
    said = {"rope.freq_base": 5e5, "attention.layer_norm_rms_epsilon": 1e-5, "final_logit_softcapping": 30.0}
    config = _gemma3(26, **said)
    assert config["rope_theta"] == 5e5 and config["rms_norm_eps"] == 1e-5 and "rope_scaling" not in config
    assert config["final_logit_softcapping"] == 30.0 and "rope_scaling" not in _gemma3(34, **said)


def test_gemma_3_with_other_keys_packs_to_the_same_bytes(tmp_path: Path) -> None:
    """And what pictures need is left out, with a warning."""
    usual = converted(tmp_path, "gemma3-text")
    found, content = open_gguf(usual), usual.read_bytes()
    other = {"gemma3.rope.freq_base": "gemma3.rope.global.freq_base",
             "gemma3.rope.freq_base_swa": "gemma3.rope.local.freq_base"}  # fmt: skip
    metadata = {
        other.get(key, key): value.texts() if isinstance(value, Strings) else
        value.tolist() if isinstance(value, array) else value
        for key, value in found.metadata.items() if not key.startswith("general.")
    }  # fmt: skip
    tensors = {
        name: np.frombuffer(content, np.float32, int(np.prod(t.shape)), t.offset).reshape(t.shape)
        for name, t in found.tensors.items()
    }
    tensors["v.blk.0.attn_k.weight"] = tensors["mm.mm_input_projection.weight"] = np.ones((4, 32), np.float32)
    gguf_files.write(tmp_path / "theirs.gguf", "gemma3", metadata, tensors)
    with pytest.warns(UserWarning, match="2 tensors are not used"):
        theirs = open_packed(pack(tmp_path / "theirs.gguf", tmp_path / "theirs"))
    packed = open_packed(pack(usual, tmp_path / "usual"))
    assert packed.spec == theirs.spec and packed.sums == theirs.sums
    assert by_name("gemma3-text").keys["rope_theta"] == packed.spec.layers[5].attention.rope.theta


def test_all_ids_that_end_an_answer_are_read() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": list("abcd"),
        "tokenizer.ggml.token_type": [1] * 4, "tokenizer.ggml.eos_token_ids": [3, 1, 99, -1],
    }  # fmt: skip
    typed = {key: _typed(value) for key, value in metadata.items()} | {"tokenizer.ggml.merges": Strings(b"", 0, "")}
    made = text_files({**typed, "tokenizer.ggml.eos_token_id": 2}, "a.gguf")
    assert json.loads(made["generation_config.json"])["eos_token_id"] == [1, 2, 3]
    with pytest.raises(BrokenModel, match="lists 5 ids of 4 tokens"):
        text_files({**typed, "tokenizer.ggml.eos_token_ids": array("i", [3] * 5)}, "a.gguf")
