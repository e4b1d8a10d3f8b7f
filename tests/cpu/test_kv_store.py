"""KV pages that outlive the server: prompts go on from them, and what is damaged or of others is not taken."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import BadRequest, StorageFailed
from penstock.graph.arenas import with_arenas
from penstock.serve.generation import Generation
from penstock.serve.keeper import Keeper
from penstock.serve.kv_store import KvStore, store_key
from penstock.serve.sampling import SamplingParams
from penstock.serve.service import Service
from penstock.spec.plan import Plan
from penstock.store.packed import open_packed
from tests.cpu.engines import load, make_model
from tests.cpu.kept_kv import PROMPT, SIZES, answered, store
from tests.plans import resident_plan

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "llama", "int4")


def plan(folder: Path) -> Plan:
    packed = open_packed(folder)
    return with_arenas(replace(resident_plan(packed.spec, packed.weights, **SIZES), kv_pages=6))


def ask(folder: Path, where: Path, *prompts: list[int], pages: int = 100, owner: str = "") -> list[Generation]:
    """What a server says that starts, answers one prompt after the other, with time between, and ends."""
    with load(folder, plan=plan(folder)) as engine:
        return answered(engine, where, prompts, PARAMS, pages, owner)


def files(where: Path) -> list[Path]:
    return sorted(where.glob("*/*.kv"))


def test_a_prompt_goes_on_after_a_restart(folder: Path, tmp_path: Path) -> None:
    first = ask(folder, tmp_path, PROMPT)[0]
    assert first.cached_tokens == 0 and len(files(tmp_path)) == 3  # of 203 tokens, by 64
    assert files(tmp_path)[0].parent.stat().st_mode & 0o77 == 0
    again, longer, other = ask(folder, tmp_path, PROMPT, [*PROMPT[:150], 7, 8], [9, *PROMPT[1:]])
    assert [a.cached_tokens for a in (again, longer, other)] == [192, 150, 0]  # it copies what `again` has of a page
    assert again.token_ids == first.token_ids
    assert ask(folder, tmp_path, PROMPT, owner="another")[0].cached_tokens == 0


def test_pages_come_back_that_memory_had_no_room_for(folder: Path, tmp_path: Path) -> None:
    """Pools hold six pages; three prompts of four each go through them twice."""
    texts = [np.random.default_rng(i).integers(0, 200, 200).tolist() for i in range(3)]
    with load(folder, plan=plan(folder)) as engine:
        expected = [engine.generate([ids], PARAMS)[0].token_ids for ids in texts]
    answers = [ask(folder, tmp_path, *texts) for _ in range(2)]
    assert [[a.token_ids for a in some] for some in answers] == [expected, expected]
    assert answers[1][0].cached_tokens == 192 and sum(a.cached_tokens for a in answers[1]) >= 384


@pytest.mark.parametrize("damage", ["flipped", "short", "gone", "folder"])
def test_a_damaged_page_is_not_taken(folder: Path, tmp_path: Path, damage: str) -> None:
    first = ask(folder, tmp_path, PROMPT)[0]
    for file in files(tmp_path)[:1]:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.unlink()
        if damage == "folder":
            file.mkdir()
        elif damage != "gone":
            file.write_bytes(content if damage == "flipped" else content[:-1])
    again = ask(folder, tmp_path, PROMPT)[0]
    assert again.token_ids == first.token_ids and again.cached_tokens < 192
    if damage != "folder":
        assert ask(folder, tmp_path, PROMPT)[0].cached_tokens == 192  # they were written anew


def test_so_many_pages_are_kept_and_no_more(folder: Path, tmp_path: Path) -> None:
    ask(folder, tmp_path, PROMPT, pages=2)
    assert len(files(tmp_path)) == 2
    ask(folder, tmp_path, PROMPT, pages=1)
    assert len(files(tmp_path)) == 1
    assert ask(folder, tmp_path, [1, 2, 3], pages=0) and not files(tmp_path)


def test_what_a_killed_process_left_is_removed(folder: Path, tmp_path: Path) -> None:
    ask(folder, tmp_path, PROMPT)
    inside = files(tmp_path)[0].parent
    (inside / ".penstock-0123456789abcdef.tmp").write_bytes(b"half")
    (inside / "notes.txt").write_bytes(b"somebody's own")
    with load(folder, plan=plan(folder)) as engine:
        assert len(store(engine, tmp_path)) == 3
    assert {file.suffix for file in inside.iterdir()} == {".kv", ".txt"}


def test_a_full_disk_pauses_keeping_and_nothing_else(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise StorageFailed("the disk is full")

    monkeypatch.setattr(KvStore, "save", fails)
    with pytest.warns(UserWarning, match="not kept for 60 s: the disk is full"):
        assert ask(folder, tmp_path, PROMPT)[0].token_ids
    assert not files(tmp_path)


def test_pages_are_kept_again_once_the_disk_has_room(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise StorageFailed("the disk is full")

    with load(folder, plan=plan(folder)) as engine:
        kept = store(engine, tmp_path)
        keeper = Keeper(engine.session, kept, pause_s=0.2)
        with monkeypatch.context() as patched, pytest.warns(UserWarning, match="not kept for 0 s: the disk is full"):
            patched.setattr(KvStore, "save", fails)
            keeper.keep(0, b"1" * 32)
        keeper.keep(0, b"2" * 32)  # too soon, or it is kept
        while not keeper.saves:
            time.sleep(0.01)
        keeper.keep(1, b"3" * 32)
        assert b"1" * 32 not in kept and b"3" * 32 in kept


def test_what_was_kept_before_the_disk_was_full_is_still_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(folder, tmp_path, PROMPT)[0]

    def fails(*_: object) -> None:
        raise StorageFailed("the disk is full")

    monkeypatch.setattr(KvStore, "save", fails)
    with pytest.warns(UserWarning, match="not kept for 60 s: the disk is full"):
        _, again = ask(folder, tmp_path, [5, *PROMPT[1:]], PROMPT)
    assert again.token_ids == first.token_ids and again.cached_tokens == 192


def test_what_gives_way_to_others_comes_back(folder: Path, tmp_path: Path) -> None:
    """Three answers that outgrow five pages together: some give their pages back, and go on later."""
    params, again = SamplingParams(max_tokens=150, ignore_eos=True), {}
    texts = [np.random.default_rng(i).integers(0, 200, 100).tolist() for i in range(3)]
    with load(folder, plan=with_arenas(replace(plan(folder), kv_pages=5))) as engine:
        expected = [engine.generate([ids], params)[0].token_ids for ids in texts]
        for swaps in (False, True):
            kept = store(engine, tmp_path / str(swaps))
            with closing(Service(engine, prompt_rows=8, queue=9, store=kept, swaps=swaps)) as service:
                assert [answer.token_ids for answer in service.generate(texts, params)] == expected
                counts = service.counts
            assert counts.given_back > 0
            again[swaps] = counts.prompt_tokens - 300
            assert again[swaps] < 64 * counts.given_back or not swaps  # what filled no whole page
    assert again[True] < again[False]


def test_pages_of_other_models_and_formats_lie_elsewhere(folder: Path) -> None:
    packed, made = open_packed(folder), plan(folder)
    assert packed.sums is not None
    keys = {store_key(made, packed.sums, False), store_key(made, packed.sums, True), store_key(made, b"other", False)}
    keys.add(store_key(replace(made, page_tokens=128), packed.sums, False))
    keys.add(store_key(resident_plan(packed.spec, packed.weights, **SIZES, kv="int8"), packed.sums, False))
    assert len(keys) == 5
    with pytest.raises(BadRequest, match="--no-verify"):
        store_key(made, None, False)
