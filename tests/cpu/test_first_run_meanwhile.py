"""What may happen while a first run loads a checkpoint, answers, and writes its copy: others, Ctrl-C, faults."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import BrokenModel, PenstockError, StorageFailed
from penstock.serve.engine import Engine
from penstock.serve.source import resolve
from penstock.serve.tokenizer import Tokenizer
from penstock.spec.format import parse_format
from penstock.store.locks import lock_folder
from penstock.store.pack import pack
from penstock.store.packing import Packing, naming
from penstock.store.unpacked import Unpacked
from penstock.store.verify import verify
from tests.cpu.cached_copies import Ears, names, replace_file, resolved
from tests.cpu.checkpoints import random_tensors, save_tensors
from tests.cpu.commands import here, machine_cache, refused, start
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.engines import GREEDY
from tests.cpu.first_runs import PROMPT, engine_of, opened


def test_of_two_first_runs_one_writes(checkpoint: Path, tmp_path: Path) -> None:
    one, two = (engine_of(opened(checkpoint, tmp_path)) for _ in range(2))
    with closing(one), closing(two):
        ears = Ears()
        other = threading.Thread(target=two.write_copy)
        begun = threading.Event()

        def tell(what: str, done: int, total: int) -> None:
            ears(what, done, total)
            if total and not begun.is_set():
                begun.set()
                other.start()  # it finds this one at work
                other.join(0.5)
                assert other.is_alive()

        one.write_copy(tell)
        other.join()
        two.write_copy(ears)  # once more: there is one
    assert ears.work == {"writing"} and not ears.news
    (folder,) = (tmp_path / "models").iterdir()
    verify(folder)


def broken_off(engine: Engine) -> None:
    def tell(what: str, done: int, total: int) -> None:
        if total and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.write_copy(tell)


def test_ctrl_c_while_the_copy_is_written(checkpoint: Path, tmp_path: Path) -> None:
    with closing(engine_of(opened(checkpoint, tmp_path))) as engine:
        ids = engine.generate_ids(PROMPT, GREEDY)
        broken_off(engine)
        assert names(tmp_path) == []
    with closing(engine_of(resolve(str(checkpoint), weights=None, cache=tmp_path, unpacked=True))) as engine:
        assert engine.generate_ids(PROMPT, GREEDY) == ids
        engine.write_copy()
    assert resolved(checkpoint, tmp_path)[1].news == []


def test_a_kill_while_the_copy_is_written(checkpoint: Path, tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        from pathlib import Path
        from penstock.serve.engine import Engine
        from penstock.serve.loading import Loading
        from penstock.serve.source import resolve
        from penstock.spec.ask import Ask
        from tests.cpu.commands import MACHINE
        source = resolve(sys.argv[1], weights=None, cache=Path(sys.argv[2]), unpacked=True)
        engine = Engine.open(source, Ask(), Loading(machine=MACHINE))
        def tell(what, done, total):
            if done:
                os.kill(os.getpid(), signal.SIGKILL)
        engine.write_copy(tell)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code), checkpoint, tmp_path / "cache"], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = names(tmp_path / "cache")
    assert left.endswith(".partial")
    folder, _ = resolved(checkpoint, tmp_path / "cache")
    verify(folder)
    assert names(tmp_path / "cache") == [folder.name]


def test_a_checkpoint_that_changes_while_it_is_loaded(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before a word comes, for its weights may be of two states."""
    source, forget = opened(checkpoint, tmp_path), Unpacked.forget

    def changes(unpacked: Unpacked) -> None:  # when all granules are made
        forget(unpacked)
        replace_file(checkpoint / "model.safetensors")

    monkeypatch.setattr(Unpacked, "forget", changes)
    with closing(source), pytest.raises(BrokenModel, match="changed while it was read"):
        engine_of(source)


