"""Copies in the cache that are damaged: made again, or left to the user."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from penstock.errors import BadRequest, BrokenModel, DamagedModel
from penstock.serve.engine import Engine
from penstock.serve.failures import Failures
from penstock.serve.llm import LLM
from penstock.serve.loading import Loading
from penstock.serve.service import Service
from penstock.serve.source import resolve
from penstock.spec.ask import Ask
from penstock.store import copies
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from penstock.store.verify import verify
from tests.cpu.cached_copies import (
    Ears,
    held,
    names,
    opened,
    replace_file,
    resolved,
    weights,
)
from tests.cpu.checkpoints import folder_bytes
from tests.cpu.commands import MACHINE, here, machine_cache
from tests.cpu.engines import GREEDY, streaming


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def garble(file: Path) -> None:
    file.write_bytes(b"\xff" * file.stat().st_size)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage)
        for name in ("model-00001.safetensors", "penstock.json", "config.json", "source.json")
        for damage in (Path.unlink, truncate, garble)
    ],
)
def test_a_damaged_or_half_deleted_copy_is_packed_again(
    checkpoint: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    before = folder_bytes(folder)
    damage(folder / name)
    again, ears = resolved(checkpoint, tmp_path / "cache")
    assert again == folder and ears.news[0].startswith(f"packing {folder.name} again: ")
    after = folder_bytes(folder)
    assert before.keys() == after.keys() and weights(folder).items() <= before.items()
    verify(folder)
    assert names(tmp_path / "cache") == [folder.name]
    assert resolved(checkpoint, tmp_path / "cache")[1].news == []


def test_an_empty_folder_in_its_place_is_filled(checkpoint: Path, tmp_path: Path) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    for file in folder.iterdir():
        file.unlink()
    assert resolved(checkpoint, tmp_path / "cache")[0] == folder
    verify(folder)


@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_what_is_not_ours_is_not_replaced(checkpoint: Path, tmp_path: Path, what: str) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    shutil.rmtree(folder)
    if what == "file":
        folder.write_text("mine")
    elif what == "folder":
        folder.mkdir()
        (folder / "thesis.tex").write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadRequest, match="is in the way"):
        resolved(checkpoint, tmp_path / "cache")
    assert os.path.lexists(folder) and not (folder / "penstock.json").exists()


@pytest.mark.parametrize("pipe", ["model-00001.safetensors", "config.json", "penstock.json", "source.json"])
def test_a_pipe_by_the_name_of_a_file_of_ours_is_damage(checkpoint: Path, tmp_path: Path, pipe: str) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    (folder / pipe).unlink()
    os.mkfifo(folder / pipe)
    again, _ = resolved(checkpoint, tmp_path / "cache")
    assert again == folder and (folder / pipe).is_file()


def test_a_damaged_copy_with_strange_files_in_it_is_left_to_the_user(checkpoint: Path, tmp_path: Path) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    (folder / "thesis.tex").write_text("mine")
    truncate(folder / "tokenizer.json")
    with pytest.raises(BadRequest, match=r"it holds 'thesis.tex', which packing did not write; move it away"):
        resolved(checkpoint, tmp_path / "cache")
    assert (folder / "thesis.tex").read_text() == "mine"


def test_a_copy_that_was_moved_to_another_disk_is_used_through_a_link_and_not_removed(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    found, ears = resolved(checkpoint, tmp_path / "cache")
    assert (found, ears.news) == (folder, [])
    truncate(folder / "config.json")
    with pytest.raises(BadRequest, match=r"leads to .*elsewhere; move it away"):
        resolved(checkpoint, tmp_path / "cache")
    assert (tmp_path / "elsewhere" / "penstock.json").exists()


def flip(folder: Path, part: str) -> None:
    """One bit of a part's last granule."""
    packed = open_packed(folder)
    file, offset, nbytes = packed.locate(part, packed.parts[part].granules - 1, packed.parts[part].granules)
    with file.open("r+b") as stream:
        stream.seek(offset + nbytes // 2)
        old = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([old ^ 1]))


def test_damage_that_loading_finds_is_healed_and_loading_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    with opened(held(checkpoint, tmp_path / "cache")) as engine:
        right = engine.generate_ids([1, 2, 3], GREEDY)
    flip(folder, "1.ffn")
    ears = Ears()
    with opened(held(checkpoint, tmp_path / "cache", ears)) as engine:
        assert engine.generate_ids([1, 2, 3], GREEDY) == right
    assert len(ears.news) == 2 and ears.news[1].startswith("writes ")
    assert ears.news[0].startswith(f"packing {folder.name} again: {folder}/model-00001.safetensors: granule ")
    verify(folder)
    assert names(tmp_path / "cache") == [folder.name]


