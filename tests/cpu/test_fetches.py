"""Single rows of an embedding, read from the disk while it computes nothing: several on their way at once."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock import _native
from penstock.errors import StorageFailed
from penstock.runtime.movers import DiskReader
from penstock.spec.machine import FETCHED_AT_ONCE
from penstock.store.packed import Packed, open_packed
from tests.cpu.engines import GREEDY, load, make_model, streaming


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return open_packed(make_model(tmp_path_factory.mktemp("made"), "qwen3", "float32"))


@pytest.mark.parametrize("slots", [1, 2, 3, FETCHED_AT_ONCE])
def test_granules_come_in_order_and_stay_until_the_next(packed: Packed, slots: int) -> None:
    part = packed.parts["embed"]
    granules = [g % part.granules for g in (3, 0, 1, 1, 2, 5, 4, 0, 3, 7, 6)]
    whole = np.concatenate([np.fromfile(file, np.uint8) for file in packed.files])
    memory = _native.Memory(slots * part.granule_bytes, True)
    with closing(DiskReader(packed, 1 << 20, 2, "threads")) as reader:
        staged = np.frombuffer(memory, np.uint8)
        for n, nbytes in enumerate(reader.fetch("embed", granules, memory.address, slots)):
            place = reader.place("embed", granules[n], granules[n] + 1)
            at = n % slots * part.granule_bytes
            assert nbytes == part.granule_bytes
            assert np.array_equal(staged[at : at + nbytes], whole[place.offset : place.offset + nbytes])
        assert reader.bytes_read == len(granules) * part.granule_bytes


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_a_file_that_ends_early_fails_and_leaves_nothing_under_way(packed: Packed, engine: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(packed.folder, tmp_path / "model"))
    cut = open_packed(folder, verify=False)
    part = cut.parts["embed"]
    memory = _native.Memory(FETCHED_AT_ONCE * part.granule_bytes, True)
    with closing(DiskReader(cut, 1 << 20, 2, engine)) as reader:
        last = reader.place("embed", part.granules - 1, part.granules)
        os.truncate(last.path, last.offset)
        granules = [0, 1, part.granules - 1, *range(2, 9)]
        with pytest.raises(StorageFailed, match="truncated while in use"):
            list(reader.fetch("embed", [g % part.granules for g in granules], memory.address, FETCHED_AT_ONCE))
    memory.close()


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_answers_are_those_of_an_embedding_in_memory(packed: Packed, rows: int) -> None:
    """Repeated tokens, and more granules than are on their way at once."""
    prompt = [(i * i) % 97 for i in range(rows)]
    with load(packed.folder) as engine:
        expected = list(engine.generate_ids(prompt, GREEDY))
    with load(packed.folder, streaming(packed)) as engine:
        assert list(engine.generate_ids(prompt, GREEDY)) == expected
