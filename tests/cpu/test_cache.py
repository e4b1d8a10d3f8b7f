"""Copies in the cache: found by what the checkpoint holds, and never two of one content."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.serve import cached
from penstock.spec.format import Format
from penstock.store import copies, identity
from penstock.store.identity import Stamp
from penstock.store.own import own_format
from penstock.store.pack import pack
from tests.cpu.cached_copies import (
    CONFIG,
    changed,
    make_checkpoint,
    names,
    replace_file,
    resolved,
    weights,
)
from tests.cpu.checkpoints import random_tensors, save_tensors


def test_the_first_packing_says_what_it_writes_and_the_second_start_is_silent(checkpoint: Path, tmp_path: Path) -> None:
    folder, ears = resolved(checkpoint, tmp_path / "cache")
    assert len(ears.news) == 1 and ears.work == {"packing"}
    assert ears.news[0].startswith("writes ") and f" to {folder}, " in ears.news[0] and ears.news[0].endswith(" free")
    again, ears = resolved(checkpoint, tmp_path / "cache")
    assert (again, ears.news, ears.work) == (folder, [], set())
    assert names(tmp_path / "cache") == [folder.name] and folder.name.startswith("tiny-")


def test_a_touch_makes_no_second_copy(checkpoint: Path, tmp_path: Path) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    for file in checkpoint.iterdir():
        os.utime(file)
    again, ears = resolved(checkpoint, tmp_path / "cache")
    assert (again, ears.news, ears.work) == (folder, [], {"comparing"})
    again, ears = resolved(checkpoint, tmp_path / "cache")  # the stamps were renewed
    assert (again, ears.news, ears.work) == (folder, [], set())


def test_only_what_was_touched_is_compared(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    os.utime(checkpoint / "config.json")
    monkeypatch.setattr(identity, "_sums", lambda *_: pytest.fail("weights are as they were"))
    assert resolved(checkpoint, tmp_path / "cache")[0] == folder


def test_the_own_format_is_found_out_once(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the copy is known to have it the checkpoint's headers stay unread, whoever asked for the copy before."""
    asked: list[Path] = []

    def counted(src: Path) -> Format:
        asked.append(src)
        return own_format(src)

    monkeypatch.setattr(cached, "own_format", counted)
    folder, _ = resolved(checkpoint, tmp_path / "cache", own_format(checkpoint).name)
    assert not asked
    for times in (1, 1):
        assert resolved(checkpoint, tmp_path / "cache")[0] == folder and len(asked) == times
    assert resolved(checkpoint, tmp_path / "cache", own_format(checkpoint).name)[0] == folder
    assert resolved(checkpoint, tmp_path / "cache", "int8")[0] != folder
    assert resolved(checkpoint, tmp_path / "cache")[0] == folder and len(asked) == 1
    os.utime(checkpoint / "model.safetensors")
    for times in (2, 2):
        assert resolved(checkpoint, tmp_path / "cache")[0] == folder and len(asked) == times


def write_within(file: Path) -> None:
    """The same in place: the inode is the old one's too."""
    status = file.stat()
    save_tensors(file.with_name("new"), changed(random_tensors(CONFIG)))
    file.write_bytes(file.with_name("new").read_bytes())
    file.with_name("new").unlink()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_ino == status.st_ino and file.stat().st_mtime_ns == status.st_mtime_ns


