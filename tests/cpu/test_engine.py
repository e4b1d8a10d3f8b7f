"""What an engine answers, and when it stops: batches, stop strings, full contexts, seeds, streams; what it reports."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import LLM, SamplingParams
from penstock.errors import BadRequest, DoesNotFit
from penstock.graph.arenas import Layout
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from tests.cpu.commands import MACHINE, ROOT
from tests.cpu.engines import GREEDY, STORIES, load, make_model, needs_stories, streaming
from tests.cpu.sealed import edit

PROMPTS = ["Once upon a time", "The", "Lily and her dog went to the park. They", "One day, a big red", "He said"]
# Where the two best logits differ by less, shapes of the products decide.
CLEAR = 2e-3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Random models by name of their tiny config and format; each is made once."""
    folder = tmp_path_factory.mktemp("made")

    return lambda name, weights: make_model(folder, name, weights)


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(STORIES, tmp_path_factory.mktemp("stories") / "packed")


def margins(folder: Path, ids: Sequence[int]) -> np.ndarray:
    """By how much the best logit exceeds the second, after each id."""
    with load(folder, score=True) as engine:
        ordered = np.sort(engine.logits(ids), axis=1)
    return np.asarray(ordered[:, -1] - ordered[:, -2])


def same(folder: Path, prompt: list[int], found: list[int], expected: list[int]) -> None:
    """Equal, up to the first token that was nearly another."""
    if found == expected:
        return
    at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b)
    assert margins(folder, prompt + expected[:at])[-1] < CLEAR, (at, found, expected)


# --- batches ---------------------------------------------------------------------------------------------------------


def singles(folder: Path, prompts: list[list[int]], params: SamplingParams, **ask: Any) -> list[list[int]]:
    with load(folder, **ask) as engine:
        return [engine.generate_ids(ids, params) for ids in prompts]


@pytest.mark.parametrize("resident", [None, 0])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "opt"])
def test_a_batch_answers_as_each_prompt_alone(name: str, resident: int | None, made: Any) -> None:
    """Five prompts of all lengths, three at a time."""
    folder = made(name, "float32")
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 256, n).tolist() for n in (3, 70, 1, 33, 8)]
    expected = singles(folder, prompts, GREEDY, context=128)
    with load(folder, context=128, batch=3, resident_bytes=resident) as engine:
        answers = engine.generate(prompts, GREEDY)
    assert [answer.batch for answer in answers] == [3, 3, 3, 2, 2]
    assert [answer.prompt_tokens for answer in answers] == list(map(len, prompts))
    for prompt, answer, alone in zip(prompts, answers, expected, strict=True):
        same(folder, prompt, answer.token_ids, alone)


def test_sequences_that_end_at_different_times_leave_the_others_alone(made: Any) -> None:
    """A zig-zag of two batches of two; contexts fill up one after the other, so that any may be left."""
    folder = made("llama", "float32")
    packed = open_packed(folder)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 256, n).tolist() for n in (40, 61, 50, 63)]
    params = SamplingParams(max_tokens=99, ignore_eos=True)
    expected = singles(folder, prompts, params, context=64)
    plan = streaming(packed, batch_seqs=2, batches_per_pass=2, context=64, chunk_rows=16, logits_rows=2)
    with load(folder, plan, batch=4) as engine:
        answers = engine.generate(prompts, params)
    assert [answer.output_tokens for answer in answers] == [25, 4, 15, 2]
    for prompt, answer, alone in zip(prompts, answers, expected, strict=True):
        same(folder, prompt, answer.token_ids, alone)


@needs_stories
def test_a_batch_of_stories(stories: Path) -> None:
    with load(stories, batch=1) as engine:
        prompts = [engine.tokenizer.encode(text) for text in PROMPTS]
        expected = [engine.generate([ids], GREEDY)[0] for ids in prompts]
    with load(stories, batch=5, resident_bytes=300_000) as engine:
        answers = engine.generate(prompts, GREEDY)
    for prompt, answer, alone in zip(prompts, answers, expected, strict=True):
        same(stories, prompt, answer.token_ids, alone.token_ids)
    assert answers[0].text == expected[0].text and answers[0].text.startswith(", there was")


