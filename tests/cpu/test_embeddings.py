"""Embeddings beside answers, on a device, of models made for them and not, over the API and in batches."""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
from numpy.typing import NDArray

from penstock import LLM, AsyncLLM
from penstock.errors import BadRequest, BrokenModel
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.pooling import NOT_MADE, POOLS, Pooled, Pooling, unit
from penstock.serve.sampling import SamplingParams
from penstock.serve.service import Service
from penstock.serve.told import Ended
from penstock.spec.ask import Ask
from penstock.spec.plan import Unit
from penstock.store import pooling
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from tests.cpu.engines import MACHINE, load, make_model
from tests.cpu.servers import Server, serving
from tests.cpu.services import SEQS, Heard, plans, prompts
from tests.cpu.test_tools import BUNDLED
from tests.plans import make_plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "llama", "int4")


@pytest.mark.parametrize("name", ["resident", "streaming", "two batches", "few pages", "KV on disk"])
def test_beside_answers_they_are_those_alone(folder: Path, name: str) -> None:
    """To the bit, and the answers beside them are those alone; pages are given back."""
    plan = plans(folder)[name]
    some = prompts(12, plan.target.spec.vocab)
    params = [Pooling(POOLS[i // 2 % 2]) if i % 2 else SamplingParams(max_tokens=9, ignore_eos=True) for i in range(12)]
    with load(folder, plan=plan) as engine:
        with closing(Service.of_whole_answers(engine)) as service:
            alone = [service.generate([ids], [p])[0] for ids, p in zip(some, params, strict=True)]
        heard = [Heard() for _ in some]
        with closing(Service(engine, prompt_rows=5, queue=100)) as service:
            for ids, p, each in zip(some, params, heard, strict=True):
                service.submit(ids, p, each.tell)
            for each, expected in zip(heard, alone, strict=True):
                _, told = each.end()
                assert isinstance(told, Ended) and told.answer.token_ids == expected.token_ids
                if expected.embedding is not None:
                    np.testing.assert_array_equal(told.answer.embedding, expected.embedding)
                    assert told.answer.ttft_s > 0 and not told.answer.text
            assert service.idle(600) and service.free_sequences == SEQS
            counts = service.counts
            noted = dict(service.pass_times.measured)
            service.generate(some[:1] * 6, Pooling("mean"))
            assert service.pass_times.measured == noted  # which are of prompts and answers
        assert counts.answered == 12 and not counts.failed and not counts.pages_had
        assert counts.output_tokens == sum(len(a.token_ids) for a in alone)


def test_on_a_device(folder: Path) -> None:
    """The norm is computed there, and its rows come back over the link."""
    packed = open_packed(folder)
    units = [
        Unit(part.key, lo, lo + 1, *(("host", "host", "gpu0") if part.kind == "ffn" else ("gpu0", "gpu0", "gpu0")))
        for part in packed.parts.values()
        for lo in range(part.granules)
    ]
    largest = max(part.granule_bytes for part in packed.parts.values())
    plan = make_plan(
        packed.spec, packed.weights, units, ring_bytes={"gpu0": 3 * largest}, stage_bytes=largest, main="gpu0",
        kv_homes=[("gpu0", "gpu0")] * len(packed.spec.layers), batch_seqs=SEQS, chunk_rows=16, context=96,
    )  # fmt: skip
    some = prompts(5, packed.spec.vocab)
    with load(folder, plan=plans(folder)["resident"]) as engine, closing(Service.of_whole_answers(engine)) as service:
        expected = [service.generate(some, Pooling(pool)) for pool in POOLS]
    with (
        closing(Engine.load(folder, Ask(), Loading(machine=MACHINE, plan=plan, device="emulated"))) as engine,
        closing(Service.of_whole_answers(engine)) as service,
    ):
        for pool, those in zip(POOLS, expected, strict=True):
            for answer, other in zip(service.generate(some, Pooling(pool)), those, strict=True):
                np.testing.assert_allclose(answer.embedding, other.embedding, atol=1e-4)


def test_rows_that_come_again_count_once() -> None:
    ids, rows = np.arange(5, dtype=np.int32), np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    pooled = Pooled(ids, Pooling("mean"), 99)
    for lo, hi in ((0, 2), (0, 1), (1, 3), (3, 5)):
        assert pooled.answer.embedding is None
        pooled.take(lo, rows[lo:hi])
    np.testing.assert_allclose(pooled.answer.embedding, rows.mean(axis=0), rtol=1e-6)
    with pytest.raises(BrokenModel, match="not finite"):
        Pooled(ids, Pooling("last"), 99).take(4, np.full((1, 4), np.nan, np.float32))
    assert unit(np.zeros(3, np.float32)).tolist() == [0, 0, 0]


TEXTS = ["Once upon a time", "The sea was calm.", "a"]


def test_llm_embeds(folder: Path, model: Path, cache: Path) -> None:
    with LLM(model, cache=cache, batch=2) as llm:
        assert not llm.makes_embeddings
        found = llm.embed(TEXTS)
        assert found.shape == (3, llm.engine.plan.target.spec.d_embed) and found.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)
        raw = llm.embed(TEXTS, normalize=False)
        np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), found, rtol=1e-5)
        ids = [llm.engine.tokenizer.encode(text) for text in TEXTS]
        np.testing.assert_array_equal(llm.embed(ids), found)
        np.testing.assert_array_equal(llm.embed(TEXTS[0]), found[:1])
        short = llm.embed(TEXTS, dimensions=5)
        np.testing.assert_allclose(short, found[:, :5] / np.linalg.norm(found[:, :5], axis=1, keepdims=True), rtol=1e-5)
        assert np.abs(llm.embed(TEXTS, pooling="mean") - found).max() > 0.01
        for asked, says in (
            ({"dimensions": 10**6}, "dimensions"),
            ({"dimensions": 0}, "dimensions"),
            ({"pooling": "cls"}, "last, mean"),
        ):
            with pytest.raises(BadRequest, match=says):
                llm.embed(TEXTS, **asked)  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match="empty"):
            llm.embed([[]])
        with pytest.raises(TypeError):
            llm.embed([3.5])  # type: ignore[list-item]

        async def beside() -> NDArray[np.float32]:
            return await AsyncLLM(llm).embed(TEXTS)

        np.testing.assert_array_equal(asyncio.run(beside()), found)


