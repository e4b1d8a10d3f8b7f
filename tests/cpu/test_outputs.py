"""What commands write replaces only files of its own kind: no input is ever eaten, whatever name it is given by."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import BadRequest
from penstock.graph.trace import BEGINS
from penstock.planner import picture
from penstock.runtime.probe import keep, kept, machine_file
from penstock.serve.trace_file import TraceFile
from penstock.spec.format import parse_format
from penstock.store.cache import is_ours, look
from penstock.store.files import Output, is_aside
from penstock.store.pack import pack
from penstock.store.synth import synth
from tests.cpu.checkpoints import LLAMA, save_checkpoint, save_tokenizer
from tests.cpu.commands import MACHINE, ROOT, Call, command, dump_machine, refused
from tests.traces import read_trace

FLAGS = ("--raw", "--ignore-eos", "--max-tokens", "2")
OURS = {"--trace": BEGINS + "]}", "--svg": picture.BEGINS + "/>"}


def snapshot(*folders: Path) -> dict[str, tuple[int, bytes]]:
    """Inode and content of every file."""
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file): (file.stat().st_ino, file.read_bytes()) for file in files}


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Iterator[Path]:
    """A packed model, its checkpoint, and other inputs. At the end all are as they were."""
    shutil.copytree(model, tmp_path / "model")
    save_checkpoint(tmp_path / "checkpoint", {**LLAMA, "vocab_size": 300})
    save_tokenizer(tmp_path / "checkpoint", {**LLAMA, "vocab_size": 300})
    (tmp_path / "machine.json").write_text(dump_machine(MACHINE))
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "to-weights").symlink_to("model/model-00001.safetensors")
    os.link(tmp_path / "model" / "tokenizer.json", tmp_path / "hard-link.json")
    before = snapshot(tmp_path)
    yield tmp_path
    after = snapshot(tmp_path)
    assert {name: after.get(name) for name in before} == before


INPUTS = [
    "model/model-00001.safetensors", "model/penstock.json", "model/config.json", "model/tokenizer.json",
    "checkpoint/model.safetensors", "checkpoint/config.json", "machine.json", "text.txt", "to-weights",
    "hard-link.json",
]  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("flag", ["--trace", "--svg"])
def test_an_input_is_refused(flag: str, name: str, call: Call, folder: Path) -> None:
    """At once: the model is not even looked for. The line names the file that would have gone."""
    error = refused(call("plan", folder / "no-model", flag, folder / name), "something else than", "BadRequest")
    assert str((folder / name).resolve()) in error["message"]
    if flag == "--trace":
        for wanted in (("run", folder / "no-model", "hi"), ("bench", folder / "no-model")):
            assert refused(call(*wanted, flag, folder / name), kind="BadRequest") == error
    assert snapshot(folder).keys() == {str(file) for file in folder.rglob("*") if file.is_file()}


def test_a_trace_over_the_weights_that_run(call: Call, folder: Path) -> None:
    """It replaced them, with exit code 0."""
    weights = folder / "model" / "model-00001.safetensors"
    refused(call("run", folder / "model", "hi", *FLAGS, "--trace", weights), str(weights), "BadRequest")
    os.chdir(folder / "model")
    try:
        refused(call("run", ".", "hi", *FLAGS, "--trace", weights.name), str(weights), "BadRequest")
    finally:
        os.chdir(ROOT)


def test_a_trace_over_the_plan_that_runs(call: Call, folder: Path) -> None:
    (folder / "plan").write_text(call("plan", folder / "model").out)
    before = (folder / "plan").read_bytes()
    for name in ("plan", "./plan"):
        given = ("--plan", folder / "plan", "--trace", f"{folder}/{name}")
        refused(call("run", folder / "model", "hi", *FLAGS, *given), "something else than a trace")
    assert (folder / "plan").read_bytes() == before


@pytest.mark.parametrize("flag", ["--trace", "--svg"])
def test_its_own_kind_is_replaced(flag: str, call: Call, folder: Path) -> None:
    """And what is empty, and what is new; of the other kind it is not."""
    other = "--svg" if flag == "--trace" else "--trace"
    for content in (OURS[flag], ""):
        (folder / "out").write_text(content)
        assert call("plan", folder / "model", flag, folder / "out").code == 0
        assert (folder / "out").read_text().startswith(OURS[flag][:20])
    before = (folder / "out").read_bytes()
    refused(call("plan", folder / "model", other, folder / "out"), "something else than")
    assert (folder / "out").read_bytes() == before
    (folder / "out").unlink()


def test_the_trace_and_the_picture_are_two_files(call: Call, folder: Path) -> None:
    (folder / "link").symlink_to("out")
    for name in ("out", "../" + folder.name + "/out", "link"):
        given = ("--trace", folder / "out", "--svg", folder / name)
        refused(call("plan", folder / "model", *given), "--trace and --svg both name", "BadRequest")
    assert not (folder / "out").exists()
    done = call("plan", folder / "model", "--trace", folder / "out", "--svg", folder / "other")
    assert done.code == 0 and read_trace(folder / "out")
    assert [path for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_file_that_turned_into_another_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="something else than a trace"), TraceFile(tmp_path / "t", "t"):
        (tmp_path / "t").write_text("mine")
    assert (tmp_path / "t").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "target", ["/dev/null", "/dev/full", "/dev/stdout", "/dev/stderr", "/dev/fd/1", "/proc/self/fd/2", "{folder}/pipe"]
)
@pytest.mark.parametrize("stdout", ["pipe", "file"])
def test_what_is_no_file(target: str, stdout: str, model: Path, cache: Path, tmp_path: Path) -> None:
    """A device, a pipe, and the very file that the answer goes to: refused before anything else."""
    os.mkfifo(tmp_path / "pipe")
    args = ["plan", model, "--cache", cache, "--trace", target.format(folder=tmp_path)]
    with (tmp_path / "out").open("wb") as out:
        streams = {"stdout": out, "stderr": out} if stdout == "file" else {"capture_output": True}
        done = subprocess.run(command(args), cwd=ROOT, timeout=600, **streams)  # type: ignore[call-overload]
    said = (tmp_path / "out").read_bytes() if stdout == "file" else done.stderr
    assert done.returncode == 2 and b"is not a file that can be written" in said and said.count(b"\n") == 1, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "pipe"]


def test_the_file_that_is_printed_to(model: Path, cache: Path, tmp_path: Path) -> None:
    """`penstock plan … --json --trace FILE > FILE`: the shell has made it empty already."""
    args = ["plan", model, "--cache", cache, "--json", "--trace", tmp_path / "out"]
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(command(args), cwd=ROOT, stdout=out, stderr=subprocess.PIPE, timeout=600)
    assert done.returncode == 2 and b"is not a file that can be written" in done.stderr
    assert b'"error"' in (tmp_path / "out").read_bytes()


# --- packed models, and what the cache holds -------------------------------------------------------------------------


def test_nothing_is_written_through_planted_links(folder: Path, tmp_path: Path) -> None:
    """In the folder that a packed model grows in, and in place of it."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "packed.partial").mkdir()
    for name in ("model-00001.safetensors.tmp", "model-00001.safetensors", "resume.json", "config.json"):
        (tmp_path / "packed.partial" / name).symlink_to(tmp_path / "mine")
    pack(folder / "checkpoint", tmp_path / "packed")
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "second.partial").symlink_to("elsewhere")
    with pytest.raises(BadRequest, match=r"second\.partial is a link, where packing makes a folder"):
        pack(folder / "checkpoint", tmp_path / "second")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    for name in ("packed", "second", "elsewhere", "mine", "second.partial"):
        path = tmp_path / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def test_a_spread_model_replaces_nothing(folder: Path, tmp_path: Path) -> None:
    """Not where the second folder is its own, nor where an interrupted packing wrote to another one."""
    for spread in (tmp_path, tmp_path / "packed", tmp_path / "checkpoint" / ".."):
        with pytest.raises(BadRequest, match="own folder"):
            pack(folder / "checkpoint", tmp_path / "packed", spread=spread)
    stop = KeyboardInterrupt()

    def interrupt(done: int, total: int, key: str) -> None:
        if done > total // 2:
            raise stop

    with pytest.raises(KeyboardInterrupt):
        pack(folder / "checkpoint", tmp_path / "packed", None, interrupt, 50_000, spread=tmp_path / "one")
    assert (tmp_path / "packed.partial" / "resume.json").exists()
    two = tmp_path / "two" / "packed"
    two.mkdir(parents=True)
    for number in range(1, 40):
        (two / f"model-{number:05d}.safetensors").write_text("mine")
    with pytest.raises(BadRequest, match="holds files already"):
        pack(folder / "checkpoint", tmp_path / "packed", None, None, 50_000, spread=tmp_path / "two")
    assert {file.read_text() for file in two.iterdir()} == {"mine"} and len(list(two.iterdir())) == 39
    pack(folder / "checkpoint", tmp_path / "packed", None, None, 50_000, spread=tmp_path / "one")


