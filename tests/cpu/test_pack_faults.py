"""Packing on a full disk, interrupted, killed, twice at once; and within bounded memory."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadRequest, StorageFailed
from penstock.spec.format import Format, parse_format
from penstock.store import writer
from penstock.store.header import read_header
from penstock.store.pack import pack, verify
from penstock.store.synth import synth
from penstock.units import MIB
from tests.cpu.checkpoints import (
    LLAMA,
    folder_bytes,
    random_tensors,
    save_checkpoint,
    save_tensors,
)

SMALL_SHARDS = 100_000  # LLAMA in float32 becomes 8 shards


def partial_is_clean(partial: Path) -> int:
    """No half-written file; the number of whole shards."""
    assert not list(partial.glob("*.tmp"))
    shards = list(partial.glob("model-*.safetensors"))
    for shard in shards:
        header = read_header(shard)
        assert header.file_bytes == max(tensor.offset + tensor.nbytes for tensor in header.tensors.values())
    return len(shards)


def test_full_disk_is_seen_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    monkeypatch.setattr(writer, "free_bytes", lambda folder: 5000)
    with pytest.raises(StorageFailed, match=r"too full: .* needs .* 4\.88 KiB are free") as caught:
        pack(tmp_path / "src", tmp_path / "dst")
    assert caught.value.numbers["have_bytes"] == 5000 < caught.value.numbers["need_bytes"]
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_full_disk_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    pack(tmp_path / "src", tmp_path / "whole", shard_bytes=SMALL_SHARDS)
    true_pwrite, room = os.pwrite, 250_000

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = true_pwrite(fd, data[:room], offset)
        room -= count
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StorageFailed, match=r"disk became full: .* finished shards are kept") as caught:
        pack(tmp_path / "src", tmp_path / "dst", shard_bytes=SMALL_SHARDS)
    assert caught.value.numbers["need_bytes"] > 0 and "\n" not in caught.value.message
    assert not (tmp_path / "dst").exists()
    kept = partial_is_clean(tmp_path / "dst.partial")
    assert kept >= 1
    monkeypatch.undo()
    first_done: list[int] = []
    pack(tmp_path / "src", tmp_path / "dst", None, lambda done, *_: first_done.append(done), SMALL_SHARDS)
    assert first_done[0] > kept * 4096  # it went on, it did not start over
    assert folder_bytes(tmp_path / "dst") == folder_bytes(tmp_path / "whole")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_a_disk_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)], capture_output=True).returncode:
        pytest.skip("no right to mount")
    try:
        save_checkpoint(tmp_path / "src", LLAMA)
        with pytest.raises(StorageFailed, match="too full"):
            pack(tmp_path / "src", small / "dst", shard_bytes=SMALL_SHARDS)
        true_free = writer.free_bytes
        monkeypatch.setattr(writer, "_require_room", lambda partial, need: None)
        with pytest.raises(StorageFailed, match="became full"):
            pack(tmp_path / "src", small / "dst", shard_bytes=SMALL_SHARDS)
        assert partial_is_clean(small / "dst.partial") >= 1
        with pytest.raises(StorageFailed, match="became full"):
            synth(tmp_path / "src", small / "other")
        assert not (small / "other.partial").exists() and true_free(small) > 0
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    pack(tmp_path / "src", tmp_path / "direct")
    true_open, true_pwrite, refusals = os.open, os.pwrite, 0

    def no_direct_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "")
        return true_open(path, flags, *args, **kwargs)

    def refuse_once(fd: int, data: memoryview, offset: int) -> int:
        nonlocal refusals
        refusals += 1
        if refusals == 1:
            raise OSError(errno.EINVAL, "")
        return true_pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_direct_open)
        pack(tmp_path / "src", tmp_path / "buffered")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse_once)
        pack(tmp_path / "src", tmp_path / "late")
    assert folder_bytes(tmp_path / "direct") == folder_bytes(tmp_path / "buffered") == folder_bytes(tmp_path / "late")


# Packs and stands still, once `stop` bytes are done, until it is told otherwise.
CHILD = """
    import sys, time
    from pathlib import Path
    from penstock.store.pack import pack
    def progress(done, total, key):
        if done >= {stop}:
            print("stopped", flush=True)
            time.sleep(600)
    spread = Path(sys.argv[3]) if sys.argv[3:] else None
    pack(Path(sys.argv[1]), Path(sys.argv[2]), None, progress, {shard_bytes}, spread)