@pytest.mark.parametrize(("page", "block", "chunk"), [(64, 4096, 3), (192, 8192, 64), (320, 1 << 20, 1)])
def test_a_plan_with_odd_numbers_gives_the_same_answer(page: int, block: int, chunk: int, made: Any) -> None:
    folder = made("gemma2", "float32")
    prompt = np.random.default_rng(3).integers(0, 256, 30).tolist()
    (expected,) = singles(folder, [prompt], GREEDY, context=64)
    plan = streaming(open_packed(folder), context=64, io_block_bytes=block, chunk_rows=chunk, logits_rows=1)
    plan = replace(plan, page_tokens=page)
    plan = replace(plan, arenas=Layout(plan).arenas())
    with load(folder, plan) as engine:
        same(folder, prompt, engine.generate_ids(prompt, GREEDY), expected)


def test_serial_and_overlapped_runs_are_one(made: Any) -> None:
    folder = made("qwen3", "int4")
    ids = np.random.default_rng(4).integers(0, 256, 50).tolist()
    ask = Ask(score=True, context=128, resident_bytes=100_000)
    found = []
    for serial in (False, True):
        with closing(Engine.load(folder, ask, Loading(machine=MACHINE, serial=serial))) as engine:
            assert engine.prediction.disk_bytes_per_token > 0
            found.append((engine.logits(ids), engine.generate_ids(ids, GREEDY)))
    assert np.array_equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_an_engine_that_answered_answers_again(made: Any) -> None:
    """Whatever came before: longer prompts, drawn answers, an answer that nobody read to its end."""
    with load(made("qwen3", "bfloat16"), resident_bytes=0, context=128) as engine:
        first = engine.generate_ids([1, 2, 3], GREEDY)
        engine.generate_ids(list(range(100)), GREEDY)
        pieces = engine.stream([5] * 40, SamplingParams(max_tokens=60, temperature=1.0, seed=1, ignore_eos=True))
        next(pieces)
        pieces.close()
        assert engine.generate_ids([1, 2, 3], GREEDY) == first


# --- where an answer ends --------------------------------------------------------------------------------------------


def with_eos(folder: Path, target: Path, eos: Any) -> Path:
    shutil.copytree(folder, target, copy_function=shutil.copy)
    edit(target, "generation_config.json", lambda config: config.update(eos_token_id=eos))
    return target


@needs_stories
def test_end_of_text(stories: Path, tmp_path: Path) -> None:
    with load(stories) as engine:
        ids = engine.tokenizer.encode(PROMPTS[0])
        (whole,) = engine.generate([ids], GREEDY)
        eos = whole.token_ids[6]
        at = whole.token_ids.index(eos)
        text = engine.tokenizer.decode(whole.token_ids[:at])
    assert (whole.finish_reason, whole.output_tokens) == ("length", 12)
    for given in (eos, [511, eos]):
        with load(with_eos(stories, tmp_path / str(given), given)) as engine:
            (answer,) = engine.generate([ids], SamplingParams(max_tokens=12))
            assert answer.token_ids == whole.token_ids[: at + 1]
            assert (answer.finish_reason, answer.text) == ("stop", text)
            assert "".join(engine.stream(ids, SamplingParams(max_tokens=12))) == text
            # The last token that may come is an end of text as well.
            (last,) = engine.generate([ids], SamplingParams(max_tokens=at + 1))
            assert (last.finish_reason, last.text) == ("stop", text)
            (going_on,) = engine.generate([ids], GREEDY)
            assert (going_on.token_ids, going_on.text) == (whole.token_ids, whole.text)


