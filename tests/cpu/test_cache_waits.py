"""Copies in the cache, and several processes that make or use one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BrokenModel
from penstock.serve import cached
from penstock.serve.source import resolve
from penstock.store import copies
from penstock.store.verify import verify
from tests.cpu.cached_copies import (
    SMALL_SHARDS,
    held,
    names,
    replace_file,
    resolved,
)
from tests.cpu.commands import machine_cache, start

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


def test_a_copy_that_is_whole_just_before_it_would_be_packed_is_used(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process renames its copy into place between the look for one and the packing."""
    cache, true_pack, made = tmp_path / "cache", cached.pack, []

    def late(*arguments: Any, **how: Any) -> Path:
        monkeypatch.setattr(cached, "pack", true_pack)
        made.append(resolved(checkpoint, cache)[0])
        return true_pack(*arguments, **how)

    monkeypatch.setattr(cached, "pack", late)
    assert resolved(checkpoint, cache)[0] == made[0]
    assert names(cache) == [made[0].name]


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
        _, err = second.communicate(timeout=600)
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