"""


def interrupt(src: Path, dst: Path, how: signal.Signals, stop: int, *spread: Path) -> subprocess.Popen[str]:
    code = textwrap.dedent(CHILD).format(stop=stop, shard_bytes=SMALL_SHARDS)
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, (src, dst, *spread))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "stopped\n", child.communicate()[1]
    child.send_signal(how)
    child.communicate(timeout=600)
    return child


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_pack_goes_on_to_the_same_bytes(tmp_path: Path, how: signal.Signals) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    pack(tmp_path / "src", tmp_path / "whole", shard_bytes=SMALL_SHARDS)
    child = interrupt(tmp_path / "src", tmp_path / "dst", how, stop=300_000)
    assert child.returncode in (-how, 130)
    assert not (tmp_path / "dst").exists()
    if how == signal.SIGINT:
        assert partial_is_clean(tmp_path / "dst.partial") >= 2
    else:
        assert list((tmp_path / "dst.partial").glob("*.tmp"))
    calls: list[int] = []
    pack(tmp_path / "src", tmp_path / "dst", None, lambda done, *_: calls.append(done), SMALL_SHARDS)
    assert calls[0] > 100_000
    assert folder_bytes(tmp_path / "dst") == folder_bytes(tmp_path / "whole")
    assert not (tmp_path / "dst.partial").exists()


def test_a_kill_while_the_second_disk_is_written(tmp_path: Path) -> None:
    """The half of a shard that lies there is cleared away."""
    save_checkpoint(tmp_path / "src", LLAMA)
    pack(tmp_path / "src", tmp_path / "whole", shard_bytes=SMALL_SHARDS, spread=tmp_path / "far")
    interrupt(tmp_path / "src", tmp_path / "dst", signal.SIGKILL, 400_000, tmp_path / "far")
    assert list((tmp_path / "far" / "dst").glob("*.tmp"))
    pack(tmp_path / "src", tmp_path / "dst", None, None, SMALL_SHARDS, tmp_path / "far")
    assert folder_bytes(tmp_path / "dst") == folder_bytes(tmp_path / "whole")
    assert not list((tmp_path / "far" / "dst").glob("*.tmp"))


def test_an_interrupt_before_the_first_shard_leaves_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    interrupt(tmp_path / "src", tmp_path / "dst", signal.SIGINT, stop=1)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_changed_source_or_format_starts_over(tmp_path: Path) -> None:
    def stop_late(done: int, total: int, key: str) -> None:
        if done > 300_000:
            raise KeyboardInterrupt

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            pack(tmp_path / "src", tmp_path / "dst", None, stop_late, SMALL_SHARDS)
        assert partial_is_clean(tmp_path / "dst.partial") >= 2

    def first_done(weights: Format | None) -> int:
        calls: list[int] = []
        pack(tmp_path / "src", tmp_path / "dst", weights, lambda done, *_: calls.append(done), SMALL_SHARDS)
        verify(tmp_path / "dst")
        shutil.rmtree(tmp_path / "dst")
        return calls[0]

    save_checkpoint(tmp_path / "src", LLAMA)
    interrupted()
    assert first_done(parse_format("bfloat16")) < 100_000
    interrupted()
    assert first_done(None) > 100_000
    interrupted()
    (tmp_path / "dst.partial/resume.json").write_text("{")
    assert first_done(None) < 100_000
    interrupted()
    save_tensors(tmp_path / "src/model.safetensors", random_tensors(LLAMA, seed=7))
    assert first_done(None) < 100_000
    interrupted()
    shard = tmp_path / "dst.partial/model-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert first_done(None) < 100_000


def test_two_processes_do_not_write_one_destination(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    refusals: list[str] = []

    def second(done: int, total: int, key: str) -> None:
        if not refusals:
            with pytest.raises(BadRequest, match="another process is writing") as caught:
                pack(tmp_path / "src", tmp_path / "dst")
            refusals.append(caught.value.message)

    pack(tmp_path / "src", tmp_path / "dst", progress=second)
    assert len(refusals) == 1
    verify(tmp_path / "dst")


BIG = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "head_dim": 64}
BIG |= {"num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 8000}

PEAK = """
    import sys
    from pathlib import Path
    from penstock.spec.format import parse_format
    from penstock.store.pack import pack
    pack(Path(sys.argv[1]), Path(sys.argv[2]), parse_format("int4"))
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def cached_share(file: Path) -> float | None:
    """Share of a file's pages that are in the page cache; None where the file system does not say."""
    found = []
    fd = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # else asking for one page reads those behind it
        for offset in range(0, file.stat().st_size, MIB // 2):
            try:
                found.append(os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1)
            except BlockingIOError:
                found.append(False)
            except OSError:
                return None
    finally:
        os.close(fd)
    return sum(found) / len(found)


def test_peak_memory_and_page_cache(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", BIG)
    source = tmp_path / "src/model.safetensors"
    assert source.stat().st_size > 250 * MIB
    fd = os.open(source, os.O_RDONLY)
    os.fsync(fd)  # pages that are not on the disk yet cannot be dropped
    os.close(fd)
    code = [sys.executable, "-c", textwrap.dedent(PEAK), str(tmp_path / "src"), str(tmp_path / "dst")]
    result = subprocess.run(code, capture_output=True, text=True, check=True)
    match = re.search(r"(\d+) kB", result.stdout)
    assert match is not None
    # The interpreter with numpy takes 35 MiB, two stages 16, the kept tensor 16, granules in flight 25.
    assert int(match[1]) / 1024 < 160
    for file in (source, tmp_path / "dst/model-00001.safetensors"):
        share = cached_share(file)
        assert share is None or share < 0.1
