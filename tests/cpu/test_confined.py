"""The child that opens tokenizers: its life beside this process, through signals, threads, forks and sudden ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.errors import BrokenModel
from penstock.runtime import host
from penstock.serve.confined import ChildLimits, Confined
from penstock.serve.tokenizer import Tokenizer
from tests.cpu.commands import ROOT
from tests.cpu.test_tokenizer import build, in_folder
from tests.left_open import open_now

LIMITS = ChildLimits("doing a thing", Path("that.json"), 4.0, 128 << 20, 1 << 20)
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("byte-level").save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def child(folder: Path) -> Confined:
    found = Confined(folder, lambda: LIMITS)
    found.open()
    return found


def process_id(child: Confined) -> int:
    assert child._child is not None
    return child._child.process.pid


def gone(process: int) -> bool:
    """Whether a process has ended, within a minute; a zombie has not."""
    for _ in range(600):
        if not Path(f"/proc/{process}").exists():
            return True
        time.sleep(0.1)
    return False


def kill(process: int) -> None:
    """Ends a child of ours, and waits until it has."""
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)


def children() -> set[int]:
    """Of this process, all its threads'."""
    found = (path.read_text().split() for path in Path("/proc/self/task").glob("*/children"))
    return {int(process) for each in found for process in each}


def script(text: str, *arguments: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """A Python script in a process of its own."""
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False, **kwargs)  # type: ignore[call-overload, no-any-return]


def at_work(child: Confined, then: Callable[[], object]) -> None:
    """Has a thread call `then` when the child has worked for half a second of processor time from now on."""
    process = process_id(child)
    begun_s = host.cpu_s(process)

    def wait() -> None:
        while host.cpu_s(process) < begun_s + 0.5:
            time.sleep(0.01)
        then()

    threading.Thread(target=wait, daemon=True).start()


def encode(child: Confined, text: str, limits: ChildLimits = LIMITS) -> list[int]:
    ids: list[int] = child.ask("encode", [text, True], limits)[0]
    return ids


def test_one_that_was_ended_while_it_waited_is_replaced(child: Confined) -> None:
    ids, before = encode(child, "ab"), process_id(child)
    kill(before)
    assert encode(child, "ab") == ids
    assert gone(before)


def test_one_that_stops_is_ended_and_said(child: Confined) -> None:
    before = process_id(child)
    assert child._child is not None
    child._child._link.settimeout(0.3)
    os.kill(before, signal.SIGSTOP)
    with pytest.raises(BrokenModel, match=r"that\.json: doing a thing came to a standstill"):
        encode(child, "ab")
    assert gone(before)
    assert encode(child, "ab")


