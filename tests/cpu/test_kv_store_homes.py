"""KV pages that outlive the server, wherever KV lies: on a disk, in RAM behind windows, in memory of a device."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path

import pytest

from penstock import _native
from penstock.errors import BadRequest, StorageFailed
from penstock.graph.arenas import Layout
from penstock.runtime import kv_pages
from penstock.runtime.kv_file import KvFile
from penstock.serve.engine import Engine
from penstock.serve.generation import Generation
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.serve.service import Service
from penstock.serve.told import Ended, Failed
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.plan import Plan, Unit
from penstock.store.packed import open_packed
from penstock.store.synth import synth
from tests.cpu.commands import MACHINE
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.engines import make_model, streaming
from tests.cpu.kept_kv import PROMPT, SIZES, answered, store
from tests.cpu.services import Heard
from tests.plans import make_plan

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=3)
HOMES = ["RAM", "a disk", "a disk for some", "RAM through windows", "a device"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "llama", "int4")


def plan(folder: Path, home: str, kv: str = "float32", **more: int) -> Plan:
    sizes: dict[str, int] = SIZES | more
    packed = open_packed(folder)
    layers = range(len(packed.spec.layers))
    if home in ("RAM", "a disk", "a disk for some"):
        spilled = {"RAM": (), "a disk": layers, "a disk for some": (1,)}[home]
        return streaming(packed, kv_spilled=frozenset(spilled), kv=kv, **sizes)  # type: ignore[arg-type]
    units = [Unit(part.key, 0, part.granules, "gpu0", "gpu0", "gpu0") for part in packed.parts.values()]
    stage = max(part.granule_bytes for part in packed.parts.values())
    homes = [("host" if home == "RAM through windows" else "gpu0", "gpu0") for _ in layers]
    return make_plan(
        packed.spec, packed.weights, units, ring_bytes={}, stage_bytes=stage, main="gpu0", kv_homes=homes, kv=kv,
        **sizes,  # type: ignore[arg-type]
    )  # fmt: skip


def opened(folder: Path, home: str, kv: str = "float32") -> closing[Engine]:
    device = "emulated" if home in ("RAM through windows", "a device") else "none"
    how = Loading(machine=MACHINE, plan=plan(folder, home, kv), device=device)
    return closing(Engine.load(folder, Ask(), how))


def ask(folder: Path, home: str, where: Path, *prompts: list[int], pages: int = 100) -> list[Generation]:
    """What a server says that starts, answers one prompt after the other, with time between, and ends."""
    with opened(folder, home) as engine:
        engine.session.kv_pages.require_seen()
        return answered(engine, where, prompts, PARAMS, pages)


def said(answer: Generation) -> object:
    """Its tokens and their log probabilities, to the bit: a wrong page would show in these."""
    return answer.token_ids, answer.logprobs


def page_tokens(folder: Path, home: str) -> int:
    made = plan(folder, home)
    return made.page_tokens * Layout(made).kv.page_group


@pytest.mark.parametrize("home", HOMES)
def test_a_prompt_goes_on_after_a_restart(folder: Path, tmp_path: Path, home: str) -> None:
    with opened(folder, home) as engine:
        expected = said(engine.generate([PROMPT], PARAMS)[0])
        longer = said(engine.generate([[*PROMPT[:150], 7, 8]], PARAMS)[0])
    tokens = page_tokens(folder, home)
    first = ask(folder, home, tmp_path, PROMPT)[0]
    assert first.cached_tokens == 0 and len(list(tmp_path.glob("*/*.kv"))) == 203 // tokens
    again, other = ask(folder, home, tmp_path, PROMPT, [*PROMPT[:150], 7, 8])
    assert again.cached_tokens == 199 // tokens * tokens > 0 and other.cached_tokens >= 150 // tokens * tokens > 0
    assert said(first) == said(again) == expected and said(other) == longer


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("damage", ["flipped", "short"])
def test_a_damaged_page_is_not_taken(folder: Path, tmp_path: Path, home: str, damage: str) -> None:
    first = ask(folder, home, tmp_path, PROMPT)[0]
    file = sorted(tmp_path.glob("*/*.kv"))[0]
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content if damage == "flipped" else content[:-4096])
    again = ask(folder, home, tmp_path, PROMPT)[0]
    whole = ask(folder, home, tmp_path, PROMPT)[0]
    assert said(again) == said(whole) == said(first)
    assert again.cached_tokens < whole.cached_tokens == 199 // page_tokens(folder, home) * page_tokens(folder, home)


def test_so_many_pages_are_kept_and_no_more(folder: Path, tmp_path: Path) -> None:
    ask(folder, "a disk", tmp_path, PROMPT, pages=1)
    assert len(list(tmp_path.glob("*/*.kv"))) == 1


def test_pages_that_fill_whole_blocks_together(tmp_path: Path) -> None:
    """Four pages of int8 fill blocks of the disk, and are kept together, those in RAM too."""
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads(TINY_CONFIGS["llama"]), "max_position_embeddings": 512})
    )
    folder = synth(tmp_path / "config.json", tmp_path / "packed", parse_format("int4"))
    made, prompt = plan(folder, "a disk for some", "int8", context=512), (PROMPT * 2)[:300]
    assert made.page_tokens * Layout(made).kv.page_group == 256
    found = []
    for _ in range(2):
        with closing(Engine.load(folder, Ask(), Loading(machine=MACHINE, plan=made))) as engine:
            alone = engine.generate([prompt], PARAMS)[0]
            with closing(Service(engine, prompt_rows=8, queue=9, store=store(engine, tmp_path / "kv"))) as service:
                found.append(service.generate([prompt], PARAMS)[0])
    assert [answer.cached_tokens for answer in found] == [0, 256]
    assert said(found[0]) == said(found[1]) == said(alone)


def test_one_home_finds_what_another_one_kept(folder: Path, tmp_path: Path) -> None:
    assert page_tokens(folder, "RAM") == page_tokens(folder, "a disk")
    first = ask(folder, "RAM", tmp_path, PROMPT)[0]
    for home in ("a disk", "a disk for some", "RAM"):
        again = ask(folder, home, tmp_path, PROMPT)[0]
        assert again.cached_tokens == 192 and said(again) == said(first)


def test_what_lies_on_a_disk_goes_through_one_buffer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is smaller than K of one layer here."""
    made, sizes = list[int](), list[int]()
    memory = _native.Memory

    def counted(nbytes: int, huge: bool = True) -> _native.Memory:
        made.extend([nbytes] if nbytes == 4096 else [])
        return memory(nbytes, huge)

    monkeypatch.setattr(kv_pages, "_BUFFER_BYTES", 4096)
    monkeypatch.setattr(_native, "Memory", counted)
    first = ask(folder, "a disk", tmp_path, PROMPT)[0]
    with opened(folder, "a disk") as engine:
        slot = engine.session.lowering.layout.kv.page_slots(0)[0]
        sizes += [part.nbytes for part in engine.session.kv_pages.read(0)]
        assert max(sizes) == 4096 < slot.nbytes and sum(sizes) == engine.session.kv_pages.page_bytes
    assert made == [4096, 4096]  # one a session
    assert said(ask(folder, "a disk", tmp_path, PROMPT)[0]) == said(first)


