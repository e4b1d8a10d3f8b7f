"""Perplexity and KL divergence against a direct computation from transformers' logits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.errors import BadRequest
from penstock.serve.evaluate import evaluate
from penstock.serve.windows import WINDOW_TOKENS
from penstock.spec.format import parse_format
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from tests.cpu.commands import here, machine_cache
from tests.cpu.engines import STORIES, load, make_model, needs_stories, streaming
from tests.cpu.oracle import Oracle

SHORT = "Once upon a time there was a little girl. She liked to play with her dog in the park."
LONG = f"{SHORT} One day the dog ran away, and she was very sad. Then it came back!\n" * 20


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """stories-260k by the format of its weights."""
    folder = tmp_path_factory.mktemp("stories")
    return {name: pack(STORIES, folder / name, parse_format(name)) for name in ("float32", "int4", "int8")}


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """float64 [T, V]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=1, keepdims=True)))


def direct(oracle: Oracle, ids: list[int]) -> tuple[float, int]:
    """Perplexity and scored tokens, window by window, the first token of each unscored."""
    nll, scored = 0.0, 0
    for lo in range(0, len(ids), 512):
        window = ids[lo : lo + 512]
        found = log_probabilities(oracle.logits(window))
        nll -= sum(found[i, window[i + 1]] for i in range(len(window) - 1))
        scored += len(window) - 1
    return float(np.exp(nll / scored)), scored


def windows(ids: Sequence[int]) -> int:
    return sum(len(ids[lo : lo + 512]) - 1 for lo in range(0, len(ids), 512))


@needs_stories
@pytest.mark.parametrize("text", [SHORT, LONG], ids=["one window", "several"])
def test_perplexity_is_that_of_transformers(text: str, stories: dict[str, Path]) -> None:
    oracle = Oracle(STORIES)
    found = []
    for resident in (None, 0):
        with load(stories["float32"], score=True, context=WINDOW_TOKENS, resident_bytes=resident) as engine:
            ids = engine.tokenizer.encode(text)
            found.append(evaluate(engine, text))
    expected, scored = direct(oracle, ids)
    assert (len(ids) > 1024) == (text == LONG)
    assert found[0].tokens == found[1].tokens == scored == windows(ids)
    assert found[0].perplexity == pytest.approx(expected, rel=1e-4)
    assert found[0].perplexity == found[1].perplexity


@needs_stories
def test_a_last_window_of_one_token_counts_nothing(stories: dict[str, Path]) -> None:
    """513 tokens: the second window holds one, the first token of a window, which is not scored."""
    with load(stories["float32"], score=True, context=512) as engine:
        ids = engine.tokenizer.encode(LONG)
        text = engine.tokenizer.decode(ids[:513])
        tokens = {len(engine.tokenizer.encode(text[:n])): text[:n] for n in range(len(text) - 9, len(text) + 1)}
        if 513 not in tokens or 512 not in tokens:
            pytest.skip("this tokenizer cuts that text elsewhere")
        longer, whole = evaluate(engine, tokens[513]), evaluate(engine, tokens[512])
    assert longer.tokens == whole.tokens == 511


@needs_stories
def test_kl_of_a_model_against_itself_is_0_and_of_int4_is_not(stories: dict[str, Path]) -> None:
    ask = {"score": True, "context": 512}
    oracle = Oracle(STORIES)
    with load(stories["float32"], **ask) as exact:
        ids = exact.tokenizer.encode(SHORT)
        expected = log_probabilities(oracle.logits(ids)[:-1])
        costs = {}
        for name in ("float32", "int8", "int4"):
            with load(stories[name], **ask) as engine:
                found = evaluate(engine, SHORT, exact)
                other = log_probabilities(engine.logits(ids)[:-1])
            assert found.kl is not None and found.agree is not None
            assert found.kl == pytest.approx((np.exp(expected) * (expected - other)).sum(axis=1).mean(), abs=2e-5)
            assert found.agree == pytest.approx((expected.argmax(1) == other.argmax(1)).mean(), abs=0.05)
            costs[name] = found.kl
    assert costs["float32"] == 0
    assert 1e-6 < costs["int8"] < costs["int4"] < 0.5