@pytest.mark.parametrize("why", ["other work has the processors", "this process was stopped too"])
def test_one_that_had_no_turn_is_waited_for(child: Confined, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on at the fourth look, when it would have been given up at the second."""
    ids, looks = encode(child, "ab"), list[int]()
    assert child._child is not None
    child._child._link.settimeout(0.3)
    os.kill(process_id(child), signal.SIGSTOP)

    def look(*_: int) -> int:
        looks.append(1)
        if len(looks) == 4:
            os.kill(process_id(child), signal.SIGCONT)
        return len(looks)

    if why.startswith("other"):
        monkeypatch.setattr("penstock.serve.confined.host.wants_cpu", look)
    else:  # each look at the clock comes a minute later
        monkeypatch.setattr("penstock.serve.confined.time", SimpleNamespace(monotonic=lambda: 60 * look()))
    assert encode(child, "ab") == ids
    assert len(looks) >= 4


def test_one_that_is_ended_while_it_works_is_said(child: Confined, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(SLOW)
    child.open()
    process = process_id(child)
    at_work(child, lambda: os.kill(process, signal.SIGKILL))
    with pytest.raises(BrokenModel, match=r"that\.json: doing a thing ended in SIGKILL, within 60 s of processor"):
        child.ask("chat", [[], None], replace(LIMITS, cpu_s=60.0))
    assert encode(child, "ab")


def test_the_time_is_for_each_request(child: Confined, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for a in range(40) %}{% for b in range(50000) %}{% endfor %}{% endfor %}"
    )
    child.open()
    total_s, limit_s = 0.0, 1.0
    while total_s < 2 * limit_s:
        text, cpu_s = child.ask("chat", [[], None], replace(LIMITS, cpu_s=limit_s))
        assert text == "" and 0 < cpu_s < limit_s
        total_s += cpu_s
    with pytest.raises(BrokenModel, match=r"takes more than 1 s of processor time"):
        child.ask("chat", [[], None], replace(LIMITS, cpu_s=limit_s, spent_s=limit_s))


def test_ctrl_c_in_the_midst_of_a_request(child: Confined, folder: Path) -> None:
    """The answer that nobody waited for is not the next one's."""
    (folder / "chat_template.jinja").write_text(SLOW)
    child.open()
    ids, before = encode(child, "abc"), process_id(child)
    at_work(child, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        child.ask("chat", [[], None], replace(LIMITS, cpu_s=60.0))
    assert encode(child, "abc") == ids
    assert gone(before)


def test_threads_take_turns(folder: Path) -> None:
    tokenizer, core = Tokenizer.open(folder), build("byte-level")
    texts = [letter * n for letter in "abcdefgh" for n in range(1, 40)]
    found: dict[str, list[int]] = {}

    def work(part: list[str]) -> None:
        found.update({text: tokenizer.encode(text) for text in part})

    threads = [threading.Thread(target=work, args=(texts[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {text: core.encode(text).ids for text in texts}


def test_it_outlives_the_thread_that_opened_it(folder: Path) -> None:
    opened: list[Tokenizer] = []
    thread = threading.Thread(target=lambda: opened.append(Tokenizer.open(folder)))
    thread.start()
    thread.join()
    process = process_id(opened[0]._child)
    assert opened[0].encode("ab")
    assert process_id(opened[0]._child) == process


def test_several_at_once(tmp_path: Path) -> None:
    tokenizers = []
    for kind in ("byte-level", "byte-fallback", "metaspace"):
        (tmp_path / kind).mkdir()
        tokenizers.append(in_folder(tmp_path / kind, build(kind)))
    texts = [tokenizer.encode("abc") for tokenizer in tokenizers]
    assert texts == [build(kind).encode("abc").ids for kind in ("byte-level", "byte-fallback", "metaspace")]
    processes = [process_id(tokenizer._child) for tokenizer in tokenizers]
    assert len({*processes}) == 3
    del tokenizers
    assert all(map(gone, processes))


def test_close_leaves_no_process_and_no_zombie(child: Confined) -> None:
    process = process_id(child)
    child.close()
    assert not Path(f"/proc/{process}").exists()
    assert encode(child, "ab")  # another one


def test_no_child_outlives_a_folder_that_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    before = children()
    with pytest.raises(BrokenModel):
        Tokenizer.open(folder)
    assert children() == before


OPENED = """
import os, signal, sys, time
from pathlib import Path
from penstock.serve.tokenizer import Tokenizer
tokenizer = Tokenizer.open(Path(sys.argv[1]))
process = tokenizer._child._child.process.pid
"""


def test_after_a_fork_each_process_has_its_own(folder: Path) -> None:
    done = script(
        OPENED
        + """
expected = tokenizer.encode("abc")
tokenizer._child._lock.acquire()  # as another thread might at that moment
fork = os.fork()
if fork == 0:
    ok = tokenizer.encode("abc") == expected and tokenizer._child._child.process.pid != process
    os._exit(0 if ok else 1)
tokenizer._child._lock.release()
_, status = os.waitpid(fork, 0)
assert status == 0 and tokenizer.encode("abc") == expected and tokenizer._child._child.process.pid == process
fork = os.fork()
if fork == 0:
    sys.exit()  # cleans up, and leaves the other's child alone
os.waitpid(fork, 0)
assert tokenizer.encode("abc") == expected and tokenizer._child._child.process.pid == process
print(process)
""",
        folder,
    )
    assert done.returncode == 0, done.stderr
    assert gone(int(done.stdout))


@pytest.mark.parametrize("forked", [False, True])
def test_no_orphan_after_kill_9(folder: Path, forked: bool) -> None:
    """Also where a fork of the parent lives on and holds the socket."""
    text = (
        OPENED
        + "fork = os.fork() if sys.argv[2] == 'True' else -1\n"
        + "if fork:\n    print(process, fork, flush=True)\n"
        + "time.sleep(600)"
    )
    command = [sys.executable, "-c", text, str(folder), str(forked)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process, fork = map(int, parent.stdout.readline().split())
        parent.kill()
        parent.wait()
        assert gone(process)
        if forked:
            os.kill(fork, signal.SIGKILL)


def test_without_standard_streams(folder: Path) -> None:
    text = OPENED + "Path(sys.argv[2]).write_text(tokenizer.decode(tokenizer.encode('abc')))"
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", text, folder, folder / "found"]
    assert subprocess.run(command, cwd=ROOT, timeout=600, check=False).returncode == 0
    assert (folder / "found").read_text() == "abc"


@pytest.mark.parametrize(
    "inherited",
    [
        "signal.signal(signal.SIGPROF, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "import resource; resource.setrlimit(resource.RLIMIT_STACK, (-1, -1))",
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))",
        "os.chdir('/')",
    ],
)
def test_what_a_child_inherits(folder: Path, inherited: str) -> None:
    (folder / "chat_template.jinja").write_text("{{ 10 ** (10**9) }}")
    script_text = (
        "import os, signal\n"
        + inherited
        + OPENED
        + """
from penstock.errors import PenstockError
from penstock.serve import text_limits
text_limits._CPU_S = 0.5
for _ in range(2):
    try:
        tokenizer.chat([])
    except PenstockError as error:
        print(error.message)
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
"""
    )
    done = script(script_text, folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert "takes more than 0.5 s of processor time" in line or "ended in an unknown way" in line, line
    assert len(done.stdout.splitlines()) == 2


def test_ctrl_c_at_the_terminal_is_for_the_parent(folder: Path) -> None:
    """SIGINT to the whole group, as a terminal sends it, and the parent still decodes at its end."""
    text = OPENED + (
        "ids = tokenizer.encode('abc')\n"
        "try:\n    print('ready', flush=True)\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print(tokenizer.decode(ids))\n"
        "    print(tokenizer._child._child.process.pid == process)"
    )
    command = [sys.executable, "-c", text, str(folder)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.read().split() == ["abc", "True"]


def test_a_file_that_goes_after_it_was_opened(child: Confined, folder: Path) -> None:
    """Nobody needs it again, unless the child must be replaced."""
    (folder / "tokenizer.json").unlink()
    assert encode(child, "ab")
    kill(process_id(child))
    with pytest.raises(BrokenModel, match=r"tokenizer\.json is missing"):
        encode(child, "ab")


def test_the_child_imports_nothing_from_the_working_folder(folder: Path, tmp_path: Path) -> None:
    for name in ("json", "tokenizers", "jinja2", "penstock", "site", "typing"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    text = OPENED.replace("import os,", "import sys; sys.path.remove('') if '' in sys.path else None; import os,", 1)
    command = [sys.executable, "-P", "-c", text + "print(tokenizer.encode('ab'))", str(folder)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_python_that_does_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.errors import BadRequest, InternalError

    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(BadRequest, match=r"/nowhere/python does not start: No such file"):
        Tokenizer.open(folder)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InternalError, match="ended with code 1"):
        Tokenizer.open(folder)


def test_nothing_is_left_open(folder: Path) -> None:
    before = open_now()
    for _ in range(3):
        tokenizer = Tokenizer.open(folder)
        tokenizer.encode("ab")
        tokenizer.close()
    assert not open_now() - before


def test_a_panic_with_little_memory_is_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the environment asks for backtraces, Rust wants 20 MiB to print one, and with less waited for itself."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "([a-z ]+)+[0-9]"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    file.write_text(json.dumps(content))
    monkeypatch.setenv("RUST_BACKTRACE", "full")
    text = "it was a dark and stormy night; the rain fell in torrents, and the wind rattled along the housetops."
    for memory_mib in range(14, 44, 3):
        child = Confined(folder, lambda: LIMITS)
        child.open()
        with pytest.raises(BrokenModel) as caught:
            encode(child, text, replace(LIMITS, memory_bytes=memory_mib << 20))
        assert "standstill" not in caught.value.message and "doing a thing" in caught.value.message
        child.close()
