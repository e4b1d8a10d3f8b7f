"""Reading files that anybody may have put there, and writing ours: regular files only, and none lost."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, BrokenModel, StorageFailed
from penstock.spec import machine as machines
from penstock.store.files import Kind, Output, is_aside, load, open_regular, read_json, read_text, write_bytes
from tests.left_open import open_now
from tests.pure.machine import MACHINE

TRACE = Kind("a trace", b'{"trace":')


def special(folder: Path) -> dict[str, Path]:
    """What is no regular file, under names that do not tell."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))
    (folder / "to-pipe").symlink_to("pipe")
    found = {name: folder / name for name in ("folder", "pipe", "socket", "to-pipe")}
    return found | {"null": Path("/dev/null"), "zero": Path("/dev/zero")}


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["folder", "pipe", "socket", "to-pipe", "null", "zero"])
def test_only_regular_files_are_read(name: str, tmp_path: Path) -> None:
    """A pipe without a writer is not waited for."""
    with pytest.raises(BrokenModel, match=r"cannot be read: it is a (folder|pipe|socket|device), not a regular file"):
        read_text(special(tmp_path)[name])


def test_links_to_regular_files_are_followed(tmp_path: Path) -> None:
    """The Hub's cache is made of them."""
    (tmp_path / "blob").write_text("text")
    (tmp_path / "link").symlink_to("blob")
    assert read_text(tmp_path / "link") == "text"
    (tmp_path / "astray").symlink_to("none")
    with pytest.raises(BrokenModel, match="astray is missing"):
        read_text(tmp_path / "astray")


def test_a_pipe_that_takes_the_name_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the first look and the opening."""
    file, is_file = tmp_path / "file", os.stat_result([stat.S_IFREG | 0o644, *[0] * 9])
    os.mkfifo(file)
    monkeypatch.setattr(Path, "stat", lambda self: is_file)
    before = open_now()
    with pytest.raises(BrokenModel, match="it is a pipe"):
        open_regular(file)
    assert not open_now() - before


def test_what_is_opened_blocks_and_is_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    fd = open_regular(tmp_path / "file")
    assert os.get_blocking(fd) and not os.get_inheritable(fd)
    os.close(fd)


@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_files_of_bounded_size(size: int, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * size)
    assert load(file, 100) == b"x" * size
    if size:
        with pytest.raises(BrokenModel, match=f"has {size} bytes; at most {size - 1} make sense"):
            load(file, size - 1)


def test_a_sparse_file_takes_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(BrokenModel, match="at most 16777216 make sense"):
        read_text(tmp_path / "file")


def test_files_that_say_0_bytes() -> None:
    """Those of the kernel."""
    assert b"MemTotal" in load(Path("/proc/meminfo"), 1 << 20)
    with pytest.raises(BrokenModel, match="at most 10 make sense"):
        load(Path("/proc/meminfo"), 10)


def test_what_cannot_be_read_has_one_line(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match="none is missing"):
        read_text(tmp_path / "none")
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(BrokenModel, match="is not UTF-8"):
        read_text(tmp_path / "file")
    with pytest.raises(StorageFailed, match="cannot read"):
        read_text(tmp_path / "file" / "x")


def test_a_byte_order_mark_before_json(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text('{"a": 1}', encoding="utf-8-sig")
    assert file.read_bytes().startswith(b"\xef\xbb\xbf") and read_json(file) == {"a": 1}
    text = "\ufeff" + machines.dumps(MACHINE)
    assert machines.loads(text, "a machine") == MACHINE
    for wrong in ("\ufeff\ufeff{}", "{\ufeff}", "\ufeff"):
        file.write_text(wrong)
        with pytest.raises(BrokenModel, match="is not JSON"):
            read_json(file)
        with pytest.raises(BadRequest, match="is not JSON"):
            machines.loads(wrong, "a machine")


def test_half_of_a_surrogate_pair_in_json(tmp_path: Path) -> None:
    """JSON can say it, UTF-8 cannot: whatever took such a text later would fail."""
    file = tmp_path / "file"
    for wrong in (r'{"a": "\ud800"}', r'{"a": ["\uDFFF\uD83E"]}', r'{"\ud83e": 1}'):
        file.write_text(wrong)
        with pytest.raises(BrokenModel, match="half of a surrogate pair"):
            read_json(file)
        with pytest.raises(BadRequest, match="half of a surrogate pair"):
            machines.loads(wrong, "a machine")
    file.write_text(r'{"a": "\ud83e\udd80", "b": "\\ud800"}')
    assert read_json(file) == {"a": "🦀", "b": r"\ud800"}


# --- writing ---------------------------------------------------------------------------------------------------------


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_written_when_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content in (b"one", b"two"):
        with Output(file) as output:
            output.stream.write(content)
            assert content not in (file.read_bytes() if file.exists() else b"")
            assert [is_aside(name) for name in left(tmp_path)].count(True) == 1
            output.commit()
        assert file.read_bytes() == content and left(tmp_path) == ["file"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~mask


def test_what_is_not_committed_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt), Output(tmp_path / "file") as output:
        output.stream.write(b"half")
        raise KeyboardInterrupt
    assert left(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"before"


@given(content=st.binary(max_size=40))
def test_only_its_own_kind_is_replaced(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("out") / "file"
    file.write_bytes(content)
    if content and not content.startswith(TRACE.prefix):
        with pytest.raises(BadRequest, match="something else than a trace") as caught:
            write_bytes(file, b"new", TRACE)
        assert str(file) in caught.value.message and file.read_bytes() == content
    else:
        write_bytes(file, b"new", TRACE)
        assert file.read_bytes() == b"new"
    assert left(file.parent) == ["file"]


@pytest.mark.parametrize("content", [b'{"trace":', b'{"trace":1}', b""])
def test_its_own_kind_and_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    write_bytes(tmp_path / "file", b"new", TRACE)
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("name", ["folder", "pipe", "socket", "to-pipe"])
def test_special_files_are_not_replaced(name: str, tmp_path: Path) -> None:
    file = special(tmp_path)[name]
    before = left(tmp_path)
    with pytest.raises(BadRequest, match="not a regular file"):
        write_bytes(file, b"new", TRACE)
    assert left(tmp_path) == before


def test_a_file_that_changes_meanwhile_stays(tmp_path: Path) -> None:
    """Into another kind, a folder, or from nothing into somebody's file."""
    file = tmp_path / "file"
    for change in (lambda: file.write_bytes(b"mine"), file.mkdir, lambda: file.symlink_to("other")):
        (tmp_path / "other").write_bytes(b"mine")
        with pytest.raises(BadRequest), Output(file, TRACE) as output:
            change()
            output.commit()
        assert left(tmp_path) == ["file", "other"] and (tmp_path / "other").read_bytes() == b"mine"
        assert file.is_dir() or file.read_bytes() == b"mine"
        file.rmdir() if file.is_dir() else file.unlink()