def test_a_copy_is_written_once(checkpoint: Path, tmp_path: Path) -> None:
    with closing(engine_of(opened(checkpoint, tmp_path))) as engine:
        engine.write_copy()
        (copy,) = (tmp_path / "models").iterdir()
        lock = lock_folder(copy, exclusive=True, wait=False)
        assert lock is None  # it is held, as one that was found
        shutil.rmtree(copy)
        engine.write_copy()
        assert names(tmp_path) == []


def test_an_answer_stands_where_its_copy_cannot_be_written(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StorageFailed("the disk is too full: 2 GB are needed, 1 GB is free")

    monkeypatch.setattr(Packing, "write", full)
    cache, trace = machine_cache(tmp_path / "cache"), tmp_path / "trace.json"
    done = here(
        capsys, "run", checkpoint, "abc", "--cache", cache, "--max-tokens", "2", "--json", "--trace", trace
    )  # fmt: skip
    assert done.code == 0 and len(done.out.splitlines()) == 1 and "error" not in done.report
    assert "the answer is whole, but the packed copy was not written" in done.err and "2 GB are needed" in done.err
    assert json.loads(trace.read_text())["traceEvents"]


def test_no_temporary_folder_for_small_files(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with closing(resolve(str(checkpoint), weights=None, cache=tmp_path, unpacked=True)) as found:
        assert found.to_write is None


def stopped(child: subprocess.Popen[bytes]) -> list[str]:
    """What the command has said when it was ended by Ctrl-C."""
    _, err = child.communicate(timeout=600)
    lines = err.decode().splitlines()
    assert (child.returncode, lines[-1]) == (130, "penstock: stopped")
    return lines


SLOW = """
import sys, time
from penstock.serve.session import Session
from penstock.store.packing import Packing
step, write = Session.step, Packing.write
def slow_step(*arguments):
    time.sleep(0.3)
    return step(*arguments)
def slow_write(self, dst, fill, *arguments, **named):
    def wait(*which):
        time.sleep({piece_s})
        return fill(*which)
    return write(self, dst, wait, *arguments, **named)
Session.step, Packing.write = slow_step, slow_write
from penstock.cli.entry import main
sys.exit(main())
"""


def answering(checkpoint: Path, tmp_path: Path, piece_s: float = 0.0) -> subprocess.Popen[bytes]:
    """A first run in the middle of its answer, which goes on for a minute. `piece_s`: what each piece of its copy
    takes."""
    script = tmp_path / "slow"
    script.write_text(f"#!{sys.executable}\n" + SLOW.format(piece_s=piece_s))
    script.chmod(0o755)
    flags = ("--cache", machine_cache(tmp_path / "cache"), "--ignore-eos", "--max-tokens", "200")
    child = start("run", checkpoint, "abc", *flags, script=script)
    assert child.stdout is not None
    assert child.stdout.read(1)
    return child


def test_ctrl_c_in_an_answer_still_writes_the_copy(checkpoint: Path, tmp_path: Path) -> None:
    child, cache = answering(checkpoint, tmp_path), tmp_path / "cache"
    child.send_signal(signal.SIGINT)
    # Progress may be told after it, where the disk is slow.
    assert any("writes the packed copy, which the next run starts from" in line for line in stopped(child))
    (folder,) = (cache / "models").iterdir()
    verify(folder)
    assert resolved(checkpoint, cache)[1].news == []


def test_a_second_ctrl_c_ends_the_writing(checkpoint: Path, tmp_path: Path) -> None:
    child = answering(checkpoint, tmp_path, piece_s=1.0)
    assert child.stderr is not None
    child.send_signal(signal.SIGINT)
    while b"writes the packed copy" not in (line := child.stderr.readline()):
        assert line
    child.send_signal(signal.SIGINT)
    stopped(child)
    assert names(tmp_path / "cache") == []


def test_a_closed_pipe_still_writes_the_copy(checkpoint: Path, tmp_path: Path) -> None:
    child = answering(checkpoint, tmp_path)
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait(600) == 0
    (folder,) = (tmp_path / "cache/models").iterdir()
    verify(folder)


def test_a_checkpoint_that_changes_before_its_copy_is_written(checkpoint: Path, tmp_path: Path) -> None:
    with closing(engine_of(opened(checkpoint, tmp_path))) as engine:
        replace_file(checkpoint / "model.safetensors")
        with pytest.raises(BrokenModel, match="changed while it was packed"):
            engine.write_copy()
    assert names(tmp_path) == []


def message(of: Callable[[], object]) -> str:
    with pytest.raises(PenstockError) as caught:
        of()
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("how", ["infinite", "truncated"])
def test_a_damaged_checkpoint_gives_the_line_that_packing_gives(
    checkpoint: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, int4 = json.loads(TINY_CONFIGS["llama"]), parse_format("int4")
    file = checkpoint / "model.safetensors"
    if how == "infinite":
        tensors = random_tensors(config)
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.inf
        save_tensors(file, tensors)
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    expected = message(lambda: pack(checkpoint, tmp_path / "packed", int4))
    found = message(lambda: engine_of(opened(checkpoint, tmp_path / "cache", int4)))
    assert found == expected
    assert not (tmp_path / "cache").exists()


def test_the_command_says_it_in_one_line(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = random_tensors(json.loads(TINY_CONFIGS["llama"]))
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_tensors(checkpoint / "model.safetensors", tensors)
    cache = machine_cache(tmp_path / "cache")
    args = ("run", checkpoint, "abc", "--cache", cache, "--weights", "int4", "--json")
    refused(here(capsys, *args), "up_proj", "BrokenModel")


@pytest.mark.parametrize("asked", [["a" * 3000, "--context", "64"], ["abc", "--host-memory", "20MiB"], ["abc"]])
def test_small_files_are_removed_at_the_end(
    checkpoint: Path, tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (made := tmp_path / "made").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    cache = machine_cache(tmp_path / "cache")
    done = here(capsys, "run", checkpoint, *asked, "--cache", cache, "--max-tokens", "2", "--json")
    assert (done.code == 0) == (asked == ["abc"])
    assert list(made.iterdir()) == []


def test_numbers_and_notes_of_errors_name_the_checkpoint(tmp_path: Path) -> None:
    made = tmp_path / "made"

    def fail() -> None:
        error = BrokenModel(f"{made / 'a'} is bad", file=str(made / "a"), folder=made, bytes=5)
        error.add_note(f"read {made}")
        raise error

    with pytest.raises(BrokenModel) as caught, naming(Path("/models/tale"), made):
        fail()
    assert caught.value.message == "/models/tale/a is bad"
    assert caught.value.numbers == {"file": "/models/tale/a", "folder": "/models/tale", "bytes": 5}
    assert caught.value.__notes__ == ["read /models/tale"]


def test_an_error_of_the_tokenizers_process_names_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """Also where nobody else renames it, as in a server."""
    template = "{% for m in messages %}{{ 'a' * 10**9 if m.content == 'long' else 'b' }}{% endfor %}"
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with closing(resolve(str(checkpoint), weights=None, cache=tmp_path, unpacked=True)) as source:
        assert source.to_write is not None
        with closing(source.open_tokenizer()) as tokenizer:
            said = message(lambda: tokenizer.chat([{"role": "user", "content": "long"}]))
            assert str(checkpoint) in said and str(source.folder) not in said


def test_an_error_in_the_answer_names_the_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer is opened where its small files were put, and may refuse what the answer asks of it."""

    def refuse(tokenizer: Tokenizer, *_: object, **__: object) -> None:
        raise BrokenModel(f"{tokenizer.folder / 'tokenizer.json'}: decoding an answer with it fails")

    monkeypatch.setattr(Tokenizer, "stream", refuse)
    ran = here(capsys, "run", checkpoint, "a b", "--json", "--raw", "--cache", machine_cache(tmp_path / "cache"))
    says = f"{checkpoint / 'tokenizer.json'}: decoding an answer with it fails"
    assert ran.code == 2 and ran.report["error"]["message"] == says
