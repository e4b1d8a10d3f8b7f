"""GGUF files that are not known, damaged or incomplete are refused in one line, before anything is written."""

from __future__ import annotations

import json
import shutil
import tempfile
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("gguf", reason="the package gguf, which writes GGUF, is not installed")

from penstock.errors import BrokenModel, PenstockError, StorageFailed, UnsupportedModel
from penstock.models.gguf import config_from_gguf
from penstock.spec.format import FLOAT32
from penstock.spec.parts import parts
from penstock.store.checkpoint import Checkpoint
from penstock.store.copies import MODELS
from penstock.store.gguf.files import open_gguf
from penstock.store.gguf.header import Strings
from penstock.store.gguf.model import read_gguf_config
from penstock.store.pack import pack
from penstock.store.packed import open_packed, read_config
from penstock.store.packing import Packing
from penstock.store.sources import sources_in
from tests.cpu import gguf_files, gguf_models
from tests.cpu.commands import here, machine_cache
from tests.cpu.gguf_models import Kind
from tests.cpu.test_gguf_models import TALE, converted, tale


def test_it_may_have_any_name(tmp_path: Path) -> None:
    """Ollama calls a model's file by its hash."""
    file = tale(tmp_path).rename(tmp_path / "sha256-0123")
    assert open_packed(pack(file, tmp_path / "packed")).weights.name == "float16"


