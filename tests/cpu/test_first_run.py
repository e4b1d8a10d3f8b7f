"""The first run of a checkpoint: it is loaded without a packed copy, which is then written out of memory."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StorageFailed
from penstock.runtime.arena import Arenas
from penstock.serve import cached
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading, plan_here, to_load_unpacked
from penstock.serve.source import resolve
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.places import HOST
from penstock.store import copies
from penstock.store.checkpoint import Checkpoint
from penstock.store.identity import stamps
from penstock.store.locks import lock_folder
from penstock.store.manifest import RECORD
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from penstock.store.unpacked import Unpacked
from penstock.store.verify import verify
from penstock.store.writer import write_packed
from tests.cpu import quantised
from tests.cpu.cached_copies import Ears, names, resolved
from tests.cpu.checkpoints import folder_bytes, save_checkpoint, save_tokenizer
from tests.cpu.commands import MACHINE, ROOT, here, machine_cache
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.engines import GREEDY
from tests.cpu.first_runs import PROMPT, engine_of, first_run, opened


def same_as_packed(checkpoint: Path, tmp_path: Path, weights: Format | None = None) -> None:
    """The copy of a first run, to the byte; its plan, but for what reading takes; and its answer."""
    ids, engine = first_run(checkpoint, tmp_path / "cache", weights)
    (copy,) = (tmp_path / "cache" / copies.MODELS).iterdir()
    packed = pack(checkpoint, tmp_path / "packed", weights)
    assert {n: b for n, b in folder_bytes(copy).items() if n != RECORD} == folder_bytes(packed)
    there = open_packed(copy)
    assert (engine.packed.spec, engine.packed.weights) == (there.spec, there.weights)
    assert (engine.packed.parts, engine.packed.orders) == (there.parts, there.orders)
    with closing(Engine.load(copy, Ask(), Loading(machine=MACHINE))) as second:
        assert second.generate_ids(PROMPT, GREEDY) == ids
        assert replace(engine.plan, process_bytes=second.plan.process_bytes) == second.plan
        assert engine.plan.process_bytes > second.plan.process_bytes


@pytest.mark.parametrize("weights", ["own", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_the_copy_is_what_pack_writes(tmp_path: Path, dtype: str, weights: str) -> None:
    config = json.loads(TINY_CONFIGS["llama"])
    save_checkpoint(tmp_path / "hf", config, dtype=dtype)
    save_tokenizer(tmp_path / "hf", config)
    same_as_packed(tmp_path / "hf", tmp_path, None if weights == "own" else parse_format(weights))


@pytest.mark.parametrize("name", sorted(TINY_CONFIGS))
def test_of_every_kind_of_model(tmp_path: Path, name: str) -> None:
    """Experts, shared ones, heads of their own, ReLU, sinks and biases."""
    config = json.loads(TINY_CONFIGS[name])
    save_checkpoint(tmp_path / "hf", config, dtype="BF16")
    save_tokenizer(tmp_path / "hf", config)
    same_as_packed(tmp_path / "hf", tmp_path)


@pytest.mark.parametrize("how", ["packed", "awq", "gptq-act-order", "float8-blocks"])
def test_of_quantised_folders(tmp_path: Path, how: str) -> None:
    pytest.importorskip("transformers")
    from tests.cpu.oracle import save
    from tests.cpu.test_quantised import CASES

    variant, quantise, config, _ = CASES[how]
    save(variant, tmp_path / "hf")
    quantised.write(tmp_path / "hf", tmp_path / "q", quantise, config)
    same_as_packed(tmp_path / "q", tmp_path)


@pytest.mark.parametrize("which", ["q4_0", "q4_k_m", "experts", "split"])
def test_of_gguf_files(tmp_path: Path, which: str) -> None:
    pytest.importorskip("gguf")
    from tests.cpu import gguf_models
    from tests.cpu.gguf_models import Kind
    from tests.cpu.test_gguf_models import TALE, q4_k_m

    folder = {"q4_k_m": ROOT / "bench/tale-relu", "experts": ROOT / "bench/tale-moe"}.get(which, TALE)
    choose = q4_k_m if which == "q4_k_m" else lambda _: Kind.Q4_0
    more: dict[str, Any] = {"split_max_tensors": 20} if which == "split" else {}
    (tmp_path / "files").mkdir()
    gguf_models.convert(
        folder, tmp_path / "files/tale.gguf", choose, gguf_models.tokenizer_metadata(folder, "gpt-2"), **more
    )
    files = sorted((tmp_path / "files").iterdir())
    assert (len(files) > 2) == (which == "split")
    same_as_packed(files[-1], tmp_path)


def test_a_run_writes_its_copy_after_the_answer(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = machine_cache(tmp_path / "cache")
    args = ("run", checkpoint, "abc", "--cache", cache, "--max-tokens", 8, "--ignore-eos", "--why")
    first = here(capsys, *args)
    assert first.code == 0 and "weights come from the checkpoint itself" in first.err
    assert len([line for line in first.err.splitlines() if line.startswith("penstock: writes ")]) == 1
    assert "tok/s (promised" in first.err.splitlines()[-1]
    (folder,) = (cache / "models").iterdir()
    verify(folder)
    second = here(capsys, *args)
    assert (second.code, second.out) == (0, first.out)
    assert "penstock: writes " not in second.err and "weights come from the checkpoint" not in second.err
    assert names(cache) == [folder.name] and resolved(checkpoint, cache)[1].news == []


def test_weights_are_made_in_memory_that_held_something_else(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gaps within granules are cleared too, as in a file."""
    begin = Arenas.__init__

    def poisoned(self: Arenas, *arguments: Any) -> None:
        begin(self, *arguments)
        self.whole(f"{HOST}.weights")[...] = 0xFF

    monkeypatch.setattr(Arenas, "__init__", poisoned)
    same_as_packed(checkpoint, tmp_path, parse_format("int4"))