@needs_stories
def test_stop_strings(stories: Path) -> None:
    with load(stories, resident_bytes=300_000) as engine:
        ids = engine.tokenizer.encode(PROMPTS[0])
        whole = engine.generate([ids], GREEDY)[0].text
        middle = whole[7:10]  # across tokens
        for stop in ((middle,), ("never to be seen", whole[20:22], middle), (whole[:1],), (whole[-1:],)):
            params = SamplingParams(max_tokens=12, ignore_eos=True, stop=stop)
            (answer,) = engine.generate([ids], params)
            first = min((whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole)[1]
            assert (answer.text, answer.finish_reason) == (whole[:first], "stop")
            assert "".join(engine.stream(ids, params)) == answer.text
            assert engine.last is not None and engine.last.text == answer.text
        (answer,) = engine.generate([ids], SamplingParams(max_tokens=12, ignore_eos=True, stop=(whole + "x",)))
        assert (answer.text, answer.finish_reason) == (whole, "length")


@pytest.mark.parametrize("resident", [None, 0])
def test_a_context_may_be_filled_to_the_last_token(resident: int | None, made: Any) -> None:
    folder = made("opt", "bfloat16")
    prompt = np.random.default_rng(5).integers(0, 256, 60).tolist()
    (long,) = singles(folder, [prompt], SamplingParams(max_tokens=20, ignore_eos=True), context=128)
    many = SamplingParams(max_tokens=1000, ignore_eos=True)
    with load(folder, context=64, resident_bytes=resident) as engine:
        (answer,) = engine.generate([prompt], many)
        # 60 in the prompt, 4 more are fed back, and one comes out of the last position.
        assert (answer.output_tokens, answer.finish_reason, answer.context) == (5, "length", 64)
        same(folder, prompt, answer.token_ids, long[:5])
        (full,) = engine.generate([prompt + long[:4]], many)
        assert (full.output_tokens, full.finish_reason, full.decode_tokens) == (1, "length", 0)
        with pytest.raises(BadRequest, match=r"has 65 tokens, the context room for 64: raise --context"):
            engine.generate([prompt + long[:5]], many)
        (one,) = engine.generate([prompt], SamplingParams(max_tokens=1))
        assert one.token_ids == answer.token_ids[:1]
    with load(folder, context=1) as engine:
        assert engine.generate([[7]], many)[0].output_tokens == 1


@pytest.mark.parametrize("ids", [[], [300], [-1], [2**40], [2**70], [0.5], ["a"], [[1, 2]], [True]])
def test_ids_that_are_none(ids: list[Any], made: Any) -> None:
    with load(made("llama", "float32")) as engine:
        with pytest.raises(BadRequest):
            engine.generate([[1, 2], ids], GREEDY)
        assert engine.generate([], GREEDY) == []
        assert len(engine.generate_ids(np.array([1, 2], np.int64), GREEDY)) == 12


# --- text and chance -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_pieces_add_up_to_the_text(seed: int, made: Any) -> None:
    """Random bytes: half characters, control tokens, and stop strings of one letter."""
    stop = ("e",) if seed % 2 else ()
    params = SamplingParams(max_tokens=60, temperature=2.0, seed=seed, ignore_eos=True, stop=stop)
    with load(made("llama", "float32")) as engine:
        ids = engine.tokenizer.encode("hello")
        text = "".join(engine.stream(ids, params))
        last = engine.last
        assert last is not None and last.text == text
        (again,) = engine.generate([ids], params)
        assert (again.token_ids, again.text) == (last.token_ids, text)
        decoded = engine.tokenizer.decode(last.token_ids)
        assert text == (decoded.split("e")[0] if stop else decoded)


def test_seeds(made: Any) -> None:
    def params(seed: int | None) -> SamplingParams:
        return SamplingParams(max_tokens=20, temperature=1.0, top_p=0.95, seed=seed, ignore_eos=True)

    with load(made("llama", "float32"), batch=2) as engine:
        first, twin = (each.token_ids for each in engine.generate([[1, 2], [1, 2]], params(1)))
        assert first == twin == engine.generate_ids([1, 2], params(1))
        assert engine.generate_ids([1, 2], params(2)) != first
        assert engine.generate_ids([1, 2], params(None)) != engine.generate_ids([1, 2], params(None))


# --- what it took ----------------------------------------------------------------------------------------------------

FIELDS = {
    "text": str, "token_ids": list, "prompt_tokens": int, "cached_tokens": int, "output_tokens": int,
    "finish_reason": str, "context_full": bool, "ttft_s": float,
    "decode_tokens_per_s": float, "predicted": dict, "bytes_moved": dict, "disk_bytes_per_token": float,
    "inter_token_s": dict, "batch": int, "context": int, "bound_by": str, "share_of_bound": type(None),
    "peak_host_bytes": int, "peak_device_bytes": int,
}  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 2, 30])
@pytest.mark.parametrize("resident", [None, 0])
def test_a_report_is_complete_and_finite(tokens: int, resident: int | None, made: Any) -> None:
    with load(made("llama", "float32"), resident_bytes=resident) as engine:
        (answer,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=tokens, ignore_eos=True))
        report = answer.report(engine.prediction)
    assert {name: type(value) for name, value in report.items()} == FIELDS
    json.dumps(report, allow_nan=False)
    assert report["output_tokens"] == len(report["token_ids"]) == tokens
    assert report["ttft_s"] > 0 and report["predicted"].keys() == {"ttft_s", "decode_tokens_per_s"}
    gaps = report["inter_token_s"]
    assert gaps.keys() == {"p50", "p95", "p99"} and 0 <= gaps["p50"] <= gaps["p95"] <= gaps["p99"]
    assert (report["decode_tokens_per_s"] > 0) == (gaps["p50"] > 0) == (tokens > 1)
    assert (report["bytes_moved"]["disk0"] > 0) == (resident == 0)
    assert (report["disk_bytes_per_token"] > 0) == (resident == 0 and tokens > 1)
    assert report["peak_host_bytes"] > 20 << 20 and report["peak_device_bytes"] == 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("name", "weights"), [("llama", "float32"), ("qwen3", "int4"), ("opt", "bfloat16")])