def made_for(folder: Path, target: Path, mode: str) -> Path:
    """The bundled model as one that was made for embeddings."""
    shutil.copytree(BUNDLED, folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 256, mode: True}))
    pack(folder, target)
    return target


def test_a_model_says_how_it_is_pooled(tmp_path: Path) -> None:
    mean = made_for(tmp_path / "mean", tmp_path / "packed-mean", "pooling_mode_mean_tokens")
    cls = made_for(tmp_path / "cls", tmp_path / "packed-cls", "pooling_mode_cls_token")
    assert (pooling.of_packed(mean), pooling.of_packed(cls)) == ("mean", None)
    with load(mean) as engine:
        assert engine.pooling == "mean"
    metadata = {"general.architecture": "qwen3", "qwen3.pooling_type": 3}
    assert pooling.of_gguf(metadata) == "last" and pooling.of_gguf({**metadata, "qwen3.pooling_type": 2}) is None
    assert pooling.of_gguf({}) is None


@pytest.fixture(scope="module")
def server(model: Path, cache: Path) -> Iterator[Server]:
    with serving(model, cache, "--batch", 4, "--queue", 40, "--name", "tiny") as found:
        yield found


@pytest.fixture(scope="module")
def expected(model: Path, cache: Path) -> NDArray[np.float32]:
    with LLM(model, cache=cache) as llm:
        return llm.embed(TEXTS)


