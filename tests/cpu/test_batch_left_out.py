"""A file of answers that was begun by other predictors or levels stays: `penstock batch` does not mix them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import BadRequest
from penstock.serve.batch.nodes import Answerer, NodeWork
from penstock.serve.batch.what_is_left_out import what_is_left_out
from penstock.serve.loading import Loading
from penstock.spec.ask import Ask
from penstock.spec.profile import dumps, loads
from penstock.store.packed import open_packed
from penstock.store.predictors import model_sha256
from penstock.store.profile_file import FILE
from tests.cpu.commands import Call, machine_cache, refused
from tests.cpu.engines import make_model
from tests.cpu.test_batch import answers, requests, write
from tests.cpu.test_neurons import relu_model
from tests.cpu.test_predict import give_predictors


def goes_on_only_by_the_same(
    call: Call, folder: Path, sparsity: str, tmp_path: Path, change: Callable[[], None]
) -> None:
    out = tmp_path / "out"
    command = ("--model", folder, "--sparsity", sparsity, "--context", "64", "--max-tokens", "2", "--batch", "2")
    sent = requests(2)
    done = call("batch", write(tmp_path / "in", sent), out, *command)
    assert done.code == 0, done
    said = out.read_bytes()
    assert len(answers(out)) == 2
    out.write_bytes(said[: said.index(b"\n") + 1])  # as if it had been cut off
    assert call("batch", tmp_path / "in", out, *command).code == 0 and len(answers(out)) == 2
    change()
    out.write_bytes(said[: said.index(b"\n") + 1])
    refused(call("batch", tmp_path / "in", out, *command), "is no answer to a line of")
    assert out.read_bytes() == said[: said.index(b"\n") + 1]


def test_other_predictors(call: Call, tmp_path: Path) -> None:
    folder = relu_model(tmp_path, "opt", "float32-records")
    give_predictors(folder, -0.3)

    def change() -> None:
        give_predictors(folder, -0.3, seed=6)

    goes_on_only_by_the_same(call, folder, "predict", tmp_path, change)


def test_other_levels(call: Call, tmp_path: Path) -> None:
    folder, text = make_model(tmp_path, "llama", "float32"), tmp_path / "text.txt"
    text.write_text("Once upon a time there was a text. " * 10)
    found = call("profile", folder, text, "--below", "0.3")
    assert found.code == 0, found

    def change() -> None:
        kept = json.loads((folder / FILE).read_text())
        kept["levels"][0]["level"] *= 1.5
        other = loads(json.dumps(kept), "here")
        other.check(open_packed(folder).spec, "here")
        (folder / FILE).write_text(dumps(other))

    goes_on_only_by_the_same(call, folder, "threshold", tmp_path, change)


def test_neither_is_asked_where_all_is_computed(call: Call, tmp_path: Path) -> None:
    """Predictors may come and go then."""
    folder, out = relu_model(tmp_path, "opt", "float32-records"), tmp_path / "out"
    command = ("--model", folder, "--context", "64", "--max-tokens", "2", "--batch", "2")
    assert call("batch", write(tmp_path / "in", requests(2)), out, *command).code == 0
    said = out.read_bytes()
    give_predictors(folder, -0.3)
    assert call("batch", tmp_path / "in", out, *command).code == 0 and out.read_bytes() == said


def test_a_node_with_other_predictors_is_refused(tmp_path: Path) -> None:
    folder = relu_model(tmp_path, "opt", "float32-records")
    give_predictors(folder, -0.3)
    spec, ask = open_packed(folder).spec, Ask(prompt_tokens=4, output_tokens=2, context=64, sparsity="predict")
    here = NodeWork(
        str(folder), None, model_sha256(folder), what_is_left_out("predict", folder, spec, None), ask,
        Loading(cache=machine_cache(tmp_path / "cache")), ("m",), 2, 1,
    )  # fmt: skip
    assert here.left_out
    Answerer(here)._engine.close()
    give_predictors(folder, -0.3, seed=6)
    with pytest.raises(BadRequest, match="has other predictors or levels on this node"):
        Answerer(here)
