"""Copies in the cache: found by what the checkpoint holds, healed, waited for, and never two of one content."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, BrokenModel, DamagedModel
from penstock.models import spec_from_config
from penstock.serve.engine import Engine
from penstock.serve.llm import LLM
from penstock.serve.loading import Loading
from penstock.serve.source import Source, resolve
from penstock.spec.ask import Ask
from penstock.store import copies, identity
from penstock.store.identity import Stamp
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from penstock.store.synth import byte_tokenizer
from penstock.store.verify import verify
from tests.cpu.checkpoints import folder_bytes, random_tensors, save_checkpoint, save_tensors
from tests.cpu.commands import MACHINE, here, machine_cache, start
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.engines import GREEDY, streaming

CONFIG: dict[str, Any] = json.loads(TINY_CONFIGS["llama"])
SMALL_SHARDS = 100_000  # the model becomes 5 shards


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "tiny")


def make_checkpoint(folder: Path, dtype: str = "F32") -> Path:
    save_checkpoint(folder, CONFIG, dtype=dtype)
    for name, content in byte_tokenizer(spec_from_config(CONFIG, "test")).items():
        (folder / name).write_bytes(content)
    return folder


class Ears:
    """Hears what is told: news, and the kinds of progress."""

    def __init__(self) -> None:
        self.news: list[str] = []
        self.work: set[str] = set()

    def __call__(self, what: str, done: int, total: int) -> None:
        if total:
            self.work.add(what.split()[0])
        else:
            self.news.append(what)


def resolved(checkpoint: Path, cache: Path, weights: str | None = None) -> tuple[Path, Ears]:
    """The copy's folder, not held any more, and what was said meanwhile."""
    ears = Ears()
    source = resolve(str(checkpoint), weights=weights, cache=cache, on_progress=ears)
    source.close()
    return source.folder, ears


def names(cache: Path) -> list[str]:
    return sorted(os.listdir(cache / "models"))


# --- found again -----------------------------------------------------------------------------------------------


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


def changed(tensors: dict[str, Any]) -> dict[str, Any]:
    """One number of one matrix."""
    name = "model.layers.1.mlp.down_proj.weight"
    other = tensors[name].copy()
    other[-1, -1] += 1
    return {**tensors, name: other}


def replace_file(file: Path) -> None:
    """Other content of the same size and time in a file of its own."""
    status = file.stat()
    save_tensors(file.with_name("new"), changed(random_tensors(CONFIG)))
    os.utime(file.with_name("new"), ns=(status.st_atime_ns, status.st_mtime_ns))
    file.with_name("new").rename(file)
    assert file.stat().st_size == status.st_size and file.stat().st_mtime_ns == status.st_mtime_ns


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


def weights(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in folder_bytes(folder).items() if name.startswith("model-")}


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


# --- healed ----------------------------------------------------------------------------------------------------


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


@contextmanager
def opened(source: Source, **ask: Any) -> Iterator[Engine]:
    engine = Engine.open(source, Ask(**ask), Loading(machine=MACHINE))
    try:
        yield engine
    finally:
        engine.close()


def held(checkpoint: Path, cache: Path, ears: Ears | None = None) -> Source:
    return resolve(str(checkpoint), weights=None, cache=cache, on_progress=ears or Ears())


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
    with closing(engine), pytest.raises(DamagedModel, match=r"granule 2 of .* fit; the next start packs it") as caught:
        engine.generate_ids([1, 2, 3], GREEDY)
    assert caught.value.numbers["granule"] == 2
    again, ears = resolved(checkpoint, tmp_path / "cache")
    assert again == folder and "granule 2 of part 1.ffn" in ears.news[0] and ears.work == {"packing"}
    verify(folder)


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


# --- several processes -----------------------------------------------------------------------------------------

# Resolves and prints the news and the folder. Stands still once `stop` bytes are packed, until a line comes in.
CHILD = """
    import functools, sys
    from pathlib import Path
    from penstock.serve import cached
    from penstock.serve.source import resolve
    cached.pack = functools.partial(cached.pack, shard_bytes={shard_bytes})
    checkpoint, cache, stop = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    def tell(what, done, total):
        global stop
        if not total:
            print(what, flush=True)
        elif what.startswith("packing"):
            if not stop:
                print("packed before", done, flush=True)
                stop = 1 << 60
            elif done >= stop:
                stop = 1 << 60
                print("stopped", flush=True)
                sys.stdin.readline()
    print(resolve(checkpoint, weights=None, cache=cache, on_progress=tell).folder, flush=True)
"""