@pytest.mark.parametrize("change", [replace_file, write_within])
def test_other_content_of_the_same_size_and_time_is_another_model(
    checkpoint: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    change(checkpoint / "model.safetensors")
    other, ears = resolved(checkpoint, tmp_path / "cache")
    assert other != folder and ears.work == {"comparing", "packing"}
    assert f"{folder.name} was packed from what {checkpoint} held before: `penstock prune` removes it" in ears.news
    pack(checkpoint, tmp_path / "fresh")
    assert weights(other) == weights(tmp_path / "fresh") != weights(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_another_small_file_is_another_model(checkpoint: Path, tmp_path: Path, name: str) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    (checkpoint / name).write_text((checkpoint / name).read_text() + "\n")
    other, _ = resolved(checkpoint, tmp_path / "cache")
    assert other != folder and (other / name).read_bytes() == (checkpoint / name).read_bytes()
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    third, _ = resolved(checkpoint, tmp_path / "cache")
    (checkpoint / "chat_template.jinja").unlink()
    assert third not in (folder, other) and resolved(checkpoint, tmp_path / "cache")[0] == other


def test_a_moved_folder_finds_its_copy_and_so_does_a_copied_one(checkpoint: Path, tmp_path: Path) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    checkpoint.rename(tmp_path / "moved")
    found, ears = resolved(tmp_path / "moved", tmp_path / "cache")
    assert (found, ears.work) == (folder, set())
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    found, ears = resolved(tmp_path / "copied", tmp_path / "cache")
    assert (found, ears.work) == (folder, {"comparing"})
    for known in ("moved", "copied"):  # both are known now
        assert resolved(tmp_path / known, tmp_path / "cache")[1].work == set()
    record = copies.read_record(folder)
    assert record is not None
    assert [Path(origin.path).name for origin in record.origins] == ["copied", "moved", "tiny"]


def test_a_checkpoint_in_other_shards_finds_its_copy(checkpoint: Path, tmp_path: Path) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    tensors = random_tensors(CONFIG)
    (checkpoint / "model.safetensors").unlink()
    halves = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file, inside in halves.items():
        save_tensors(checkpoint / file, {name: tensors[name] for name in inside})
    index = {"weight_map": {name: file for file, inside in halves.items() for name in inside}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolved(checkpoint, tmp_path / "cache")[0] == folder
    # An index that gives the same files' tensors other homes vouches for nothing.
    save_tensors(checkpoint / "b.safetensors", {name: changed(tensors)[name] for name in tensors})
    everything = {name: "b.safetensors" for name in tensors}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": everything}))
    assert resolved(checkpoint, tmp_path / "cache")[0] != folder


def test_formats_have_copies_of_their_own_and_the_checkpoints_own_is_one_of_them(tmp_path: Path) -> None:
    checkpoint, cache = make_checkpoint(tmp_path / "tiny", "BF16"), tmp_path / "cache"
    (checkpoint / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "float32"}))  # it misstates
    own, _ = resolved(checkpoint, cache)
    assert own.name.endswith("-bfloat16") and resolved(checkpoint, cache, "bfloat16")[0] == own
    wide, _ = resolved(checkpoint, cache, "float32")
    assert wide.name.endswith("-float32") and len(names(cache)) == 2


def test_a_hostile_name_makes_a_harmless_one(tmp_path: Path) -> None:
    folder, _ = resolved(make_checkpoint(tmp_path / "-a\nb\x1b[2J…"), tmp_path / "cache")
    assert folder.name.startswith("a_b_[2J…-")


@given(st.text())
def test_every_name_of_a_copy_is_a_plain_one(name: str) -> None:
    made = copies.copy_name(name, {"a": Stamp(1, 2, 3, 4)}, "int4-g32")
    assert made.isprintable() and "/" not in made and made[0] not in "-." and len(made.encode()) < 200
    assert copies.weights_in_name(made) == "int4-g32"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("recorded")
    record = copies.Record("int4", (copies.Origin("/x", {"a": Stamp(1, 2, 3, 4)}),))
    copies.write_record(folder, record)
    assert copies.read_record(folder) == record
    return folder, json.loads((folder / "source.json").read_text())


@given(st.sampled_from(["schema", "weights", "origins", "damaged", "other"]), json_values)
def test_a_record_that_somebody_edited_is_read_or_is_none(
    recorded: tuple[Path, dict[str, Any]], field: str, value: Any
) -> None:
    folder, right = recorded
    (folder / "source.json").write_text(json.dumps({**right, field: value}))
    found = copies.read_record(folder)
    assert found is None or isinstance(found.weights, str)