def test_models_are_not_replaced(folder: Path, tmp_path: Path) -> None:
    for target in ("model", "checkpoint", "text.txt", "to-weights"):
        with pytest.raises(BadRequest, match="exists already"):
            pack(folder / "checkpoint", tmp_path / target)
        with pytest.raises(BadRequest, match="exists already"):
            synth(folder / "checkpoint", tmp_path / target, parse_format("int4"))


def test_what_a_kill_leaves_of_a_small_file_is_ours(tmp_path: Path) -> None:
    """Of one that was being written in a packed model: packing goes on beside it, and `penstock prune` removes it."""
    folder = tmp_path / "tiny-0123456789ab-float32.partial"
    folder.mkdir()
    left = Output(folder / "resume.json")
    left.stream.close()
    assert [is_aside(file.name) for file in folder.iterdir()] == [True]
    entry = look(folder)
    assert entry is not None and is_ours(entry)
    save_checkpoint(tmp_path / "src", LLAMA)
    pack(tmp_path / "src", folder.with_suffix(""))
    assert not any(is_aside(file.name) for file in folder.with_suffix("").iterdir())


def test_a_machine_file_is_not_written_through_links(tmp_path: Path) -> None:
    file = machine_file(tmp_path)
    file.parent.mkdir(parents=True)
    (tmp_path / "mine").write_text("mine")
    file.symlink_to(tmp_path / "mine")
    file.with_suffix(f".{os.getpid()}.tmp").symlink_to(tmp_path / "mine")
    keep(file, MACHINE)
    assert (tmp_path / "mine").read_text() == "mine" and kept(file) == MACHINE
    file.write_text("damaged")
    assert kept(file) is None and not file.exists()