def test_a_quantised_kv_cache_costs_the_bundled_model_little(tmp_path: Path) -> None:
    """Twice what docs/LOG.md has of another text."""
    folder = pack(Path(penstock.__file__).parent / "assets" / "tale-llama", tmp_path / "packed")
    ask = {"score": True, "context": WINDOW_TOKENS}
    costs = {}
    with load(folder, kv="float32", **ask) as exact:
        for kv in ("float16", "int8", "int4"):
            with load(folder, kv=kv, **ask) as engine:
                costs[kv] = evaluate(engine, LONG, exact).kl or 0.0
    assert costs["float16"] < 1e-6 < costs["int8"] < 2e-5 < costs["int4"] < 6e-3, costs


def test_models_may_be_cut_into_other_chunks(tmp_path: Path) -> None:
    """Plans differ in the rows of a chunk; what is compared must not."""
    folder = make_model(tmp_path, "llama", "float32")
    text = "chunks of many sizes, all of one text. " * 4
    plan = streaming(open_packed(folder), chunk_rows=24, logits_rows=7, context=256)
    other = streaming(open_packed(folder), chunk_rows=16, logits_rows=40, context=256)
    with load(folder, score=True) as exact, load(folder, plan) as sevens, load(folder, other) as sixteens:
        plain = evaluate(exact, text)
        for found in (evaluate(sevens, text, exact), evaluate(exact, text, sevens), evaluate(sevens, text, sixteens)):
            assert found.tokens == plain.tokens == len(text) - 1
            assert found.perplexity == pytest.approx(plain.perplexity, rel=1e-5)
            assert found.kl == pytest.approx(0, abs=1e-5) and found.agree == pytest.approx(1, abs=0.02)


def test_the_windows_are_the_models_not_the_plans(tmp_path: Path) -> None:
    """A model of 256 positions has windows of 256; a context that holds less of a text is refused, not scored."""
    folder = make_model(tmp_path, "llama", "float32")
    with load(folder, score=True) as engine:
        assert evaluate(engine, "x" * 600).tokens == 255 + 255 + 87
        with pytest.raises(BadRequest, match="too short"):
            evaluate(engine, "x")
    with load(folder, score=True, context=100) as engine:
        assert evaluate(engine, "x" * 100).tokens == 99
        with pytest.raises(BadRequest, match="a context of 100 tokens; windows of 256"):
            evaluate(engine, "x" * 101)


@needs_stories
def test_the_command(stories: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = machine_cache(tmp_path / "cache")
    (tmp_path / "text").write_text(SHORT)
    expected, scored = direct(Oracle(STORIES), open_ids(stories["float32"]))
    flags = ("--cache", cache, "--json", "--threads", 1)
    plain = here(capsys, "eval", stories["float32"], tmp_path / "text", *flags).report
    assert plain == {"perplexity": pytest.approx(expected, rel=1e-4), "tokens": scored}
    lossy = here(capsys, "eval", stories["int4"], tmp_path / "text", "--against", stories["float32"], *flags).report
    assert lossy.keys() == {"perplexity", "tokens", "kl", "agree"} and lossy["kl"] > 0
    planned = here(capsys, "plan", stories["float32"], "--context", 512, "--resident", "200KiB", *flags[:3])
    (tmp_path / "plan").write_text(planned.out)
    given = here(capsys, "eval", stories["float32"], tmp_path / "text", "--plan", tmp_path / "plan", *flags).report
    assert "error" not in given, given
    assert given["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert json.loads(planned.out)["predicted"]["disk_bytes_per_token"] > 0


def open_ids(folder: Path) -> list[int]:
    with load(folder) as engine:
        return list(engine.tokenizer.encode(SHORT))