REFUSED: dict[str, tuple[dict[str, Any], type[PenstockError], str]] = {
    "another architecture": (
        {"general.architecture": "mamba"}, UnsupportedModel,
        "general.architecture 'mamba' is not one of llama, qwen2, qwen3, qwen3moe, gemma2, phi3",
    ),
    "no width": ({"llama.embedding_length": None}, BrokenModel, "llama.embedding_length is missing"),
    "a width of text": ({"llama.embedding_length": "80"}, BrokenModel, "should be a whole number"),
    "2^32-1 layers": ({"llama.block_count": 2**32 - 1}, BrokenModel, "llama.block_count should be from 1 to"),
    "fewer layers": ({"llama.block_count": 1}, BrokenModel, "of layer 1, counted from 0; block_count says 1"),
    "more layers": ({"llama.block_count": 3}, BrokenModel, "lacks the tensor 'blk.2.attn_q.weight'"),
    "other heads": ({"llama.attention.head_count": 2}, BrokenModel, "leads to"),
    "heads that differ": ({"llama.attention.head_count_kv": [2, 4]}, BrokenModel, "should be a whole number"),
    "values of another length": ({"llama.attention.value_length": 8}, UnsupportedModel, "differs from the keys' 20"),
    "a part of each head": ({"llama.rope.dimension_count": 10}, UnsupportedModel, "10 is a part of each head of 20"),
    "another rope": ({"llama.rope.scaling.type": "su"}, UnsupportedModel, "'su' is not one of none, linear, yarn"),
    "longrope without tables": (
        {"llama.rope.scaling.type": "longrope"}, UnsupportedModel, "is longrope, and the file has no rope_factors_long",
    ),
    "yarn beside a table": ({"llama.rope.scaling.type": "yarn"}, UnsupportedModel, "'yarn' beside a table"),
    "a factor on cos and sin": (
        {"llama.rope.scaling.attn_factor": 1.3}, UnsupportedModel, "is not supported but for longrope and yarn",
    ),
    "a rope of NaN": ({"llama.rope.freq_base": float("nan")}, BrokenModel, "should be a finite number"),
    "scaled logits": ({"llama.logit_scale": 0.5}, UnsupportedModel, "llama.logit_scale 0.5 is not supported"),
    "an encoder": ({"llama.attention.causal": False}, UnsupportedModel, "llama.attention.causal False"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, BrokenModel, "rms_epsilon is missing"),
    "a tokenizer of another kind": ({"tokenizer.ggml.model": "bert"}, UnsupportedModel, "'bert' is not one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    changes, kind, says = REFUSED[name]
    tables = {"rope_freqs.weight": np.ones(10, np.float32)} if "beside a table" in name else None
    file = rewritten(converted(tmp_path), tmp_path / "changed.gguf", changes, tables)
    with pytest.raises(kind) as raised:
        pack(file, tmp_path / "packed")
    assert says in raised.value.message and "\n" not in raised.value.message
    assert not (tmp_path / "packed").exists() and not (tmp_path / "packed.partial").exists()


def rewritten(file: Path, to: Path, changes: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    """A file of one format with other metadata, None for none, and other tensors."""
    found = open_gguf(file)
    metadata = {
        key: value.texts() if isinstance(value, Strings) else value.tolist() if isinstance(value, array) else value
        for key, value in found.metadata.items()
    }
    metadata = {key: value for key, value in {**metadata, **changes}.items() if value is not None}
    content = file.read_bytes()
    held = {
        name: np.frombuffer(content, np.float32, int(np.prod(t.shape)), t.offset).reshape(t.shape)
        for name, t in found.tensors.items()
    }
    own = {name: tensor for name, tensor in {**held, **(tensors or {})}.items() if tensor is not None}
    return gguf_files.write(to, metadata.pop("general.architecture"), metadata, own)


TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "one is missing": ({"blk.1.ffn_up.weight": None}, "lacks the tensor 'blk.1.ffn_up.weight'"),
    "the vocabulary is missing": ({"token_embd.weight": None}, "lacks the matrix token_embd.weight"),
    "one of another shape": ({"blk.1.ffn_up.weight": np.zeros((171, 80), np.float32)}, "leads to [172, 80]"),
    "one of NaN": ({"blk.1.ffn_up.weight": np.full((172, 80), np.nan, np.float32)}, "holds NaN"),
    "one that is not known": ({"blk.1.attn_sinks.weight": np.zeros(4, np.float32)}, "would not be used: a llama model"),
    "a table of frequencies that is too long": (
        {"rope_freqs.weight": np.ones(99, np.float32)}, "should be a list of 10 numbers",
    ),
    "a table of frequencies of zeros": ({"rope_freqs.weight": np.zeros(10, np.float32)}, "should be from"),
    "a table without its other one": (
        {"rope_factors_long.weight": np.ones(10, np.float32)}, "has one of rope_factors_long",
    ),
    "a table that is none": ({"rope_freqs.weight": np.zeros((2, 5), np.float32)}, "should be a list of up to"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_not_those_of_the_model(tmp_path: Path, name: str) -> None:
    tensors, says = TENSORS[name]
    file = rewritten(converted(tmp_path), tmp_path / "changed.gguf", {}, tensors)
    with pytest.raises(BrokenModel) as raised:
        pack(file, tmp_path / "packed")
    assert says in raised.value.message and "\n" not in raised.value.message
    assert not (tmp_path / "packed").exists()


def test_a_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    """As llama.cpp takes it."""
    file = rewritten(converted(tmp_path), tmp_path / "changed.gguf", {"llama.rope.scaling.factor": 4.0})
    assert read_gguf_config(open_gguf(file))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_a_factor_of_0_is_none(tmp_path: Path) -> None:
    file = rewritten(converted(tmp_path), tmp_path / "changed.gguf", {"llama.rope.scaling.factor": 0.0})
    assert "rope_scaling" not in read_gguf_config(open_gguf(file))


def test_a_factor_stretches_a_table_too(tmp_path: Path) -> None:
    """llama.cpp divides positions by the one and frequencies by the other."""
    table, factor = {"rope_freqs.weight": np.arange(1, 11, dtype=np.float32)}, {"llama.rope.scaling.factor": 4.0}
    file = rewritten(converted(tmp_path), tmp_path / "changed.gguf", factor, table)
    scaling = read_gguf_config(open_gguf(file))["rope_scaling"]
    assert scaling["short_factor"] == scaling["long_factor"] == [4.0 * i for i in range(1, 11)]


def test_yarn_may_have_no_factor_and_one_on_cos_and_sin(tmp_path: Path) -> None:
    """llama.cpp takes 1 for the one, and multiplies yarn's own by the other."""
    file, yarn = converted(tmp_path), {"llama.rope.scaling.type": "yarn"}
    bare = read_gguf_config(open_gguf(rewritten(file, tmp_path / "bare.gguf", yarn)))
    assert bare["rope_scaling"] == {"rope_type": "yarn", "factor": 1.0}
    more = yarn | {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.attn_factor": 1.5}
    scaling = read_gguf_config(open_gguf(rewritten(file, tmp_path / "more.gguf", more)))["rope_scaling"]
    assert scaling["factor"] == 4.0 and scaling["attention_factor"] == pytest.approx(1.5 * (1 + 0.1 * np.log(4)))


@pytest.mark.parametrize("variant", ["llama-mqa-biases", "qwen2", "qwen3-biases"])
def test_q_k_and_v_may_stand_in_one_tensor(tmp_path: Path, variant: str) -> None:
    """llama.cpp's converter writes them so on request. The packed bytes are those of three tensors."""
    file = converted(tmp_path, variant)
    held, content = open_gguf(file).tensors, file.read_bytes()

    def numbers(name: str) -> np.ndarray[Any, Any]:
        tensor = held[name]
        return np.frombuffer(content, np.float32, int(np.prod(tensor.shape)), tensor.offset).reshape(tensor.shape)

    changed: dict[str, Any] = {}
    for name in [name for name in held if ".attn_q." in name]:
        three = [name.replace("attn_q", f"attn_{which}") for which in "qkv"]
        changed[name.replace("attn_q", "attn_qkv")] = np.concatenate([numbers(each) for each in three])
        changed |= dict.fromkeys(three)
    other = rewritten(file, tmp_path / "other.gguf", {}, changed)
    packed = [open_packed(pack(each, tmp_path / each.stem)).sums for each in (file, other)]
    assert packed[0] == packed[1]


def test_a_llama_may_have_biases_of_q_k_and_v_alone(tmp_path: Path) -> None:
    """As Qwen's first models have, where they are published as llamas."""
    sizes = {name: t.shape[0] for name, t in open_gguf(converted(tmp_path)).tensors.items()}
    biases = {
        name.replace("weight", "bias"): np.ones(rows, np.float32)
        for name, rows in sizes.items() if name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight"))
    }  # fmt: skip
    file = rewritten(tmp_path / "model.gguf", tmp_path / "changed.gguf", {}, biases)
    assert {"q_bias", "k_bias", "v_bias"} <= {
        b.name for b in open_packed(pack(file, tmp_path / "packed")).parts["0.attn"].blocks
    }


def test_a_norm_in_blocks_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    found = open_gguf(converted(tmp_path))
    tensors = {name: replace(t, dtype="Q8_0") if "attn_norm" in name else t for name, t in found.tensors.items()}
    _, spec = read_config(found.file)
    with Checkpoint.open(found.file) as checkpoint:
        checkpoint.tensors = tensors
        packing = Packing(checkpoint, tuple(parts(spec, FLOAT32)), sources_in(checkpoint, spec), FLOAT32, {}, {})
        with pytest.raises(UnsupportedModel, match="holds Q8_0; penstock reads norms, biases and routers in F32"):
            packing.check_shapes("")


def test_no_room_for_small_files_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = converted(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(StorageFailed, match="cannot write"):
        pack(file, tmp_path / "packed", check=lambda folder: None)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return converted(tmp_path_factory.mktemp("small")).read_bytes()


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_a_changed_file_is_packed_or_refused(small_model: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of the header, and numbers of 4 and 8 bytes in it."""
    folder, whole = tmp_path, bytearray(small_model)
    shutil.rmtree(folder / "packed", ignore_errors=True)
    header_bytes = whole.index(b"output_norm.weight") + 2000
    for _ in range(data.draw(st.integers(1, 3))):
        at, width = data.draw(st.integers(0, header_bytes)), data.draw(st.sampled_from([1, 4, 8]))
        number = data.draw(st.sampled_from([0, 1, 2, 8, 9, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
        whole[at : at + width] = number.to_bytes(8, "little")[:width]
    file = gguf_files.save(folder / "changed.gguf", bytes(whole))
    try:
        pack(file, folder / "packed")
    except PenstockError as error:
        assert "\n" not in error.message and not (folder / "packed").exists()


def test_tensors_outside_of_layers_are_warned_of(tmp_path: Path) -> None:
    file = rewritten(converted(tmp_path), tmp_path / "changed.gguf", {}, {"extra.weight": np.zeros(4, np.float32)})
    with pytest.warns(UserWarning, match="1 tensor is not used: 'extra.weight'"):
        pack(file, tmp_path / "packed")


def test_a_vocabulary_alone_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not gguf_files.SEEN.is_dir():
        pytest.skip(f"{gguf_files.SEEN} is not on this machine")
    ran = here(capsys, "run", gguf_files.SEEN / "ggml-vocab-llama-spm.gguf", "Hi", "--json", "--cache", tmp_path)
    assert ran.code == 2 and "it holds a vocabulary alone, or no model" in ran.report["error"]["message"]


def test_text_files_are_tried_before_packing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong with them is said of the file, and nothing is packed."""
    words = gguf_models.tokenizer_metadata(TALE, "gpt-2")
    bare, bad = {"tokenizer.ggml.model": "none"}, {"tokenizer.chat_template": "{% if %}"}
    gguf_models.convert(TALE, tmp_path / "bare.gguf", lambda _: Kind.F16, words | bare)
    gguf_models.convert(TALE, tmp_path / "bad.gguf", lambda _: Kind.F16, words | bad)
    cache = machine_cache(tmp_path / "cache")
    ran = here(capsys, "run", tmp_path / "bare.gguf", "hi", "--json", "--cache", cache)
    said = ran.report["error"]["message"]
    assert ran.code == 2 and said.startswith(f"{tmp_path / 'bare.gguf'} has no tokenizer.json")
    assert not list((cache / MODELS).glob("*"))
    packed = here(capsys, "pack", tmp_path / "bad.gguf", tmp_path / "packed", "--json")
    said = packed.report["error"]["message"]
    assert packed.code == 2 and "chat template 'default' cannot be parsed" in said
    assert not (tmp_path / "packed").exists()


def test_gemma_of_46_layers_scales_queries_by_its_width() -> None:
    """The largest Gemma 2: a head has 128, and hidden_size / heads is 144."""
    metadata = {
        "general.architecture": "gemma2", "gemma2.block_count": 46, "gemma2.embedding_length": 4608,
        "gemma2.attention.head_count": 32, "gemma2.attention.key_length": 128, "gemma2.context_length": 8192,
        "gemma2.attention.layer_norm_rms_epsilon": 1e-6, "gemma2.feed_forward_length": 36864,
    }  # fmt: skip
    config = config_from_gguf(metadata, {"token_embd.weight": (256000, 4608)}, {}, "a.gguf")
    assert config["query_pre_attn_scalar"] == 144
    assert config_from_gguf({**metadata, "gemma2.block_count": 42}, {"token_embd.weight": (9, 4608)}, {}, "")[
        "query_pre_attn_scalar"
    ] == 128  # fmt: skip


@pytest.mark.parametrize("window, expected", [(None, None), (0, None), (2047, 2047), (4096, None)])
def test_phi_4_says_that_its_window_is_0(window: int | None, expected: int | None) -> None:
    metadata = {
        "general.architecture": "phi3", "phi3.block_count": 40, "phi3.embedding_length": 5120,
        "phi3.attention.head_count": 40, "phi3.attention.head_count_kv": 10, "phi3.context_length": 4096,
        "phi3.attention.layer_norm_rms_epsilon": 1e-5, "phi3.feed_forward_length": 17920,
    }  # fmt: skip
    metadata |= {} if window is None else {"phi3.attention.sliding_window": window}
    config = config_from_gguf(metadata, {"token_embd.weight": (100352, 5120)}, {}, "a.gguf")
    assert config["sliding_window"] == expected


def test_the_config_is_json(tmp_path: Path) -> None:
    config = read_gguf_config(open_gguf(converted(tmp_path, "phi3-longrope-long")))
    assert json.loads(json.dumps(config)) == config and config["torch_dtype"] == "float32"
