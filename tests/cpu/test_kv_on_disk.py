"""KV that lives on the disk: the tokens of KV in memory, long contexts in little of it, and what a broken disk does."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import BadRequest, DoesNotFit, StorageFailed
from penstock.runtime import host
from penstock.runtime.kv_file import KvFile
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.plan import ORDERS
from penstock.store.packed import open_packed
from penstock.store.synth import synth
from tests.cpu.commands import MACHINE, apart, machine_cache
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.engines import GREEDY, load, make_model, streaming
from tests.plans import resident_plan

MIB = 1 << 20
PROMPT = np.random.default_rng(3).integers(0, 256, 150).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("made"), "qwen3", "float32")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    with load(model, context=256, kv_home="memory") as engine:
        return list(engine.generate_ids(PROMPT, GREEDY))


@pytest.mark.parametrize("kv", ["float32", "float16", "bfloat16"])
def test_the_same_tokens_as_from_memory(model: Path, kv: str) -> None:
    answers = []
    for home in ("memory", "disk"):
        with load(model, context=256, batch=2, kv=kv, kv_home=home) as engine:
            assert {each.home for each in engine.plan.kv} == {{"memory": "host", "disk": "disk0"}[home]}
            answers.append([a.token_ids for a in engine.generate([PROMPT, PROMPT[:70]], GREEDY)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_streams_weights_and_kv_together(model: Path, expected: list[int], order: str) -> None:
    packed = open_packed(model)
    plan = streaming(packed, context=256, kv_spilled=frozenset({0, 1}), order=order, logits_rows=1)
    with load(model, plan, prompt_tokens=150) as engine:
        assert engine.generate_ids(PROMPT, GREEDY) == expected
        first = engine.session.kv_file.bytes_read
        assert first > 0
        assert engine.generate_ids(PROMPT, GREEDY) == expected  # again, over what the first answer left
        assert engine.session.kv_file.bytes_read == 2 * first


def test_bytes_of_kv_are_counted(model: Path) -> None:
    """Per decoded token: the pages before it of every layer, K and V."""
    with load(model, context=256, kv_home="disk") as engine:
        answer = engine.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True))[0]
        page_bytes = engine.session.lowering.layout.kv.page_bytes(0, engine.plan.kv[0])
        # Positions 150 to 156 lie in the third page of 64 tokens.
        assert answer.disk_bytes_per_token == 2 * 2 * 3 * page_bytes


@pytest.mark.parametrize("kv", ["float32", "float16", "int8", "int4"])
def test_of_one_kv_head_new_rows_alone_are_saved(tmp_path: Path, kv: str) -> None:
    """A row of one head is one block of the file in floats. Its page of 64 rows is more."""
    config = {**json.loads(TINY_CONFIGS["llama"]), "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = synth(tmp_path / "config.json", tmp_path / "model", parse_format("float32"))
    answers = []
    for home in ("memory", "disk"):
        with load(folder, context=256, batch=2, kv=kv, kv_home=home) as engine:
            answers.append([a.token_ids for a in engine.generate([PROMPT, PROMPT[:70]], GREEDY)])
            layers = len(engine.plan.target.spec.layers)
            if home == "disk" and parse_format(kv).bits >= 16:
                file = engine.session.kv_file
                prompt_bytes = []
                for tokens in (1, 8):
                    before = file.bytes_written
                    engine.generate_ids(PROMPT[:64], SamplingParams(max_tokens=tokens, ignore_eos=True))
                    prompt_bytes.append(file.bytes_written - before)
                assert prompt_bytes[1] - prompt_bytes[0] == 7 * layers * 2 * 4096
    assert answers[0] == answers[1]


def test_a_long_context_in_a_quarter_of_its_kv(tmp_path: Path) -> None:
    """16,384 tokens: a process within its limit, which leaves room for a quarter of the KV at most."""
    config = {**json.loads(TINY_CONFIGS["llama"]), "max_position_embeddings": 16384, "num_hidden_layers": 8}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = synth(tmp_path / "config.json", tmp_path / "model", parse_format("float32"))
    spec, weights = open_packed(folder).spec, open_packed(folder).weights
    kv_bytes = 2 * 8 * 16384 * 2 * 32 * 4
    whole = resident_plan(spec, weights, context=16384).tier_bytes()["host"] - kv_bytes
    limit = 80 * MIB + whole - 64 * MIB + kv_bytes // 4 + 8 * MIB
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("".join(chr(97 + i % 26) for i in np.random.default_rng(0).integers(0, 26, 16000)))
    cache = machine_cache(tmp_path / "cache")
    reports = []
    for flags in (("--host-memory", limit), ("--kv-home", "memory")):
        found = apart("run", folder, "--json", "--raw", "--max-tokens", 4, "--context", 16384, "--temperature", 0,
                      "--cache", cache, *flags, input=prompt.read_bytes())  # fmt: skip
        assert found.code == 0, found.err
        reports.append(found.report)
    within, roomy = reports
    assert within["prompt_tokens"] == 16000
    assert within["peak_host_bytes"] <= limit < roomy["peak_host_bytes"]
    assert within["disk_bytes_per_token"] >= 0.7 * kv_bytes * 16000 / 16384
    assert within["token_ids"] == roomy["token_ids"]


def test_what_fits_stays_in_memory(model: Path) -> None:
    with load(model) as engine:
        assert {home.home for home in engine.plan.kv} == {"host"}


def test_a_home_that_is_none() -> None:
    with pytest.raises(BadRequest, match="should be memory or disk"):
        Ask(kv_home="cloud")


# --- faults ----------------------------------------------------------------------------------------------------------


def refusing(error: int) -> Callable[..., Any]:
    def raises(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    return raises


def test_no_room_on_the_disk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOSPC))
    with pytest.raises(StorageFailed, match=r"no 2\.00 MiB for the KV cache .* No space left"):
        Engine.load(model, Ask(context=256, kv_home="disk"), Loading(machine=MACHINE, cache=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_file_has_no_name(model: Path, tmp_path: Path) -> None:
    """So a process that is killed leaves nothing behind."""
    engine = Engine.load(model, Ask(context=256, kv_home="disk"), Loading(machine=MACHINE, cache=tmp_path))
    assert list(tmp_path.iterdir()) == []
    engine.close()


@pytest.mark.parametrize("which", ["read", "write"])
def test_a_disk_that_breaks(
    model: Path, tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """One clear error, and once the disk is well again the right tokens."""
    engine = Engine.load(model, Ask(context=256, kv_home="disk"), Loading(machine=MACHINE, cache=tmp_path))
    true, calls = getattr(KvFile, which), []

    def breaks(self: KvFile, offset: int, *rest: Any) -> Any:
        calls.append(offset)
        if len(calls) == 6:
            raise StorageFailed(f"{which} the KV file failed: Input/output error")
        return true(self, offset, *rest)

    monkeypatch.setattr(KvFile, which, breaks)
    with pytest.raises(StorageFailed, match="Input/output error"):
        engine.generate_ids(PROMPT, GREEDY)
    monkeypatch.setattr(KvFile, which, true)
    assert engine.generate_ids(PROMPT, GREEDY) == expected
    engine.close()


def test_what_the_system_says_of_a_bad_read(tmp_path: Path) -> None:
    file = KvFile(tmp_path, 8192, 4096)
    with pytest.raises(StorageFailed, match="at 0 failed: Bad address"):
        file.read([(0, 4096, 4096)])  # the zeroth page of memory belongs to nobody
    file.close()


@pytest.mark.filterwarnings("ignore:.*refuses direct I/O")
def test_a_file_system_without_direct_io(
    model: Path, tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    true = os.open

    def no_direct(path: Any, flags: int, *rest: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return true(path, flags, *rest, **kwargs)

    monkeypatch.setattr(os, "open", no_direct)
    with pytest.warns(UserWarning, match="KV cache goes through the page cache"):
        engine = Engine.load(model, Ask(context=256, kv_home="disk"), Loading(machine=MACHINE, cache=tmp_path))
    assert engine.generate_ids(PROMPT, GREEDY) == expected
    engine.close()


def test_memory_that_is_gone_since_the_plan(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process took it: refused before a byte is loaded, with the numbers."""
    monkeypatch.setattr(host, "available_bytes", lambda: 70 * MIB)
    with pytest.raises(DoesNotFit, match=r"now only 70\.0 MiB are free") as refused:
        Engine.load(model, Ask(), Loading(machine=MACHINE))
    assert refused.value.numbers["have_bytes"] == 70 * MIB < refused.value.numbers["need_bytes"]
