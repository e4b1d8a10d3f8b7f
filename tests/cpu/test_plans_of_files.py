"""What a plan of a model's files says is what their run does; a command that will be refused is so before it packs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.serve.planning import describe
from penstock.spec.format import parse_format
from penstock.store.own import own_model
from tests.cpu import quantised
from tests.cpu.cached_copies import make_checkpoint, names
from tests.cpu.commands import Call, refused
from tests.cpu.engines import make_model
from tests.cpu.quantised import Quantise, awq, compressed, float8, packed
from tests.cpu.test_quantised import AWQ, FP8, INT4

WIDTHS = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
KINDS: dict[str, tuple[Quantise, dict[str, object]]] = {
    "awq": (awq(), AWQ),
    "float8": (float8(scalar=True), FP8 | {"activation_scheme": "static"}),
    "compressed": (packed(), compressed(INT4)),
}


def quantised_folder(tmp_path: Path, kind: str, **keys: object) -> Path:
    """A small llama that runs, quantised."""
    make_checkpoint(tmp_path / "floats", **WIDTHS, head_dim=32)
    quantised.write(tmp_path / "floats", tmp_path / kind, *KINDS[kind])
    config = tmp_path / kind / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))
    return tmp_path / kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_of_a_quantised_folder_runs(kind: str, tmp_path: Path, call: Call) -> None:
    """Also where config.json says another number format than the matrices have that were left."""
    folder, file = quantised_folder(tmp_path, kind, torch_dtype="bfloat16"), tmp_path / "plan"
    assert describe(folder)[0].dtype == "float32"
    made = call("plan", folder, "--resident", "50KB")
    assert made.code == 0, made
    file.write_text(made.out)
    done = call("run", folder, "abc", "--raw", "--max-tokens", "2", "--plan", file)
    assert done.code == 0 and done.report["output_tokens"] == 2, done


def test_a_plan_takes_the_format_of_the_files(tmp_path: Path, call: Call) -> None:
    folder, file = make_checkpoint(tmp_path / "model", dtype="F16"), tmp_path / "plan"
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"float16"', '"float32"'))
    assert describe(folder)[0].dtype == "float16" and describe(folder)[1].name == "float16"
    spec, fmt = describe(folder, parse_format("int8"))
    assert (spec, fmt) == own_model(folder, parse_format("int8")) and spec.dtype == "float16"
    for flags in ((), ("--weights", "int8")):
        file.write_text(call("plan", folder, *flags).out)
        assert call("run", folder, "abc", "--raw", "--max-tokens", "2", "--plan", file, *flags).code == 0
    (folder / "model.safetensors").write_bytes(b"no header")
    assert describe(folder)[0].dtype == "float32"  # a plan needs config.json alone


def test_a_plan_in_a_format_that_is_refused(tmp_path: Path, call: Call) -> None:
    folder = quantised_folder(tmp_path, "awq")
    for command in (("plan", folder), ("run", folder, "abc")):
        refused(call(*command, "--weights", "int8"), "go without --weights")


def test_what_will_be_refused_is_not_packed(tmp_path: Path, call: Call, model: Path) -> None:
    folder, text, file = make_checkpoint(tmp_path / "small"), tmp_path / "text", tmp_path / "plan"
    text.write_text("some words " * 40)
    file.write_text(call("plan", model).out)
    cache = tmp_path / "cache"
    here = "--cache", cache
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"rms_norm_eps": ', '"rms_norm_eps": 1')
    )
    for command in (("run", folder, "abc"), ("eval", folder, text), ("bench", folder)):
        refused(call(*command, "--plan", file, *here), "this plan cannot run")
    found = refused(call("run", folder, "abc", "--record", tmp_path / "record", *here), "has neither")
    assert str(folder) in found["message"] and names(cache) == []
    refused(call("run", folder, "abc", "--plan", file, "--kv", "int8", *here), "--plan says what --kv would")


def test_training_is_advised_to_no_model_without_a_relu(tmp_path: Path, call: Call) -> None:
    folder = make_model(tmp_path, "olmoe", "float32")
    refused(call("run", folder, "abc", "--sparsity", "predict"), "no neuron can be left out")


def test_a_folder_of_gguf_files_names_one(tmp_path: Path, call: Call) -> None:
    for name in ("model-00002-of-00002.gguf", "model-00001-of-00002.gguf", "a-mmproj.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    for command in (("run", tmp_path, "abc"), ("plan", tmp_path)):
        refused(call(*command), f"GGUF files: name one, such as {tmp_path / 'model-00001-of-00002.gguf'}")