@contextmanager
def resolving(checkpoint: Path, cache: Path, stop: int) -> Iterator[subprocess.Popen[str]]:
    code = textwrap.dedent(CHILD).format(shard_bytes=SMALL_SHARDS)
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(checkpoint), str(cache), str(stop)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().rstrip("\n")


def until_stopped(child: subprocess.Popen[str]) -> None:
    assert line(child).startswith("writes ")
    assert line(child) == "stopped"


def test_a_packing_that_was_killed_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    with resolving(checkpoint, tmp_path / "cache", 300_000) as child:
        until_stopped(child)
        child.kill()
    assert names(tmp_path / "cache")[0].endswith(".partial")
    with resolving(checkpoint, tmp_path / "cache", 0) as child:
        assert line(child).startswith("writes ")
        assert int(line(child).removeprefix("packed before ")) > 200_000
        folder = Path(line(child))
    verify(folder)
    assert names(tmp_path / "cache") == [folder.name]


def test_of_two_first_runs_the_second_waits_and_uses_what_the_first_made(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with resolving(checkpoint, cache, 300_000) as first, ExitStack() as stack:
        until_stopped(first)
        second = stack.enter_context(resolving(checkpoint, cache, 0))
        assert line(second).startswith("another process is packing tiny-")
        first.stdin.write("\n")  # type: ignore[union-attr]
        first.stdin.flush()  # type: ignore[union-attr]
        folder = Path(line(first))
        assert Path(line(second)) == folder  # and it wrote nothing before that
    verify(folder)


def test_where_the_first_of_two_dies_the_second_goes_on_with_its_work(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with resolving(checkpoint, cache, 300_000) as first, ExitStack() as stack:
        until_stopped(first)
        second = stack.enter_context(resolving(checkpoint, cache, 0))
        assert line(second).startswith("another process is packing tiny-")
        first.kill()
        assert line(second).startswith("writes ")
        assert int(line(second).removeprefix("packed before ")) > 200_000
        verify(Path(line(second)))


def test_ctrl_c_while_waiting_is_130_and_a_waiting_run_shows_progress(checkpoint: Path, tmp_path: Path) -> None:
    cache = machine_cache(tmp_path / "cache")
    with resolving(checkpoint, cache, 300_000) as first:
        until_stopped(first)
        second = start("run", checkpoint, "abc", "--cache", cache)
        assert second.stderr is not None
        assert b"another process is packing" in second.stderr.readline()
        assert re.search(rb"waiting for another process to pack: \d+ KiB of \d+ KiB", second.stderr.readline())
        second.send_signal(signal.SIGINT)
        _, err = second.communicate(timeout=60)
        assert (second.returncode, err.splitlines()[-1]) == (130, b"penstock: stopped")
        assert first.poll() is None


def test_a_checkpoint_that_changes_while_it_is_packed(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def resolving_and(change: Callable[[], None]) -> Path:
        def tell(what: str, done: int, total: int) -> None:
            if what.startswith("packing") and done == total:
                change()

        source = resolve(str(checkpoint), weights=None, cache=cache, on_progress=tell)
        source.close()
        return source.folder

    with pytest.raises(BrokenModel, match="changed while it was packed"):
        resolving_and(lambda: replace_file(checkpoint / "model.safetensors"))
    assert names(cache) == []
    folder = resolving_and(lambda: os.utime(checkpoint / "model.safetensors"))  # touched alone: the same content
    assert resolved(checkpoint, cache)[1].work == set()
    assert names(cache) == [folder.name]


def test_a_copy_that_is_held_is_not_removed(checkpoint: Path, tmp_path: Path) -> None:
    source = held(checkpoint, tmp_path / "cache")
    assert not copies.remove_free(source.folder) and source.folder.exists()
    source.close()
    assert copies.remove_free(source.folder) and names(tmp_path / "cache") == []