def test_nothing_is_read_again_for_the_copy(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(engine_of(opened(checkpoint, tmp_path))) as engine:
        monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("it was read before"))
        engine.write_copy()


# --- where it is no way --------------------------------------------------------------------------------------


def test_weights_that_stream_are_packed_first(checkpoint: Path, tmp_path: Path) -> None:
    ears = Ears()
    source = resolve(str(checkpoint), weights=None, cache=tmp_path, on_progress=ears, unpacked=True)
    assert source.to_write is not None
    with closing(engine_of(source, ears, resident_bytes=100_000)) as engine:
        assert "packs the checkpoint first: not all of its weights stay in RAM" in ears.news
        assert engine.packed.files and engine.packed.folder.parent == tmp_path / "models"
        engine.write_copy()  # there is one
        assert source.folder.exists()  # the tokenizer was opened there
    assert not source.folder.exists() and names(tmp_path) == [engine.packed.folder.name]


def test_reading_counts_within_the_limit(checkpoint: Path, tmp_path: Path) -> None:
    """With one byte less than loading as it is takes, the checkpoint is packed first."""
    unpacked = Unpacked.open(checkpoint, None, stamps(checkpoint))
    with closing(unpacked):
        free = plan_here(Ask(), unpacked.model, Loading(machine=MACHINE))
        within, why_not = to_load_unpacked(free, unpacked.reading_bytes)
        assert within is not None and not why_not
        need = within.plan.tier_bytes()[HOST]
        assert need - free.plan.tier_bytes()[HOST] >= unpacked.reading_bytes > 0
        for limit, fits in ((need, True), (need - 1, False)):
            limited = replace(free, ask=Ask(host_memory_bytes=limit))
            within, why_not = to_load_unpacked(limited, unpacked.reading_bytes)
            assert (within is not None) == fits
            assert fits or why_not.startswith("packs the checkpoint first: it takes ")