def test_openai_client_embeds(server: Server, expected: NDArray[np.float32]) -> None:
    client = server.client()
    for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):  # without one it asks for base64
        done = client.embeddings.create(model="tiny", input=TEXTS, **form)  # type: ignore[call-overload]
        vectors = [each.embedding for each in done.data]
        if form.get("encoding_format") == "base64":
            vectors = [struct.unpack(f"<{expected.shape[1]}f", b64decode(each)) for each in vectors]
        np.testing.assert_allclose(np.array(vectors), expected, atol=1e-6)
        assert [each.index for each in done.data] == [0, 1, 2] and done.model == "tiny"
        assert done.usage.prompt_tokens == done.usage.total_tokens > len(TEXTS)
        assert done.note == NOT_MADE
    ids = server.ask("POST", "/tokenize", {"prompt": TEXTS[0]})[2]["tokens"]
    for given in (ids, [ids]):
        one = client.embeddings.create(model="tiny", input=given)
        np.testing.assert_allclose(one.data[0].embedding, expected[0], atol=1e-6)
    short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=4).data[0].embedding
    np.testing.assert_allclose(short, unit(expected[0], 4), atol=1e-6)
    many = client.embeddings.create(model="tiny", input=TEXTS * 100)  # more than the queue has room for
    np.testing.assert_allclose(np.array([each.embedding for each in many.data[-3:]]), expected, atol=1e-6)
    for body, says in (
        ({"input": []}, "inputs"),
        ({"input": [""] * 3000}, "inputs"),
        ({"input": "a", "dimensions": 10**5}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": [[]]}, "empty"),
        ({"input": [10**9]}, "vocabulary"),
        ({"input": "a " * 2000}, "context"),
        ({"input": "a", "task": "x"}, "task"),
    ):
        status, _, found = server.ask("POST", "/v1/embeddings", body)
        assert status == 400 and says in found["error"]["message"], found
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")


def test_ollama_client_embeds(server: Server, expected: NDArray[np.float32]) -> None:
    client = ollama.Client(host=f"http://127.0.0.1:{server.port}", timeout=600)
    done = client.embed(model="tiny", input=TEXTS)
    np.testing.assert_allclose(np.array(done.embeddings), expected, atol=1e-6)
    assert done.prompt_eval_count and done.total_duration and done.model == "tiny"
    one = client.embed(model="tiny:latest", input=TEXTS[0], dimensions=4)
    np.testing.assert_allclose(one.embeddings[0], unit(expected[0], 4), atol=1e-6)
    older = np.array(client.embeddings(model="tiny", prompt=TEXTS[0]).embedding)
    np.testing.assert_allclose(older / np.linalg.norm(older), expected[0], atol=1e-6)
    assert client.embed(model="tiny", input="a " * 2000).prompt_eval_count == 128  # the context
    with pytest.raises(ollama.ResponseError, match="context"):
        client.embed(model="tiny", input="a " * 2000, truncate=False)
    with pytest.raises(ollama.ResponseError, match="than the server"):
        client.embed(model="tiny", input="a", options={"num_ctx": 10**6})
    long = {"model": "tiny", "prompt": "a " * 2000}
    status, _, cut = server.ask("POST", "/api/embeddings", long)
    assert status == 200 and "1 text was cut to the context of 128 tokens" in cut["note"]
    assert server.ask("POST", "/api/embeddings", {**long, "truncate": False})[0] == 400
    assert client.embed(model="tiny", input="").embeddings == []
    assert client.embeddings(model="tiny", prompt="").embedding == []


def test_a_model_made_for_it_says_so(cache: Path, tmp_path: Path) -> None:
    made = made_for(tmp_path / "hf", tmp_path / "packed", "pooling_mode_lasttoken")
    with serving(made, cache, "--name", "made") as server:
        _, _, found = server.ask("POST", "/v1/embeddings", {"input": [3, 4, 5]})
        assert "note" not in found and len(found["data"]) == 1
        _, _, shown = server.ask("POST", "/api/show", {"model": "made"})
        assert "embedding" in shown["capabilities"]


def test_a_batch_embeds(model: Path, cache: Path, tmp_path: Path, expected: NDArray[np.float32], call: Any) -> None:
    lines = [
        {"custom_id": "a", "url": "/v1/embeddings", "body": {"input": TEXTS}},
        {"custom_id": "b", "url": "/v1/embeddings", "body": {"input": TEXTS[1], "encoding_format": "base64"}},
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 4}},
        {"custom_id": "d", "url": "/v1/embeddings", "body": {"input": TEXTS[0], "dimensions": 10**6}},
        {"custom_id": "e", "url": "/v1/embeddings", "body": {"input": []}},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    call("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--model", model)
    answers = {(a := json.loads(line))["custom_id"]: a["response"] for line in (tmp_path / "out.jsonl").open()}
    body = answers["a"]["body"]
    np.testing.assert_allclose([each["embedding"] for each in body["data"]], expected, atol=1e-6)
    assert body["usage"]["prompt_tokens"] > 3 and body["note"] == NOT_MADE
    packed = b64decode(answers["b"]["body"]["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(packed, "<f4"), expected[1], atol=1e-6)
    assert answers["c"]["body"]["choices"][0]["text"]
    assert [answers[name]["status_code"] for name in "de"] == [400, 400]
    assert "dimensions" in answers["d"]["body"]["error"]["message"]
