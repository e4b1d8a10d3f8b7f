"""What breaks while an engine runs: one of our errors, soon, and an engine that can still be closed."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import threadpoolctl

from penstock import _native
from penstock.errors import BadRequest, StorageFailed
from penstock.runtime import host, movers
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.store.packed import open_packed
from tests.calls import operands
from tests.cpu.commands import MACHINE, here, machine_cache, refused
from tests.cpu.engines import GREEDY, load, make_model, streaming
from tests.cpu.sealed import edit
from tests.left_open import open_now

T = TypeVar("T")
PROMPT = list(range(40))


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, so that single rows of its embedding are read as well."""
    return make_model(tmp_path_factory.mktemp("made"), "qwen3", "float32")


@pytest.fixture
def model(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "model"))


@pytest.fixture(scope="module")
def expected(intact: Path) -> list[int]:
    with load(intact, context=128) as engine:
        return list(engine.generate_ids(PROMPT, GREEDY))


def soon(work: Callable[[], T]) -> T:
    """The result of `work`, or what it raised. Fails where it hangs."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(600)
    assert found, "it hangs"
    result, error = found[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


Fault = dict[str, int]


def inject(engine: Engine, at: int, fault: Fault, forever: bool = True) -> None:
    """The read of a block that is number `at` from now on fails, or from it on all."""
    for reader in engine.session.reader._readers.values():
        reader.inject(at, **fault, forever=forever)


def fails(code: int) -> Callable[..., Any]:
    def fault(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fault


@pytest.fixture
def born_faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Fault], None]:
    """Every reader that is made from then on has this fault."""

    def arrange(at: int, fault: Fault) -> None:
        def faulty(*how: Any) -> Any:
            reader = true_reader(*how)
            reader.inject(at, **fault)
            return reader

        true_reader = movers.new_reader
        monkeypatch.setattr(movers, "new_reader", faulty)

    return arrange


# Blocks smaller than the model's units, and larger.
READS: dict[str, Any] = {
    "threads": {"io_depth": 3, "io_block_bytes": 8192},
    "one": {"io_depth": 1},
    "io_uring": {"io_depth": 3, "io_block_bytes": 8192, "io_engine": "io_uring"},
}
FAULTS = {
    "EIO": ({"error": errno.EIO}, "failed: Input/output error"),
    "ENODEV": ({"error": errno.ENODEV}, "failed: No such device"),
    "the end": ({"most_bytes": 0}, "was truncated while in use"),
    "half a sector, the end": ({"most_bytes": 100}, "was truncated while in use"),
}


def loaded(folder: Path, reads: str = "threads", **how: Any) -> Engine:
    plan = streaming(open_packed(folder), context=128, chunk_rows=16, **READS[reads])
    return Engine.load(folder, Ask(), Loading(machine=MACHINE, plan=plan, **how))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("serial", [False, True], ids=["overlapped", "serial"])
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("at", [1, 40, 200])
@pytest.mark.parametrize("name", FAULTS)
def test_a_read_that_fails(name: str, at: int, reads: str, serial: bool, intact: Path) -> None:
    """The first, second, … read of the answer: in the prompt's chunks, and while it decodes."""
    fault, says = FAULTS[name]
    before = open_now()
    engine = loaded(intact, reads, serial=serial)
    inject(engine, at, fault)
    with pytest.raises(StorageFailed, match=says) as caught:
        soon(lambda: engine.generate_ids(PROMPT, GREEDY))
    assert str(intact) in caught.value.message and "\n" not in caught.value.message
    # Once more says the same, whatever state the first left.
    with pytest.raises(StorageFailed, match=says):
        soon(lambda: engine.generate_ids(PROMPT, GREEDY))
    soon(engine.close)
    soon(engine.close)
    assert not open_now() - before


@pytest.mark.parametrize("serial", [False, True], ids=["overlapped", "serial"])
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("at", [1, 30, 90, 150])
def test_a_read_that_fails_once(at: int, reads: str, serial: bool, intact: Path, expected: list[int]) -> None:
    """A chat goes on after an error, and the next answer is right."""
    engine = loaded(intact, reads, serial=serial)
    inject(engine, at, {"error": errno.EIO}, forever=False)
    with pytest.raises(StorageFailed):
        soon(lambda: engine.generate_ids(PROMPT, GREEDY))
    assert soon(lambda: engine.generate_ids(PROMPT, GREEDY)) == expected
    soon(engine.close)


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("name", ["interrupted", "short"])
def test_reads_that_are_continued(name: str, reads: str, intact: Path, expected: list[int]) -> None:
    """A signal that interrupts one, and reads that return a page at a time, for ever."""
    fault, forever = ({"error": errno.EINTR}, False) if name == "interrupted" else ({"most_bytes": 4096}, True)
    engine = loaded(intact, reads)
    inject(engine, 5, fault, forever)
    found = soon(lambda: engine.generate([PROMPT], GREEDY))[0]
    assert found.token_ids == expected
    with closing(loaded(intact, reads)) as other:
        assert found.bytes_moved == other.generate([PROMPT], GREEDY)[0].bytes_moved
    soon(engine.close)


