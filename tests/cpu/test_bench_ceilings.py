"""`bench.ceilings` on files of any size: a small model's are smaller than one of its reads."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from bench import ceilings
from bench.ceilings import Ceilings
from penstock.units import MIB


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ceilings, "READ_S", 0.01)
    monkeypatch.setattr(ceilings, "ram_read_bytes_per_s", lambda threads: 1e9)
    return tmp_path


@pytest.mark.parametrize(("sizes", "block"), [((3 * 4096 + 5, 100), 3 * 4096), ((9 * MIB, 4096), 8 * MIB)])
def test_a_read_is_no_larger_than_the_largest_file(folder: Path, sizes: tuple[int, ...], block: int) -> None:
    files = [folder / str(size) for size in sizes]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(bytes(size))
    with closing(Ceilings(files)) as found:
        reading = found.read()
    assert reading.block_bytes == block and reading.disk_read_bytes_per_s > 0


def test_files_of_less_than_a_page_end_the_bench(folder: Path) -> None:
    (folder / "few").write_bytes(bytes(4095))
    with pytest.raises(SystemExit, match="no file has a page"):
        Ceilings([folder / "few"])
