"""A byte that is not what was packed is met before it is computed on, wherever it lies and however it is read."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import LLM, SamplingParams, _native
from penstock.errors import BadRequest, BrokenModel, DamagedModel
from penstock.graph import passes
from penstock.runtime.device.emulated import EmulatedDevice
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.session import Session
from penstock.serve.tokenizer import Tokenizer
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.plan import Plan
from penstock.store.pack import pack, verify
from penstock.store.packed import Packed, has_sums, open_packed
from penstock.store.synth import synth
from tests.cpu.checkpoints import LLAMA, save_checkpoint, save_tokenizer
from tests.cpu.commands import MACHINE, Call, refused
from tests.cpu.engines import GREEDY, load, streaming
from tests.cpu.placements import PROMPTS, STEPS, Logits, Models
from tests.cpu.sealed import as_version_2, damaged, edit, flip
from tests.cpu.test_emulated import FAST, ROOMY
from tests.cpu.test_engine_faults import READS, soon
from tests.left_open import open_now
from tests.plans import device_plans, random_plans

PROMPT = list(range(40))
DAMAGED = "is damaged"


def answer(session: Session) -> np.ndarray:
    """What tests.cpu.test_placement.run computes, by a session that stays open."""
    plan = session.plan
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, plan.target.spec.vocab, n).astype(np.int32) for n in PROMPTS]
    found = []
    for seq, ids in enumerate(prompts):
        for p in passes.prefill(plan, seq, len(ids), passes.DECODE if seq else None, score=True):
            batch = p.batches[0]
            found.append(session.step(p, [ids[batch.start[0] : batch.start[0] + batch.rows[0]]])[0].copy())
    for step in range(STEPS):
        p = passes.decode(plan, (0, 1), tuple(n + step for n in PROMPTS), passes.DECODE if step + 1 < STEPS else None)
        tokens = [np.full(len(b.seqs), 7 + step, np.int32) for b in p.batches]
        found += [logits.copy() for logits in session.step(p, tokens)]
    return np.concatenate(found)


def meets(packed: Packed, plan: Plan, expected: np.ndarray | None, data: st.DataObject, device: bool) -> None:
    """With one byte of one granule changed: the load or a pass fails and names it, or the granule was not needed. The
    session, where there is one, then gives the right answer from the mended file."""
    part = data.draw(st.sampled_from(list(packed.parts.values())))
    granule = data.draw(st.integers(0, part.granules - 1))
    byte, change = data.draw(st.integers(0, part.granule_bytes - 1)), data.draw(st.integers(1, 255))
    file, *_ = packed.locate(part.key, 0, 0)
    says = f"{file}: granule {granule} of part {part.key} {DAMAGED}"

    def new() -> Session:
        return Session(packed, plan, device=EmulatedDevice(ROOMY, FAST) if device else None)

    session = None
    with damaged(packed, part.key, granule, byte, change):
        try:
            session = new()
            found = answer(session)
        except DamagedModel as error:
            assert error.message.startswith(says) and "\n" not in error.message
            assert error.numbers == {"file": str(file), "part": part.key, "granule": granule}
            if session is not None:
                with pytest.raises(DamagedModel):  # it was not taken for right meanwhile
                    answer(session)
        else:
            assert part.key == "embed"  # rows that nobody asked for
            assert expected is None or np.array_equal(found, expected)
    session = session or new()
    found = answer(session)
    session.close()
    if expected is None:  # two executors add up in an order of their own: the same plan once more
        other = new()
        expected = answer(other)
        other.close()
    assert np.array_equal(found, expected)


@pytest.mark.fuzz
@settings(max_examples=settings.default.max_examples // 3)  # each takes several passes
@given(st.data())
def test_any_placement_meets_it(models: Models, oracle: Logits, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(models)))
    packed = models[name]
    plan = data.draw(random_plans(packed.spec, packed.weights, batch_seqs=2))
    meets(packed, plan, oracle[name, "float32"], data, device=False)


@pytest.mark.fuzz
@settings(max_examples=settings.default.max_examples // 3)  # each takes several passes
@given(st.data())
def test_any_placement_beside_a_device_meets_it(models: Models, data: st.DataObject) -> None:
    packed = models[data.draw(st.sampled_from(sorted(models)))]
    plan = data.draw(device_plans(packed.spec, packed.weights, batch_seqs=2))
    meets(packed, plan, None, data, device=True)


# --- by every way to read --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several shards, an embedding apart from the head, and small files of every sort."""
    folder = tmp_path_factory.mktemp("made")
    config = {**LLAMA, "vocab_size": 300}
    save_checkpoint(folder / "source", config)
    save_tokenizer(folder / "source", config)
    (folder / "source" / "LICENSE").write_text("Do as you like.\n")
    (folder / "source" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return pack(folder / "source", folder / "model", parse_format("int4"), shard_bytes=100_000)


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


@pytest.fixture(scope="module")
def expected(made: Path) -> list[int]:
    with load(made, context=128) as engine:
        return list(engine.generate_ids(PROMPT, GREEDY))


def answered(folder: Path, **how: Any) -> list[int]:
    with load(folder, context=128, **how) as engine:
        return list(engine.generate_ids(PROMPT, GREEDY))


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "open_direct", lambda path: (os.open(path, os.O_RDONLY | os.O_CLOEXEC), False))


