"""Temporary folders: those of killed processes are removed, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from penstock.store.locks import lock_folder
from penstock.store.temporary import PREFIX, remove_left, temporary_folder
from tests.cpu.commands import machine_cache, standing, start


def left(parent: Path, pid: int, name: str = "abcdefgh") -> Path:
    folder = parent / f"{PREFIX}{pid}-{name}"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_folders_of_ended_processes_are_removed_and_no_others(tmp_path: Path, ended: int) -> None:
    gone = left(tmp_path, ended)
    (gone / "within").mkdir()
    left(tmp_path, os.getpid()), left(tmp_path, 1), left(tmp_path, 9_999_999_999), left(tmp_path, ended, "a b")
    (tmp_path / f"{PREFIX}x-abcdefgh").mkdir()
    (tmp_path / "penstock-abcdefgh").mkdir()
    (tmp_path / f"{PREFIX}{ended}-emptyone").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("kept")
    (tmp_path / f"{PREFIX}{ended}-alinkaaa").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"{PREFIX}{ended}-afileaaa").write_text("")
    held = left(tmp_path, ended, "lockedaa")
    lock = lock_folder(held, exclusive=False, wait=True)
    assert lock is not None
    before = set(os.listdir(tmp_path))
    remove_left(tmp_path)
    assert before - set(os.listdir(tmp_path)) == {gone.name}
    assert (tmp_path / "elsewhere" / "file").read_text() == "kept"
    lock.close()
    remove_left(tmp_path)
    assert not held.exists()
    remove_left(tmp_path / "none")


def test_a_folder_of_another_user_stays(tmp_path: Path, ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left(tmp_path, ended)
    monkeypatch.setattr("os.geteuid", lambda: folder.stat().st_uid + 1)
    remove_left(tmp_path)
    assert folder.exists()


def test_it_is_there_for_the_block(tmp_path: Path, ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = left(tmp_path, ended)
    with temporary_folder() as folder:
        assert not gone.exists() and folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
        assert lock_folder(folder, exclusive=True, wait=False) is None
    assert not folder.exists()


def test_a_signal_right_behind_its_making_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    makes = Path.mkdir

    def making(folder: Path, mode: int) -> None:
        makes(folder, mode)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", making)
    with pytest.raises(KeyboardInterrupt), temporary_folder():
        pass
    assert not list(tmp_path.iterdir())


def test_the_next_first_run_removes_what_a_killed_one_left(checkpoint: Path, tmp_path: Path) -> None:
    cache, made = machine_cache(tmp_path / "cache"), tmp_path / "made"
    made.mkdir()
    where = {**os.environ, "TMPDIR": str(made)}
    args = ("run", checkpoint, "abc", "--cache", cache, "--ignore-eos", "--raw", "--max-tokens")
    child = start(*args, "100000", env=where, script=standing(tmp_path, "passes == 20"))
    assert child.stdout is not None
    assert child.stdout.read(1)
    assert len(os.listdir(made)) == 1
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert len(os.listdir(made)) == 1
    again = start(*args, "2", env=where)
    assert again.wait(600) == 0
    assert os.listdir(made) == []


def test_a_living_one_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        import sys, tempfile
        from penstock.store.temporary import temporary_folder
        tempfile.tempdir = sys.argv[1]
        with temporary_folder() as folder:
            (folder / "a").write_text("")
            print(folder, flush=True)
            sys.stdin.read()
    """
    args, pipe = [sys.executable, "-c", textwrap.dedent(code), tmp_path], subprocess.PIPE
    child = subprocess.Popen(args, stdin=pipe, stdout=pipe, text=True)
    assert child.stdin is not None and child.stdout is not None
    folder = Path(child.stdout.readline().strip())
    monkeypatch.setattr("penstock.store.temporary._lives", lambda _: False)  # as in another container
    remove_left(tmp_path)
    assert folder.exists()
    child.stdin.close()
    assert child.wait(600) == 0 and not folder.exists()
