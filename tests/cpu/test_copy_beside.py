"""A first use by `LLM` or the server: a thread writes the packed copy while others are answered."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.errors import BadRequest, StorageFailed
from penstock.runtime.made import between_passes
from penstock.serve.engine import Engine
from penstock.serve.llm import LLM
from penstock.spec.format import FLOAT32
from penstock.spec.parts import parts
from penstock.store import direct
from penstock.store.manifest import RECORD
from penstock.store.pack import pack
from penstock.store.packing import Packing
from penstock.store.verify import verify
from tests.cpu.cached_copies import make_checkpoint, names, replace_file, resolved
from tests.cpu.checkpoints import folder_bytes
from tests.cpu.commands import machine_cache
from tests.cpu.engines import GREEDY, load
from tests.cpu.first_runs import PROMPT, engine_of, opened
from tests.cpu.servers import serving, text_of


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Copies are begun to be written, which sets the first event, and wait there for the second one."""
    begun, goes_on, write = threading.Event(), threading.Event(), Packing.write

    def waiting(*arguments: Any, **named: Any) -> Path:
        begun.set()
        assert goes_on.wait(600)
        return write(*arguments, **named)

    monkeypatch.setattr(Packing, "write", waiting)
    try:
        yield begun, goes_on
    finally:
        goes_on.set()


def is_what_pack_writes(checkpoint: Path, cache: Path, tmp_path: Path) -> None:
    (copy,) = (cache / "models").iterdir()
    packed = pack(checkpoint, tmp_path / "packed")
    assert {n: b for n, b in folder_bytes(copy).items() if n != RECORD} == folder_bytes(packed)


def test_it_answers_before_its_copy_is_there(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = machine_cache(tmp_path / "cache")
    with held_up(monkeypatch) as (begun, goes_on), LLM(checkpoint, cache=cache) as llm:
        assert begun.wait(600) and repr(llm).startswith(f"<LLM {checkpoint.name}: ")
        first = llm.generate("abc", GREEDY)[0].token_ids
        assert not (cache / "models").exists()
        goes_on.set()
    is_what_pack_writes(checkpoint, cache, tmp_path)
    with LLM(
        checkpoint, cache=cache, on_progress=lambda what, *_: pytest.fail(what) if "writ" in what else None
    ) as llm:
        assert llm.engine.packed.files and llm.generate("abc", GREEDY)[0].token_ids == first


def test_passes_and_the_copy_take_turns(checkpoint: Path, tmp_path: Path) -> None:
    """Answers come while each piece is copied, and both are whole."""
    with closing(engine_of(opened(checkpoint, tmp_path))) as engine:
        right = engine.generate_ids(PROMPT, GREEDY)
        engine.begin_copy(pytest.fail)
        for _ in range(200):
            assert engine.generate_ids(PROMPT, GREEDY) == right
            if not engine.lacks_copy:
                break
        engine.end_copy()
        assert not engine.lacks_copy
        engine.begin_copy(pytest.fail)  # there is one
    is_what_pack_writes(checkpoint, tmp_path, tmp_path)


def test_a_piece_waits_for_the_end_of_a_pass() -> None:
    stepping, closed, filled = threading.Lock(), [False], list[str]()
    (part, *_) = parts_of_a_model()

    def fill(*_: Any) -> None:
        assert stepping.locked()
        filled.append("piece")

    waiting = between_passes(fill, stepping, lambda: closed[0])
    out = np.zeros(1, np.uint8)
    waiting(part, 0, 1, out)
    stepping.acquire()
    thread = threading.Thread(target=waiting, args=(part, 0, 1, out))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and filled == ["piece"]
    stepping.release()
    thread.join(600)
    assert filled == ["piece"] * 2 and not stepping.locked()
    closed[0] = True
    with pytest.raises(BadRequest, match="was closed"):
        waiting(part, 0, 1, out)
    assert filled == ["piece"] * 2 and not stepping.locked()


def parts_of_a_model() -> Any:
    import json

    from penstock.models import spec_from_config
    from tests.cpu.configs import TINY_CONFIGS

    return parts(spec_from_config(json.loads(TINY_CONFIGS["llama"]), "test"), FLOAT32)


def test_a_model_that_is_closed_breaks_its_copy_off(checkpoint: Path, tmp_path: Path) -> None:
    engine = engine_of(opened(checkpoint, tmp_path))
    begun, goes_on = threading.Event(), threading.Event()

    def tell(what: str, done: int, total: int) -> None:
        if total:
            begun.set()
            assert goes_on.wait(600)

    engine.begin_copy(pytest.fail, tell)
    assert begun.wait(600)
    engine.end_copy(0.01)  # it takes longer
    closer = threading.Thread(target=engine.close)
    closer.start()
    writing = engine._copy
    assert writing is not None
    wait_for(lambda: writing._breaks_off)
    goes_on.set()
    closer.join(600)
    assert names(tmp_path) == [] and not closer.is_alive()
    assert "penstock-copy" not in {thread.name for thread in threading.enumerate()}
    with closing(engine_of(opened(checkpoint, tmp_path))) as again:
        again.write_copy()
    is_what_pack_writes(checkpoint, tmp_path, tmp_path)


def test_a_model_that_nobody_has_any_more_still_writes_its_copy(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives its memory back after that; whoever lets go of it does not wait."""
    cache = machine_cache(tmp_path / "cache")
    with held_up(monkeypatch) as (begun, goes_on):
        llm = LLM(checkpoint, cache=cache)
        assert begun.wait(600)
        session, writing = llm.engine.session, llm.engine._copy
        gone = weakref.ref(llm)
        del llm
        gc.collect()
        assert gone() is None and not session._closed
        goes_on.set()
    assert writing is not None
    writing.wait()
    assert session._closed
    is_what_pack_writes(checkpoint, cache, tmp_path)


def test_a_program_that_ends_waits_for_it(checkpoint: Path, tmp_path: Path) -> None:
    cache = machine_cache(tmp_path / "cache")
    code = """
        import sys, time
        from penstock import LLM
        from penstock.store.packing import Packing
        write = Packing.write
        def slow(*arguments, **named):
            time.sleep(0.5)
            return write(*arguments, **named)
        Packing.write = slow
        llm = LLM(sys.argv[1], cache=sys.argv[2])
        print(len(llm.generate("abc")[0].token_ids))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), checkpoint, cache], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 0 and not done.stderr
    is_what_pack_writes(checkpoint, cache, tmp_path)