def test_other_names_of_a_replaced_file_keep_it(tmp_path: Path) -> None:
    """Hard links and links: a name is replaced, nothing is written through it."""
    old = TRACE.prefix + b"old"
    (tmp_path / "file").write_bytes(old)
    os.link(tmp_path / "file", tmp_path / "hard")
    (tmp_path / "link").symlink_to("hard")
    write_bytes(tmp_path / "file", b"new", TRACE)
    write_bytes(tmp_path / "link", b"new", TRACE)
    assert (tmp_path / "hard").read_bytes() == old
    assert [(tmp_path / name).read_bytes() for name in ("file", "link")] == [b"new", b"new"]


def test_planted_names_are_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever guesses the name, and puts a link there, is refused."""
    monkeypatch.setattr(os, "urandom", lambda n: b"\0" * n)
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / f".penstock-{'00' * 8}.tmp").symlink_to("mine")
    with pytest.raises(FileExistsError):
        write_bytes(tmp_path / "file", b"new")
    assert (tmp_path / "mine").read_bytes() == b"mine" and not (tmp_path / "file").exists()


def test_two_at_once(tmp_path: Path) -> None:
    """Either one's content, whole."""
    contents = [json.dumps([i] * 100_000).encode() for i in range(4)]
    threads = [threading.Thread(target=write_bytes, args=(tmp_path / "file", each)) for each in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_bytes() in contents and left(tmp_path) == ["file"]


def test_a_name_that_just_fits(tmp_path: Path) -> None:
    write_bytes(tmp_path / ("n" * 255), b"new", TRACE)
    with pytest.raises(OSError, match="too long"):
        Output(tmp_path / ("n" * 256), TRACE)
    assert left(tmp_path) == ["n" * 255]