def test_bytes_from_the_disk_are_exact(name: str, weights: str, batch: int, made: Any) -> None:
    """Each pass reads what streams once, the head where logits are wanted, and each granule of the embedding
    once that a token lies in. qwen3 is untied: its embedding is never streamed."""
    folder = made(name, weights)
    packed = open_packed(folder)
    plan = streaming(packed, batch_seqs=batch, chunk_rows=16, logits_rows=16)
    head = packed.parts["embed" if packed.spec.tied else "head"].nbytes
    blocks = sum(part.nbytes for part in packed.parts.values() if part.kind in ("attn", "ffn"))
    prompts = [np.random.default_rng(6).integers(0, 256, n).tolist() for n in (40, 5, 16)][:batch]
    with load(folder, plan, batch=batch) as engine:
        answers = engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
        read = engine.session.reader.bytes_read - engine.session.loaded_bytes

    def embedding(tokens: Sequence[int]) -> int:
        return packed.parts["embed"].granule_bytes * len({token // 64 for token in tokens})

    decode = sum(blocks + head + embedding([a.token_ids[step] for a in answers]) for step in range(5))
    together = [token for prompt in prompts for token in prompt]  # of all prompts, 16 rows a pass
    chunks = [together[lo : lo + 16] for lo in range(0, len(together), 16)]
    ends = {(sum(map(len, prompts[: i + 1])) - 1) // 16 for i in range(batch)}
    prefill = sum(blocks + embedding(chunk) for chunk in chunks) + head * len(ends)
    for answer in answers:
        assert answer.disk_bytes_per_token == decode / (5 * batch)
        assert answer.bytes_moved == {"disk0": prefill + decode}
    assert read == prefill + decode


# --- the Python interface --------------------------------------------------------------------------------------------


def test_llm(made: Any, cache: Path) -> None:
    folder = made("llama", "float32")
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    with LLM(folder, cache=cache) as llm:
        one = llm.generate("hello", params)
        assert [answer.prompt for answer in one] == ["hello"] and one[0].finish_reason == "length"
        assert llm.engine.plan.context == 256 and len(one[0].token_ids) == 5
    sizes: list[dict[str, Any]] = [
        {"host_memory": "200MiB", "resident": "300KiB", "device_memory": "1GiB"},
        {"host_memory": 200 << 20, "resident": 300 << 10, "batch": 2, "context": 64, "kv": "float32"},
    ]
    for size in sizes:
        with LLM(str(folder), cache=str(cache), **size) as llm:
            assert llm.engine.prediction.disk_bytes_per_token > 0
            assert llm.engine.plan.tier_bytes()["host"] <= 200 << 20
            answers = llm.generate(("hello", "world"), params)
            assert answers[0].token_ids == one[0].token_ids and answers[1].prompt == "world"
            assert llm.generate([]) == []
    for wrong in ({"host_memory": "lots"}, {"resident": -1}, {"kv": "int8-g8"}, {"context": 257}, {"weights": "int4"}):
        with pytest.raises(BadRequest):
            LLM(folder, cache=cache, **wrong)  # type: ignore[arg-type]
    with pytest.raises(DoesNotFit) as caught:
        LLM(folder, cache=cache, host_memory="1MiB")
    with LLM(folder, cache=cache, host_memory=caught.value.numbers["minimum_bytes"]) as llm:
        assert llm.generate("hello", params)[0].token_ids == one[0].token_ids


@needs_stories
def test_llm_packs_a_checkpoint_once(cache: Path) -> None:
    told: list[str] = []
    for _ in range(2):
        with LLM(STORIES, weights="int8", cache=cache, on_progress=lambda what, *_: told.append(what)) as llm:
            assert llm.engine.packed.weights == parse_format("int8")
            assert llm.generate(PROMPTS[0])[0].text.startswith(", there was")
    assert sum(what.startswith("writes ") for what in told) == 1


def test_plan(made: Any) -> None:
    solved = penstock.plan(made("llama", "float32"), machine=MACHINE, resident_bytes=0, batch=2, kv="float16")
    assert (solved.plan.batch_seqs, solved.plan.kv[0].format) == (2, Format("float16"))
    assert all(math.isfinite(v) for v in vars(solved.prediction).values() if isinstance(v, float))
    assert (
        penstock.plan(str(made("llama", "float32")), machine=MACHINE, weights="int4").plan.target.weights.kind == "int4"
    )
    with pytest.raises(DoesNotFit):
        penstock.plan(made("llama", "float32"), machine=MACHINE, host_memory_bytes=1 << 20)


def modules(code: str) -> Iterator[str]:
    code += "; import sys; print(' '.join(m for m in ('numpy', 'tokenizers', 'torch', 'typer') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return iter(done.stdout.split())


def test_nothing_is_imported_before_it_is_needed(made: Any, cache: Path) -> None:
    assert list(modules("import penstock; penstock.__version__")) == []
    folder, kept = str(made("llama", "float32")), str(cache)
    planning = (
        "import penstock; from tests.pure.machine import MACHINE; "
        f"penstock.plan({folder!r}, machine=MACHINE, host_memory_bytes=1 << 30)"
    )
    assert list(modules(planning)) == []
    answering = f"import penstock; penstock.LLM({folder!r}, cache={kept!r}).generate('hi')"
    assert list(modules(answering)) == ["numpy"]  # tokenizers is a child's
