"""Locks on folders that others rename and remove meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.store.locks import FolderLock, lock_folder


def taken(folder: Path, exclusive: bool) -> bool:
    """Whether a lock can be had at once."""
    lock = lock_folder(folder, exclusive=exclusive, wait=False)
    if lock is not None:
        lock.close()
    return lock is not None


def held(folder: Path, exclusive: bool) -> FolderLock:
    lock = lock_folder(folder, exclusive=exclusive, wait=False)
    assert lock is not None
    return lock


def test_who_stands_against_whom(tmp_path: Path) -> None:
    with held(tmp_path, exclusive=False) as reader:
        assert taken(tmp_path, exclusive=False) and not taken(tmp_path, exclusive=True)
        reader.close()
        reader.close()  # does nothing
        assert taken(tmp_path, exclusive=True)
    with held(tmp_path, exclusive=True):
        assert not taken(tmp_path, exclusive=False)


def test_a_lock_ends_with_its_object_and_with_its_process(tmp_path: Path) -> None:
    lock = held(tmp_path, exclusive=True)
    del lock
    assert taken(tmp_path, exclusive=True)
    code = (
        "import sys, time; from pathlib import Path; from penstock.store.locks import lock_folder; "
        "lock = lock_folder(Path(sys.argv[1]), exclusive=True, wait=False); print(lock, flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and b"FolderLock" in child.stdout.readline()
    assert not taken(tmp_path, exclusive=False)
    child.kill()
    child.communicate()
    assert taken(tmp_path, exclusive=True)


def test_no_folder_no_lock(tmp_path: Path) -> None:
    assert lock_folder(tmp_path / "none", exclusive=False, wait=True) is None
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        lock_folder(tmp_path / "file", exclusive=False, wait=True)


@pytest.mark.parametrize("another", [True, False])
def test_who_waits_gets_the_folder_that_has_the_name_then(tmp_path: Path, another: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    first = held(folder, exclusive=True)
    found: list[FolderLock | None] = []
    waiter = threading.Thread(target=lambda: found.append(lock_folder(folder, exclusive=True, wait=True)))
    waiter.start()
    folder.rename(tmp_path / "away")
    if another:
        folder.mkdir()
    assert not first.is_at(folder) and first.is_at(tmp_path / "away")
    first.close()
    waiter.join(600)
    if another:
        assert found[0] is not None and found[0].is_at(folder)
    else:
        assert found == [None]