@pytest.mark.parametrize("what", ["write", "read"])
def test_a_disk_that_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Where a page cannot be written to its home, its request fails, and the next one does without. Where it cannot be
    read to be kept, no more are kept for a while."""
    first = ask(folder, "a disk", tmp_path, PROMPT)[0]

    def fails(*_: object) -> None:
        raise StorageFailed("the disk is gone")

    with opened(folder, "a disk") as engine, closing(
        Service(engine, prompt_rows=8, queue=9, store=store(engine, tmp_path))
    ) as service:  # fmt: skip
        if what == "read":
            heard = Heard()
            with pytest.warns(UserWarning, match="not kept for 60 s: the disk is gone"):
                monkeypatch.setattr(engine.session.kv_pages, "read", fails)
                service.submit([9, *PROMPT[1:]], PARAMS, heard.tell)
                assert isinstance(heard.end()[1], Ended)
                while service._unsaved():
                    time.sleep(0.01)
            return
        heard, again = Heard(), Heard()
        with monkeypatch.context() as patched:
            patched.setattr(KvFile, "write", fails)
            service.submit(PROMPT, PARAMS, heard.tell)
            _, told = heard.end()
        assert isinstance(told, Failed) and "the disk is gone" in str(told.error)
        service.submit(PROMPT, PARAMS, again.tell)
        _, ended = again.end()
        assert isinstance(ended, Ended) and said(ended.answer) == said(first)


def test_a_save_that_fails_after_its_pass_is_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on while the pass has ended already; whoever wants the pages hears of it."""
    with opened(folder, "a disk") as engine:
        session, drain = engine.session, engine.session._executor.drain

        def fails() -> None:
            drain()
            raise StorageFailed("the disk is full")

        monkeypatch.setattr(session._executor, "drain", fails)
        with pytest.raises(StorageFailed):
            session.settled_kv()
        assert len(engine.generate([PROMPT], PARAMS)[0].token_ids) == 4


def test_what_a_failed_save_left_is_not_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of an answer saves are waited for. Where one fails the answer is there, and its KV is not."""
    with opened(folder, "a disk") as engine:
        session, first = engine.session, engine.generate([PROMPT], PARAMS)[0]
        drain = session._executor.drain

        def fails() -> None:
            drain()
            raise StorageFailed("the disk is full")

        monkeypatch.setattr(session._executor, "drain", fails)
        session.drain()
        again = engine.generate([PROMPT], PARAMS)[0]
        assert again.token_ids == first.token_ids and again.cached_tokens == 0


def test_a_service_does_not_go_on_from_what_was_not_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves may be waited for by others than the service, between two of its requests."""
    with opened(folder, "a disk") as engine, closing(Service(engine, prompt_rows=8, queue=9)) as service:
        session, executor, answers = engine.session, engine.session._executor, []
        drain = executor.drain

        def fails() -> None:
            drain()
            raise StorageFailed("the disk is full")

        for _ in range(3):
            heard = Heard()
            service.submit(PROMPT, PARAMS, heard.tell)
            _, told = heard.end()
            assert isinstance(told, Ended) and service.idle(600)
            answers.append(told.answer)
            with engine.held(), monkeypatch.context() as patched:
                if len(answers) == 2:
                    patched.setattr(executor, "drain", fails)
                session.drain()
    assert [said(answer) for answer in answers[1:]] == [said(answers[0])] * 2
    assert [answer.cached_tokens > 0 for answer in answers] == [False, True, False]


def test_a_gpus_memory_is_refused_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated device's can be seen; a GPU's cannot."""
    with opened(folder, "a device") as engine:
        pages = engine.session.kv_pages
        pages.require_seen()
        monkeypatch.setattr(pages._arenas, "sees", lambda arena: not arena.startswith("gpu0"))
        with pytest.raises(BadRequest, match="GPU's memory cannot be kept yet: leave out --keep-kv"):
            pages.require_seen()