@pytest.mark.thinned(5)
@pytest.mark.filterwarnings("ignore:.*refuses direct reads")
@pytest.mark.parametrize("buffered", [False, True], ids=["direct", "buffered"])
@pytest.mark.parametrize("serial", [False, True], ids=["overlapped", "serial"])
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("part", ["embed", "1.norms", "0.attn", "1.ffn", "head"])
def test_streamed(
    part: str, reads: str, serial: bool, buffered: bool, model: Path, expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The engine refuses, again and again; where the file is mended while it is open, it answers."""
    if buffered:
        refuse_direct(monkeypatch)
    packed, before = open_packed(model), open_now()
    plan = streaming(packed, context=128, chunk_rows=16, **READS[reads])

    def loaded() -> Engine:
        return Engine.load(model, Ask(), Loading(machine=MACHINE, plan=plan, serial=serial))

    with damaged(packed, part, 0, 100, 4):
        if part == "1.norms":
            with pytest.raises(DamagedModel, match=f"granule 0 of part {part} {DAMAGED}"):
                soon(loaded)
            assert not open_now() - before
            return
        engine = soon(loaded)
        for _ in range(2):
            with pytest.raises(DamagedModel, match=f"granule 0 of part {part} {DAMAGED}"):
                soon(lambda: engine.generate_ids(PROMPT, GREEDY))
    assert soon(lambda: engine.generate_ids(PROMPT, GREEDY)) == expected
    # What was right once is not compared again: a disk that turns bad later is not noticed.
    with damaged(packed, part, 0, 100, 4):
        soon(lambda: engine.generate_ids(PROMPT, GREEDY))
    soon(engine.close)
    assert not open_now() - before


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs")
@pytest.mark.parametrize("resident", [None, 0], ids=["resident", "streamed"])
def test_in_memory_of_the_system(made: Path, expected: list[int], resident: int | None) -> None:
    folder = Path("/dev/shm") / f"penstock-test-{os.getpid()}"
    try:
        shutil.copytree(made, folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some of them take direct reads, some do not
            assert answered(folder, resident_bytes=resident) == expected
            with damaged(open_packed(folder), "0.ffn", 2, 5, 1), pytest.raises(DamagedModel, match=r"of part 0\.ffn"):
                answered(folder, resident_bytes=resident)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("how", [{}, {"resident_bytes": 0}, {"kv_home": "disk"}], ids=str)
def test_planned(how: dict[str, Any], model: Path, expected: list[int]) -> None:
    """With KV on the disk too, whose reads are compared with nothing."""
    packed = open_packed(model)
    assert answered(model, **how) == expected
    with damaged(packed, "1.attn", 1, 9, 128), pytest.raises(DamagedModel, match=r"granule 1 of part 1\.attn"):
        answered(model, **how)


def test_without_checks_it_is_computed_on(model: Path) -> None:
    ask = Ask(context=128, score=True)
    found = []
    for verify_ in (True, False):
        engine = Engine.load(model, ask, Loading(machine=MACHINE, verify=verify_))
        found.append(engine.logits(PROMPT))
        engine.close()
        file, offset, nbytes = open_packed(model).locate("1.ffn", 0, 1)
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(bytes(nbytes))
    assert not np.array_equal(*found)


# --- any byte of any file --------------------------------------------------------------------------------------------


def test_an_element_type_that_a_bit_made(model: Path) -> None:
    """It is damage, which a cached copy is packed again for, and no kind of model that we do not know."""
    shard = model / "model-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content.replace(b'"U8"', b'"T8"', 1))
    with pytest.raises(BrokenModel, match=r"unknown element type 'T8'; pack the checkpoint again"):
        open_packed(model)


@pytest.mark.fuzz
@given(st.data())
def test_one_byte_of_any_file(
    made: Path, expected: list[int], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """`verify` refuses it; loading and answering do, or give the right answer without having needed it."""
    folder = tmp_path_factory.mktemp("flip")
    for file in made.iterdir():
        os.link(file, folder / file.name)
    name = data.draw(st.sampled_from(sorted(file.name for file in folder.iterdir())))
    content = bytearray((folder / name).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    (folder / name).unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(BrokenModel) as caught:
        verify(folder)
    assert name in caught.value.message and "\n" not in caught.value.message
    plan = streaming(open_packed(made), context=128, chunk_rows=16) if data.draw(st.booleans()) else None
    try:
        Tokenizer.open(folder)
        with load(folder, plan, context=128) as engine:
            found = engine.generate_ids(PROMPT, GREEDY)
    except BrokenModel as error:
        assert error.exit_code == 2 and name in error.message and "\n" not in error.message
    else:
        assert plan is not None and found == expected
    shutil.rmtree(folder)


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def break_it(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return break_it


def sums_of_another(folder: Path) -> None:
    other = synth(folder, folder.with_name("other"), parse_format("int4"))
    shutil.copy(other / "penstock.sums", folder / "penstock.sums")


def byte_of_a_shard(folder: Path) -> None:
    packed = open_packed(folder)
    file, offset, _ = packed.locate("1.ffn", 1, 2)
    flip(file, offset + 77, 1)


SHARD = "model-00001.safetensors"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "config": (changed("config.json", lambda c: c.replace(b"1e-05", b"2e-05")), "config.json is damaged"),
    "config, longer": (changed("config.json", lambda c: c + b"\n"), "config.json has"),
    "tokenizer": (changed("tokenizer.json", lambda c: c.replace(b'"A": 65', b'"A": 66')), "tokenizer.json is damaged"),
    "template": (changed("chat_template.jinja", lambda c: c.replace(b"[0]", b"[-1]")), "chat_template.jinja has"),
    "license": (changed("LICENSE", lambda c: c.upper()), "LICENSE is damaged"),
    "manifest": (changed("penstock.json", lambda c: c.replace(b'"rows": 1', b'"rows": 2')), "penstock.json is damaged"),
    "header": (changed(SHARD, lambda c: c.replace(b" ", b"\t", 1)), f"{SHARD} is damaged: its header"),
    "sums cut": (changed("penstock.sums", lambda c: c[:-8]), "penstock.sums has"),
    "sums gone": (lambda folder: (folder / "penstock.sums").unlink(), "penstock.sums is missing"),
    "sums of another": (sums_of_another, "penstock.sums is damaged"),
    "a license gone": (lambda folder: (folder / "LICENSE").unlink(), "LICENSE is missing"),
    "one more that would be used": (
        lambda folder: (folder / "special_tokens_map.json").write_text("{}") and None,
        "special_tokens_map.json was not there when the model was packed",
    ),
    "weights": (byte_of_a_shard, "granule 1 of part 1.ffn is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_commands_refuse_in_one_line(name: str, call: Call, model: Path, tmp_path: Path) -> None:
    breaks, says = BROKEN[name]
    (tmp_path / "text").write_text("some text")
    breaks(model)
    kind = None if "gone" in name else "DamagedModel"
    for command in (
        ("run", model, "\x01", "--max-tokens", 3),
        ("run", model, "\x01", "--max-tokens", 3, "--resident", 0),
        ("eval", model, tmp_path / "text"),
        ("pack", "--verify", model),
    ):
        refused(call(*command), says, kind)


@pytest.mark.parametrize("name", ["config", "template", "header", "sums cut", "sums gone", "weights", "license"])
def test_who_means_it_runs_all_the_same(name: str, call: Call, model: Path, cache: Path, tmp_path: Path) -> None:
    BROKEN[name][0](model)
    (tmp_path / "text").write_text("some text")
    found = call("run", model, "\x01", "--max-tokens", 3, "--no-verify", "--ignore-eos")
    assert found.code == 0 and found.report["output_tokens"] == 3, found
    assert "version" not in found.err
    assert call("eval", model, tmp_path / "text", "--no-verify").code == 0
    with LLM(model, verify=False, cache=cache) as llm:
        assert len(llm.generate("\x01", SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_what_nobody_uses_may_lie_beside(call: Call, model: Path) -> None:
    (model / "README.md").write_text("mine")
    assert call("pack", "--verify", model).code == 0
    assert call("run", model, "\x01", "--max-tokens", 2).code == 0


# --- packed by an older version --------------------------------------------------------------------------------------


def test_an_older_pack_runs_with_a_warning(call: Call, model: Path, expected: list[int]) -> None:
    as_version_2(model)
    assert not has_sums(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with load(model, context=128) as engine:
            assert engine.generate_ids(PROMPT, GREEDY) == expected
    assert [str(each.message) for each in caught] == [
        f"{model} was packed by an older version: its bytes are not checked; pack it again"
    ]
    warned = call("run", model, "\x01", "--max-tokens", 2)
    assert warned.code == 0 and "its bytes are not checked; pack it again" in warned.err
    quiet = call("run", model, "\x01", "--max-tokens", 2, "--no-verify")
    assert quiet.code == 0 and "not checked" not in quiet.err
    refused(call("pack", "--verify", model), "without checksums of all its bytes", "BadRequest")


def test_has_sums(made: Path, tmp_path: Path) -> None:
    assert has_sums(made)
    (tmp_path / "penstock.json").write_text("{}")
    with pytest.raises(BrokenModel):
        has_sums(tmp_path)
    with pytest.raises(BadRequest, match="no packed model"):
        open_packed(tmp_path / "none")


@pytest.mark.parametrize("change", [
    {"files": []}, {"files": [{"name": "../config.json", "nbytes": 1, "sha256": ""}]},
    {"files": [{"name": "config.json", "nbytes": 2**60, "sha256": ""}]},
    {"files": [{"name": "model-00001.safetensors", "nbytes": 1, "sha256": ""}]},
    {"files": [{"name": "config.json", "nbytes": 1, "sha256": ""}]},
    {"files": [{"name": "config.json", "nbytes": 1, "sha256": ""}] * 2},
], ids=str)  # fmt: skip
def test_a_list_of_files_that_makes_no_sense(change: dict[str, Any], model: Path) -> None:
    edit(model, "penstock.json", lambda manifest: manifest.update(change))
    with pytest.raises(BrokenModel, match=r"penstock\.json (lists|does not list)") as caught:
        open_packed(model)
    assert not isinstance(caught.value, DamagedModel)
