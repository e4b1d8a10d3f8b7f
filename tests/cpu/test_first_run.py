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
from penstock.store.manifest import RECORD
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from penstock.store.unpacked import Unpacked
from penstock.store.verify import verify
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


def test_a_copy_that_was_begun_is_packed_on(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    folder, _ = resolved(checkpoint, tmp_path / "other")
    (tmp_path / "models" / f"{folder.name}.partial").mkdir()
    source = resolve(str(checkpoint), weights=None, cache=tmp_path, on_progress=Ears(), unpacked=True)
    with closing(source):
        assert source.to_write is None and source.folder.name == folder.name


@pytest.mark.parametrize("what", ["full", "read-only"])
def test_a_disk_without_room(checkpoint: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing says so, before anything is loaded."""
    if what == "full":
        monkeypatch.setattr(cached, "free_bytes", lambda _: 1000)
        monkeypatch.setattr("penstock.store.writer.free_bytes", lambda _: 1000)
        with pytest.raises(StorageFailed, match="the disk is too full"):
            resolve(str(checkpoint), weights=None, cache=tmp_path, on_progress=Ears(), unpacked=True)
    else:
        monkeypatch.setattr("os.access", lambda *_: False)
        with closing(
            resolve(str(checkpoint), weights=None, cache=tmp_path, on_progress=Ears(), unpacked=True)
        ) as found:
            assert found.to_write is None