def test_where_it_cannot_be_written_there_is_a_warning(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StorageFailed("the disk is too full: 2 GB are needed, 1 GB is free")

    monkeypatch.setattr(Packing, "write", full)
    with pytest.warns(UserWarning, match="the packed copy was not written, .*: the disk is too full"):
        llm = LLM(checkpoint, cache=machine_cache(tmp_path / "cache"))
        llm.engine.end_copy()
    with llm:
        assert llm.generate("abc", GREEDY)[0].token_ids


def test_a_checkpoint_that_changes_meanwhile(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = machine_cache(tmp_path / "cache")
    with held_up(monkeypatch) as (begun, goes_on), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with LLM(checkpoint, cache=cache):
            assert begun.wait(600)
            replace_file(checkpoint / "model.safetensors")
            goes_on.set()
    assert any("changed while it was packed" in str(each.message) for each in told)
    assert names(cache) == []


def test_of_two_first_uses_one_writes(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one, whose copy is broken off, waits for it in vain, and neither is in the other's way."""
    cache = machine_cache(tmp_path / "cache")
    with held_up(monkeypatch) as (begun, goes_on):
        one, two = LLM(checkpoint, cache=cache), LLM(checkpoint, cache=cache)
        with one, two:
            assert begun.wait(600)
            goes_on.set()
    is_what_pack_writes(checkpoint, cache, tmp_path)
    assert len(names(cache)) == 1


# --- the server ----------------------------------------------------------------------------------------------


# Each piece of a copy takes so long, until the copy is broken off.
SLOW = """#!{python}
import sys, threading
import penstock.cli.loading as loading
import penstock.serve.session as session
from penstock.serve.copying import CopyWriting
between_passes, ends = session.between_passes, threading.Event()
begin, break_off = CopyWriting.__init__, CopyWriting.break_off
def slow(*arguments):
    fill = between_passes(*arguments)
    def wait(*which):
        ends.wait({piece_s})
        return fill(*which)
    return wait
def beginning(*arguments):
    ends.clear()
    begin(*arguments)
def breaking_off(writing):
    ends.set()
    break_off(writing)
session.between_passes, loading._ENDING_S = slow, {ending_s}
CopyWriting.__init__, CopyWriting.break_off = beginning, breaking_off
from penstock.cli.entry import main
sys.exit(main())
"""


def script(tmp_path: Path, piece_s: float, ending_s: float) -> Path:
    """The program, which takes so long for each piece of a copy, and waits so long for a copy at the end."""
    file = tmp_path / f"slow-{piece_s}"
    file.write_text(SLOW.format(python=sys.executable, piece_s=piece_s, ending_s=ending_s))
    file.chmod(0o755)
    return file


def completed(server: Any, model: str, prompt: str = "Once") -> str:
    done = server.client().completions.create(
        model=model, prompt=prompt, max_tokens=9, temperature=0, extra_body={"ignore_eos": True}
    )
    text: str = done.choices[0].text
    return text


def right_answer(checkpoint: Path, tmp_path: Path) -> str:
    with load(pack(checkpoint, tmp_path / "right"), context=128) as engine:
        return text_of(engine, "Once", max_tokens=9, ignore_eos=True)


def test_a_server_answers_while_its_copy_is_written(checkpoint: Path, tmp_path: Path) -> None:
    cache, right = machine_cache(tmp_path / "cache"), right_answer(checkpoint, tmp_path)
    with serving(checkpoint, cache, "--name", "a", script=script(tmp_path, 0.05, 600)) as server:
        assert completed(server, "a") == right
    is_what_pack_writes(checkpoint, cache, tmp_path)  # it was given time at the end
    with serving(checkpoint, cache, "--name", "a") as server:
        assert completed(server, "a") == right
    assert not any("writes " in line for line in server.said)


def test_sigterm_while_the_copy_is_written(checkpoint: Path, tmp_path: Path) -> None:
    cache = machine_cache(tmp_path / "cache")
    with serving(checkpoint, cache, "--name", "a", script=script(tmp_path, 600, 0.1)) as server:
        completed(server, "a")
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(600)
        assert names(cache) == []
    assert server.process.returncode == 0 and not any("not written" in line for line in server.said)


def test_a_kill_while_the_copy_is_written(checkpoint: Path, tmp_path: Path) -> None:
    cache, slow = machine_cache(tmp_path / "cache"), script(tmp_path, 600, 0.1)
    with pytest.raises(AssertionError), serving(checkpoint, cache, "--name", "a", script=slow) as server:
        completed(server, "a")
        wait_for(lambda: (cache / "models").exists() and names(cache) != [])
        server.process.kill()
        server.process.wait(600)
    assert [name.endswith(".partial") for name in names(cache)] == [True]
    folder, _ = resolved(checkpoint, cache)
    verify(folder)


def wait_for(seen: Callable[[], bool]) -> None:
    import time

    until_s = time.monotonic() + 600
    while not seen():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_a_model_that_gives_its_place_to_another(checkpoint: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", dtype="BF16")
    cache, right = machine_cache(tmp_path / "cache"), right_answer(checkpoint, tmp_path)
    slow = script(tmp_path, 600, 0.1)
    with serving(checkpoint, cache, "--name", "a", "--model", f"b={other}", script=slow) as server:
        assert completed(server, "a") == right
        theirs = completed(server, "b")
        assert completed(server, "a") == right  # anew, from the checkpoint
        assert completed(server, "b") == theirs
    assert names(cache) == []


def test_engines_without_a_copy_to_write_do_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with closing(Engine.load(pack(checkpoint, tmp_path / "packed"), *ask_of_a_test())) as engine:
        assert not engine.lacks_copy
        engine.begin_copy(pytest.fail)
        engine.end_copy()
        engine.leave()


def ask_of_a_test() -> Any:
    from penstock.serve.loading import Loading
    from penstock.spec.ask import Ask
    from tests.cpu.commands import MACHINE

    return Ask(), Loading(machine=MACHINE)


def test_a_copy_is_written_where_no_thread_may_be_started(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a program with Python 3.12.1."""

    class Refused:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def start(self) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patched:
        patched.setattr(direct, "threading", SimpleNamespace(Thread=Refused))
        pack(checkpoint, tmp_path / "without")
    pack(checkpoint, tmp_path / "with")
    assert folder_bytes(tmp_path / "without") == folder_bytes(tmp_path / "with")


def test_ctrl_c_at_the_end_of_a_program_breaks_the_copy_off() -> None:
    script = """
        import time
        from penstock.serve.copying import CopyWriting

        def write(hear):
            try:
                while True:
                    hear("", 0, 1)
                    time.sleep(0.01)
            finally:
                print("broken off", flush=True)

        CopyWriting(write, print)
        print("begun", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "begun\n"
        for _ in range(20):  # the first may come before the interpreter waits for the thread
            child.send_signal(signal.SIGINT)
            try:
                child.wait(2)
                break
            except subprocess.TimeoutExpired:
                continue
        assert child.stdout.read() == "broken off\n"
        # The program's own last line may still be at work when the first signal comes. Then Python ends as a program
        # does that SIGINT has ended. Any other signal would be an abort.
        assert child.returncode in (0, -signal.SIGINT), child.returncode