def test_damage_that_a_streamed_pass_finds_is_an_error_and_healed_at_the_next_start(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    flip(folder, "1.ffn")
    source = held(checkpoint, tmp_path / "cache")
    plan = streaming(open_packed(folder))
    engine = Engine.open(source, Ask(), Loading(machine=MACHINE, plan=plan))
    with closing(engine), pytest.raises(DamagedModel, match=r"granule 2 of .* fit; it is packed again") as caught:
        engine.generate_ids([1, 2, 3], GREEDY)
    assert caught.value.numbers["granule"] == 2
    again, ears = resolved(checkpoint, tmp_path / "cache")
    assert again == folder and "granule 2 of part 1.ffn" in ears.news[0] and ears.work == {"packing"}
    verify(folder)


def test_a_service_tells_once_that_its_model_must_be_loaded_again(checkpoint: Path, tmp_path: Path) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    flip(folder, "1.ffn")
    source, lines = held(checkpoint, tmp_path / "cache"), list[str]()
    engine = Engine.open(source, Ask(), Loading(machine=MACHINE, plan=streaming(open_packed(folder))))
    failures = Failures(lines.append)
    with closing(engine), closing(Service(engine, prompt_rows=5, queue=10, failures=failures)) as service:
        assert not failures.damaged
        for _ in range(2):
            with pytest.raises(DamagedModel, match="granule 2"):
                service.generate([[1, 2, 3]], [GREEDY])
    assert failures.damaged and len(lines) == 1 and "it is packed again when it is next loaded" in lines[0]
    failures = Failures(lines.append)
    for error in (DamagedModel("of a folder that the user named"), ValueError("what a prompt said")):
        failures.note(error, packs_again=False)
    assert not failures.damaged and lines[1:] == ["of a folder that the user named", "ValueError in a pass"]


def test_without_verify_a_changed_copy_is_taken_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    flip(folder, "1.ffn")
    (folder / "tokenizer_config.json").write_text("{}")
    copies.mark_damaged(folder, "seen by a pass")
    ears = Ears()
    source = resolve(str(checkpoint), weights=None, cache=tmp_path / "cache", verify=False, on_progress=ears)
    with closing(Engine.open(source, Ask(), Loading(machine=MACHINE, verify=False))):
        assert (source.folder, ears.news) == (folder, [])


def test_a_packed_model_that_the_user_named_is_never_replaced(checkpoint: Path, tmp_path: Path) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    for named in (folder, pack(checkpoint, tmp_path / "mine")):  # the copy too, where it is named by its path
        flip(named, "1.ffn")
        before = folder_bytes(named)
        with pytest.raises(DamagedModel, match="granule"):
            Engine.open(held(named, tmp_path / "cache"), Ask(), Loading(machine=MACHINE))
        assert folder_bytes(named) == before


@pytest.mark.parametrize("how", ["gone", "changed"])
def test_damage_where_the_checkpoint_is_not_what_it_was(checkpoint: Path, tmp_path: Path, how: str) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    flip(folder, "1.ffn")
    ears = Ears()
    source = held(checkpoint, tmp_path / "cache", ears)
    if how == "gone":
        checkpoint.rename(tmp_path / "elsewhere")
        with pytest.raises(BrokenModel, match=r"granule .*; it cannot be packed again: ") as caught:
            Engine.open(source, Ask(), Loading(machine=MACHINE))
        assert "\n" not in caught.value.message and folder.exists()
    else:
        replace_file(checkpoint / "model.safetensors")
        with opened(source) as engine:
            assert engine.packed.folder != folder
            assert weights(engine.packed.folder) == weights(pack(checkpoint, tmp_path / "fresh"))


def test_llm_heals_its_copy_and_says_so(checkpoint: Path, tmp_path: Path) -> None:
    cache = machine_cache(tmp_path / "cache")
    with LLM(checkpoint, cache=cache) as llm:
        right = llm.generate("abc", GREEDY)[0].token_ids
    folder = cache / "models" / names(cache)[0]
    flip(folder, "0.ffn")
    with pytest.warns(UserWarning, match="packing tiny-.* again: .* granule"):
        llm = LLM(checkpoint, cache=cache)
    with llm:
        assert llm.generate("abc", GREEDY)[0].token_ids == right


def test_run_heals_and_answers(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = machine_cache(tmp_path / "cache")
    args = ("run", checkpoint, "abc", "--cache", cache, "--max-tokens", 4, "--ignore-eos", "--json")
    right = here(capsys, *args)
    assert right.code == 0 and "penstock: writes " in right.err
    flip(cache / "models" / names(cache)[0], "0.ffn")
    healed = here(capsys, *args)
    assert healed.code == 0 and healed.report["token_ids"] == right.report["token_ids"]
    assert len([line for line in healed.err.splitlines() if " again: " in line]) == 1