@pytest.mark.parametrize("ring", [1, 3])
@pytest.mark.parametrize(
    ("op", "at"), [("embed", 1), ("ffn", 7), ("attend", 30), ("head", 5), ("head", 9), ("head", 15)]
)
def test_an_answer_that_was_interrupted(op: str, at: int, ring: int, intact: Path, expected: list[int]) -> None:
    """Ctrl-C in a notebook, anywhere in a pass: the engine answers again. At its last head, what is to be read ahead
    for the next pass has been planned already, and has not been read."""
    with load(intact, streaming(open_packed(intact), ring=ring, context=128, chunk_rows=16)) as engine:
        binding, calls = engine.session._binding, 0
        true_call = binding.call

        def call(what: Any) -> None:
            nonlocal calls
            calls += what.op == op
            if calls == at and what.op == op:
                raise KeyboardInterrupt
            true_call(what)

        binding.call = call
        with pytest.raises(KeyboardInterrupt):
            soon(lambda: engine.generate_ids(PROMPT, GREEDY))
        assert soon(lambda: engine.generate_ids(PROMPT, GREEDY)) == expected


def test_what_was_read_ahead_in_vain_may_fail(intact: Path, tmp_path: Path) -> None:
    """The answer ends, the loads for the token that never came fail: nobody needed them."""
    with load(intact, context=128) as engine:
        (whole,) = engine.generate([PROMPT], GREEDY)
    folder = Path(shutil.copytree(intact, tmp_path / "eos"))
    eos = whole.token_ids[5]
    edit(folder, "generation_config.json", lambda config: config.update(eos_token_id=eos))
    engine = loaded(folder)
    passes, true_step = 0, engine.session.step

    def step(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        found = true_step(*args)
        if passes == 3 + whole.token_ids.index(eos):
            engine.session._executor.drain()
            inject(engine, 1, {"error": errno.EIO})
        return found

    engine.session.step = step  # type: ignore[method-assign]
    answer = soon(lambda: engine.generate([PROMPT], SamplingParams(max_tokens=12)))[0]
    assert (answer.finish_reason, answer.token_ids[-1]) == ("stop", eos)
    soon(engine.close)


@pytest.mark.parametrize("reads", READS)
def test_a_file_cut_while_it_is_in_use(reads: str, model: Path) -> None:
    engine = loaded(model, reads)
    before = engine.generate_ids(PROMPT, GREEDY)
    shard = next(model.glob("*.safetensors"))
    os.truncate(shard, 40960)
    with pytest.raises(StorageFailed, match="was truncated while in use"):
        soon(lambda: engine.generate_ids(PROMPT, GREEDY))
    soon(engine.close)
    assert len(before) == 12


def test_a_file_that_is_gone_is_still_read(model: Path, expected: list[int]) -> None:
    engine = loaded(model)
    shutil.rmtree(model)
    (model.parent / "x").write_bytes(b"")
    with closing(engine.session):
        found = engine.session.reader.bytes_read
        logits = list(engine.score(PROMPT))
    assert found > 0 and np.isfinite(np.concatenate(logits)).all()


@pytest.mark.parametrize("name", FAULTS)
def test_a_load_that_fails_gives_everything_back(
    name: str, intact: Path, born_faulty: Callable[[int, Fault], None]
) -> None:
    fault, says = FAULTS[name]
    before = open_now()
    blas = [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    born_faulty(5, fault)
    with pytest.raises(StorageFailed, match=says):
        soon(lambda: Engine.load(intact, Ask(), Loading(machine=MACHINE, threads=7)))
    assert not open_now() - before
    assert blas == [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]


def test_memory_that_the_system_refuses(intact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise MemoryError(123)

    before = open_now()
    monkeypatch.setattr(_native, "Memory", refuse)
    with pytest.raises(StorageFailed, match=r"the system refused .* of memory for host\.weights"):
        Engine.load(intact, Ask(), Loading(machine=MACHINE))
    assert not open_now() - before


def test_a_limit_that_a_cgroup_has_rounded_down(intact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cgroups count in pages: of a limit of 2,200,000,000 bytes 2,199,998,464 are left."""
    monkeypatch.setattr(host, "memory_limit_bytes", lambda: 2_199_998_464)
    Engine.load(intact, Ask(host_memory_bytes=2_200_000_000), Loading(machine=MACHINE)).close()
    with pytest.raises(BadRequest, match=r"is more than the .* that this process may have"):
        Engine.load(intact, Ask(host_memory_bytes=2_199_998_464 + 4096), Loading(machine=MACHINE))


def test_a_shard_that_cannot_be_opened(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_now()
    monkeypatch.setattr(_native, "open_direct", fails(errno.EACCES))
    with pytest.raises(StorageFailed, match=r"cannot open .*: Permission denied"):
        Engine.load(model, Ask(), Loading(machine=MACHINE))
    assert not open_now() - before


def test_a_mistake_in_between_harms_nothing(intact: Path, expected: list[int]) -> None:
    with load(intact, streaming(open_packed(intact), context=128)) as engine:
        for wrong in ([], [300], [1] * 129):
            with pytest.raises(BadRequest):
                engine.generate_ids(wrong, GREEDY)
        assert engine.generate_ids(PROMPT, GREEDY) == expected


# --- no direct reads -------------------------------------------------------------------------------------------------


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A file system without O_DIRECT. Gives the (offset, bytes) that were dropped from the page cache."""
    dropped: list[tuple[int, int]] = []
    true_drop = _native.drop_cached

    def drop(fd: int, offset: int, nbytes: int) -> None:
        dropped.append((offset, nbytes))
        true_drop(fd, offset, nbytes)

    monkeypatch.setattr(_native, "open_direct", lambda path: (os.open(path, os.O_RDONLY | os.O_CLOEXEC), False))
    monkeypatch.setattr(_native, "drop_cached", drop)
    return dropped


@pytest.mark.parametrize("reads", READS)
def test_without_direct_reads(reads: str, intact: Path, expected: list[int], buffered: list[tuple[int, int]]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = loaded(intact, reads)
        assert engine.generate_ids(PROMPT, GREEDY) == expected
        engine.close()
    assert len(caught) == 1 and "refuses direct reads" in str(caught[0].message)
    assert sum(nbytes for _, nbytes in buffered) == engine.session.reader.bytes_read


def test_the_command_says_so_in_one_line(
    intact: Path, buffered: list[tuple[int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = machine_cache(tmp_path / "cache")
    found = here(capsys, "run", intact, "hi", "--cache", cache, "--max-tokens", 2, "--resident", 0, "--json")
    assert found.code == 0
    assert [line for line in found.err.splitlines() if "chat template" not in line] == [
        f"penstock: {intact}: this file system refuses direct reads; reading through the page cache, slower"
    ]


def test_the_command_when_a_read_fails(
    intact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], born_faulty: Callable[[int, Fault], None]
) -> None:
    cache = machine_cache(tmp_path / "cache")
    for at in (2, 50):
        born_faulty(at, {"error": errno.EIO})
        found = here(capsys, "run", intact, "hi", "--cache", cache, "--resident", 0, "--json")
        refused(found, "failed: Input/output error", "StorageFailed")


def test_an_interrupt_while_a_task_is_handed_over(tmp_path: Path) -> None:
    """Ctrl-C may come between any two lines; closing must not wait for a task that nobody will do."""
    from penstock.graph.tasks import Call, Task
    from penstock.runtime.dispatch import Dispatch
    from penstock.runtime.execute import Executor

    class Interrupted(Dispatch):
        def __init__(self) -> None:
            pass

        def on_device(self, lane: str) -> bool:
            return False

        def begin(self) -> None:
            pass

    executor = Executor(Interrupted())
    lane_ready = threading.Event()

    class Late:
        """A task that the next one waits for, and whose state is asked just when the user interrupts."""

        on_device = True
        task = None

        @property
        def succeeded(self) -> bool:
            lane_ready.set()
            raise KeyboardInterrupt

    executor._handed[7] = Late()  # type: ignore[assignment]
    load = Task(8, ("disk0",), (Call(operands("load"), 0, None, "int4", 0, 0),), (), (), 0, 0, (7,))
    with pytest.raises(KeyboardInterrupt):
        executor.run([load])
    assert lane_ready.is_set()
    closing = threading.Thread(target=executor.close, daemon=True)
    closing.start()
    closing.join(600)
    assert not closing.is_alive()