def test_memory_stays_within_what_was_promised(tmp_path: Path) -> None:
    """Of a model whose matrices are large beside its granules, quantised by all threads."""
    config = {**json.loads(TINY_CONFIGS["llama"]), "hidden_size": 512, "intermediate_size": 8192, "head_dim": 64}
    save_checkpoint(tmp_path / "hf", config, dtype="BF16")
    save_tokenizer(tmp_path / "hf", config)
    cache = machine_cache(tmp_path / "cache")
    code = """
        import sys
        from pathlib import Path
        from penstock.runtime import host
        from penstock.serve.engine import Engine
        from penstock.serve.loading import Loading
        from penstock.serve.sampling import SamplingParams
        from penstock.serve.source import resolve
        from penstock.spec.ask import Ask
        source = resolve(sys.argv[1], weights="int4", cache=Path(sys.argv[2]), unpacked=True)
        engine = Engine.open(source, Ask(), Loading(cache=Path(sys.argv[2]), device="none"))
        assert source.to_write is not None
        engine.generate_ids([1, 2, 3], SamplingParams(max_tokens=2))
        engine.write_copy()
        print(engine.peak_host_bytes, engine.plan.tier_bytes()["host"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path / "hf", cache],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, promised = map(int, done.stdout.split())
    assert peak <= promised


def test_a_copy_that_was_begun_is_written_on_after_the_answer(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards that a process before has completed stay as they are."""

    def in_small_shards(*given: Any, **named: Any) -> Path:
        return write_packed(*given[:7], 64 << 10, *given[8:], **named)

    monkeypatch.setattr("penstock.store.packing.write_packed", in_small_shards)
    whole, _ = resolved(checkpoint, tmp_path / "other")

    def breaks_off(what: str, done: int, total: int) -> None:
        if total and done > total // 2:
            raise KeyboardInterrupt

    source = resolve(str(checkpoint), weights=None, cache=tmp_path, unpacked=True)
    with closing(engine_of(source)) as engine, pytest.raises(KeyboardInterrupt):
        engine.write_copy(breaks_off)
    (partial,) = (tmp_path / "models").iterdir()
    begun = {file.name: file.stat().st_mtime_ns for file in partial.glob("model-*")}
    assert partial.suffix == ".partial" and begun
    ears = Ears()
    source = resolve(str(checkpoint), weights=None, cache=tmp_path, on_progress=ears, unpacked=True)
    assert source.to_write is not None
    with closing(engine_of(source, ears)) as engine:
        assert not engine.packed.files and engine.generate_ids(PROMPT, GREEDY)
        assert partial.exists() and not ears.work & {"writing", "packing"}
        engine.write_copy()
    copy = partial.with_suffix("")
    assert {name: (copy / name).stat().st_mtime_ns for name in begun} == begun
    assert names(tmp_path) == [copy.name] == [whole.name]
    for file in whole.glob("model-*"):
        assert (copy / file.name).read_bytes() == file.read_bytes()
    verify(copy)


def test_a_copy_that_another_process_writes_is_waited_for(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = resolved(checkpoint, tmp_path / "other")
    (partial := tmp_path / "models" / f"{folder.name}.partial").mkdir(parents=True)
    lock = lock_folder(partial, exclusive=True, wait=False)
    assert lock is not None
    monkeypatch.setattr("penstock.store.writer._POLL_S", 0.01)

    def heard(what: str, done: int, total: int) -> None:
        if "waiting" in what:
            lock.close()  # it has ended early

    with closing(resolve(str(checkpoint), weights=None, cache=tmp_path, on_progress=heard, unpacked=True)) as source:
        assert source.to_write is None and source.folder.name == folder.name


NO_ROOM = "keeps no packed copy, so each start reads the checkpoint: "


@pytest.mark.parametrize("what", ["full", "read-only"])
def test_a_disk_without_room(checkpoint: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model answers, and keeps no copy. Weights that stream want one, and are refused before anything is loaded."""
    ids = first_run(checkpoint, tmp_path / "other")[0]
    cache, ears = tmp_path / "cache", Ears()
    if what == "full":
        monkeypatch.setattr(cached, "free_bytes", lambda _: 1000)
        monkeypatch.setattr("penstock.store.writer.free_bytes", lambda _: 1000)
    else:
        monkeypatch.setattr("os.access", lambda *_: False)
    source = resolve(str(checkpoint), weights=None, cache=cache, on_progress=ears, unpacked=True)
    with closing(engine_of(source, ears)) as engine:
        (said,) = [news for news in ears.news if news.startswith(NO_ROOM)]
        assert said.endswith("needs 733 KiB, 1000 B are free" if what == "full" else "cannot be written to"), said
        assert any("no packed copy yet: none is kept" in reason for reason in engine.solved.reasons)
        assert engine.generate_ids(PROMPT, GREEDY) == ids
        assert not engine.lacks_copy
        engine.write_copy()
        engine.begin_copy(pytest.fail)
    assert not ears.work & {"writing", "packing"} and not cache.exists()
    if what == "full":
        source = resolve(str(checkpoint), weights=None, cache=cache, on_progress=ears, unpacked=True)
        with closing(source), pytest.raises(StorageFailed, match=r"the disk is too full: .* needs .* are free"):
            engine_of(source, ears, resident_bytes=100_000)


def test_the_command_answers_on_a_full_disk(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "free_bytes", lambda _: 1000)
    cache = machine_cache(tmp_path / "cache")
    done = here(capsys, "run", checkpoint, "abc", "--cache", cache, "--max-tokens", "2", "--json")
    assert done.code == 0 and "error" not in done.report
    (said,) = [line for line in done.err.splitlines() if NO_ROOM in line]
    assert "1000 B are free" in said and "not written" not in done.err
    assert names(cache) == []
