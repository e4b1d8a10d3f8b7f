"""`penstock profile` and `eval --against` of checkpoints that have no packed copy: they are read once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.serve import cached
from penstock.store import copies
from penstock.store.manifest import RECORD
from penstock.store.pack import pack
from penstock.store.packing import Packing
from penstock.store.profile_file import FILE
from penstock.store.verify import verify
from tests.cpu.checkpoints import save_checkpoint, save_tokenizer
from tests.cpu.commands import Call, Outcome, here, machine_cache, refused
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.test_batch_first_use import fails, never_packs

TEXT = "In the beginning there was a text, and the routers were asked about each of its letters. " * 8


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Each test has its own, without copies."""
    return machine_cache(tmp_path / "cache")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], cache: Path) -> Call:
    def run(name: str, *args: object) -> Outcome:
        return here(capsys, name, "--cache", cache, *args)

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def routed(tmp_path: Path) -> Path:
    """A checkpoint with experts."""
    return saved(tmp_path / "routed", "qwen2_moe")


def saved(folder: Path, name: str) -> Path:
    config = {**json.loads(TINY_CONFIGS[name]), "max_position_embeddings": 1024}
    save_checkpoint(folder, config, dtype="BF16")
    save_tokenizer(folder, config)
    return folder


def copies_in(cache: Path) -> list[Path]:
    return [*(cache / copies.MODELS).iterdir()] if (cache / copies.MODELS).exists() else []


def test_a_profile_lies_beside_the_copy(
    call: Call, cache: Path, routed: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_packs(monkeypatch)
    first = call("profile", routed, text, "--json")
    assert first.code == 0, first.err
    (copy,) = copies_in(cache)
    assert first.report["file"] == str(copy / FILE) and (copy / FILE).exists() and (copy / RECORD).exists()
    verify(copy)
    again = call("profile", routed, text, "--json")
    assert again.report == first.report and copies_in(cache) == [copy]


def test_a_profile_that_cannot_be_kept(
    call: Call, cache: Path, routed: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk has no room for the copy it is refused before the text is read, with both numbers."""
    monkeypatch.setattr(cached, "free_bytes", lambda _: 1000)
    monkeypatch.setattr("penstock.store.writer.free_bytes", lambda _: 1000)
    done = call("profile", routed, text, "--json")
    assert done.code == 2 and done.report["error"]["type"] == "StorageFailed", done.err
    monkeypatch.undo()
    monkeypatch.setattr(Packing, "write", fails)
    done = call("profile", routed, text, "--json")
    assert done.code != 0 and not copies_in(cache)


def test_a_packed_model_that_nothing_can_be_kept_beside(
    call: Call, tmp_path: Path, routed: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the text is read."""
    folders = [pack(routed, tmp_path / "packed"), pack(saved(tmp_path / "opt", "opt"), tmp_path / "relu")]
    monkeypatch.setattr("os.access", lambda path, _: Path(path) not in folders)
    monkeypatch.setattr("penstock.cli.profile.loaded", fails)
    monkeypatch.setattr("penstock.cli.train_predictors.loaded", fails)
    for command in (("profile", folders[0], text), ("train-predictors", folders[1], "--text", text)):
        found = refused(call(*command, "--json"), "cannot be written", "StorageFailed")
        assert str(command[1]) in found["message"]


def test_a_model_that_has_nothing_to_count_is_not_packed(call: Call, cache: Path, tmp_path: Path, text: Path) -> None:
    refused(call("profile", saved(tmp_path / "llama", "llama"), text, "--json"), "has no experts to count")
    assert not copies_in(cache)


def test_both_models_of_eval(
    call: Call, cache: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two formats, and one checkpoint twice, whose copy is written once."""
    checkpoint = saved(tmp_path / "llama", "llama")
    flags = (checkpoint, text, "--against", checkpoint, "--json")
    with monkeypatch.context() as patched:
        never_packs(patched)
        int8 = call("eval", *flags, "--weights", "int8")
        assert int8.code == 0 and int8.report["kl"] > 0, int8.err
        assert len(copies_in(cache)) == 2
        assert call("eval", *flags, "--weights", "int8").report == int8.report
        shutil.rmtree(cache / copies.MODELS)
        same = call("eval", *flags)
        assert same.code == 0 and abs(same.report["kl"]) < 1e-6 and len(copies_in(cache)) == 1, same.err
    for copy in copies_in(cache):
        verify(copy)
