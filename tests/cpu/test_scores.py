"""Log probabilities of given texts: by `LLM`, beside other requests, through the server, and as `penstock eval` has
them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM
from penstock.errors import BadRequest, BrokenModel
from penstock.serve.api.desk import _require_few_scores
from penstock.serve.api.wire import ChatRequest
from penstock.serve.engine import Engine
from penstock.serve.evaluate import evaluate
from penstock.serve.log_probabilities import log_softmax
from penstock.serve.sampling import SamplingParams
from penstock.serve.scores import Scores
from penstock.serve.service import Service
from penstock.serve.told import AnswerPiece, Ended
from tests.cpu.engines import load, make_model
from tests.cpu.servers import CONTEXT, Server, serving
from tests.cpu.services import SEQS, Heard, plans, prompts

TEXT = "Once upon a time there was a miller, whose daughter could spin straw into gold."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "llama", "int4")


@pytest.fixture(scope="module")
def server(model: Path, cache: Path) -> Iterator[Server]:
    with serving(model, cache, "--batch", 4, "--name", "tiny", "--context", 256) as found:
        yield found


def wanted(engine: Engine, ids: list[int]) -> Any:
    """Log probabilities float32 [T - 1] of the tokens after the first, and of all tokens [T, V], as `evaluate` computes
    them."""
    logp = log_softmax(engine.logits(ids))
    return logp[np.arange(len(ids) - 1), ids[1:]], logp


def test_llm_scores_as_eval_does(model: Path, cache: Path) -> None:
    for rows in (0, 7, 32):
        with LLM(model, cache=cache, score_rows=rows) as llm:
            assert llm.engine.plan.logits_rows == max(1, rows)
            ids = llm.engine.tokenizer.encode(TEXT)
            found, by_ids = llm.score(TEXT, likeliest=3), llm.score(ids)
            expected, logp = wanted(llm.engine, ids)
            nll = math.log(evaluate(llm.engine, TEXT).perplexity)
        assert found.token_ids == by_ids.token_ids == ids and found.logprobs == by_ids.logprobs
        assert found.logprobs[0] is None and found.likeliest[0] == () and not any(by_ids.likeliest)
        assert found.logprobs[1:] == pytest.approx(expected, abs=1e-4)
        assert -sum(filter(None, found.logprobs)) / (len(ids) - 1) == pytest.approx(nll, abs=1e-4)
        for i, best in enumerate(found.likeliest[1:]):
            assert [token for token, _ in best] == np.argsort(-logp[i], kind="stable")[:3].tolist()


@pytest.mark.parametrize("name", ["resident", "streaming", "two batches", "few pages"])
def test_scores_beside_answers_are_those_alone(folder: Path, name: str) -> None:
    """Every second request is a score; among them such without an answer. A plan with few rows for logits, too."""
    for logits_rows in (SEQS, 16):
        plan = replace(plans(folder)[name], logits_rows=logits_rows)
        some = prompts(12, plan.target.spec.vocab)
        with load(folder, plan=plan) as engine:
            alone = [wanted(engine, ids)[0] for ids in some]
            params = [
                SamplingParams(max_tokens=i % 6, ignore_eos=True, prompt_logprobs=2)
                if i % 2 == 0
                else SamplingParams(max_tokens=9, ignore_eos=True)
                for i in range(len(some))
            ]
            answers = [engine.generate([ids], p)[0] for ids, p in zip(some, params, strict=True)]
            with closing(Service(engine, prompt_rows=5, queue=100)) as service:
                heard = [Heard() for _ in some]
                for ids, p, each in zip(some, params, heard, strict=True):
                    service.submit(ids, p, each.tell)
                for i, each in enumerate(heard):
                    _, told = each.end()
                    assert isinstance(told, Ended), told
                    assert told.answer.token_ids == answers[i].token_ids
                    assert told.answer.finish_reason == answers[i].finish_reason == "length"
                    for scores in (told.answer.prompt_scores, answers[i].prompt_scores):
                        assert (scores is None) == (i % 2 == 1)
                        if scores is not None:
                            np.testing.assert_allclose(scores.logprobs, alone[i], atol=1e-4)
                assert service.idle(600) and service.free_sequences == SEQS
                said = sum(len(answer.token_ids) for answer in answers)
                counts = service.counts
                assert counts.output_tokens == said
                # Who gave pages back reads his prompt again.
                assert counts.prompt_tokens == sum(map(len, some)) or (counts.given_back and name == "few pages")


def test_prompts_in_one_call_are_scored_each(folder: Path) -> None:
    plan = plans(folder)["two batches"]
    some = prompts(6, plan.target.spec.vocab)
    with load(folder, plan=plan) as engine:
        answers = engine.generate(some, SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=0))
        for ids, answer in zip(some, answers, strict=True):
            assert answer.prompt_scores is not None and len(answer.token_ids) == 3
            np.testing.assert_allclose(answer.prompt_scores.logprobs, wanted(engine, ids)[0], atol=1e-4)
        pieces = "".join(engine.stream(some[0], SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=0)))
        assert engine.last is not None and engine.last.text == pieces == answers[0].text


def test_nothing_but_numbers_becomes_a_score() -> None:
    scores = Scores(np.array([1, 2, 0], np.int32), 5)
    scores.take(0, np.array([[0, 0, 3e38]], np.float32))
    scores.take(1, np.array([[0, -3e38, 3e38], [np.nan] * 3], np.float32))  # the last row says nothing of the prompt
    first, second = scores.tokens()
    assert first.token == 2 and first.logprob == 0 and [token for token, _ in first.best] == [2, 0, 1]
    assert second.logprob == -9999 and len(second.best) == 3
    with pytest.raises(BrokenModel, match="NaN"):
        scores.take(1, np.array([[0, np.nan, 0]], np.float32))
    with pytest.raises(BadRequest, match="at least 1"):
        SamplingParams(max_tokens=0)
    assert Scores(np.array([1], np.int32), 2).tokens() == []


def test_echo_has_the_shape_that_lm_eval_reads(server: Server, model: Path) -> None:
    """Its `local-completions` sends ids of context and continuation, and sums log probabilities after the context."""
    with load(model, context=CONTEXT, score=True) as engine:
        pairs = [("Once upon a", " time"), (TEXT[:40], TEXT[40:]), ("x", "yz")]
        encoded = [(engine.tokenizer.encode(a), engine.tokenizer.encode(a + b)) for a, b in pairs]
        texts = [engine.tokenizer.decode(ids) for _, ids in encoded]
        expected = [wanted(engine, ids) for _, ids in encoded]
    body = {
        "model": "tiny", "prompt": [ids for _, ids in encoded], "temperature": 0, "max_tokens": 1, "logprobs": 1,
        "seed": 1234, "echo": True,
    }  # fmt: skip
    status, _, found = server.ask("POST", "/v1/completions", body)
    assert status == 200, found
    for choice, (context, ids), text, (logprobs, logp) in zip(found["choices"], encoded, texts, expected, strict=True):
        about = choice["logprobs"]
        assert len(about["tokens"]) == len(about["token_logprobs"]) == len(about["top_logprobs"]) == len(ids) + 1
        assert about["token_logprobs"][0] is None and about["top_logprobs"][0] is None
        assert choice["text"].startswith(text)
        rest, best = about["token_logprobs"][len(context) : -1], about["top_logprobs"][len(context) : -1]
        assert sum(rest) == pytest.approx(float(logprobs[len(context) - 1 :].sum()), abs=1e-4)
        is_greedy = all(each == max(top.values()) for each, top in zip(rest, best, strict=True))
        greedy = logp[len(context) - 1 : -1].argmax(axis=1).tolist() == ids[len(context) :]
        assert is_greedy == greedy
        assert about["text_offset"] == sorted(about["text_offset"])
    assert found["usage"]["completion_tokens"] == 3
    assert found["usage"]["prompt_tokens"] == sum(len(ids) for _, ids in encoded)


def test_echo_of_text_whole_streamed_and_without_an_answer(server: Server) -> None:
    client = server.client()
    asked = {"model": "tiny", "prompt": "Once upon", "logprobs": 2, "echo": True, "temperature": 0}
    nothing = client.completions.create(max_tokens=0, **asked)  # type: ignore[call-overload]
    assert nothing.choices[0].text == "Once upon" and nothing.usage.completion_tokens == 0
    assert nothing.choices[0].finish_reason == "length"
    about = nothing.choices[0].logprobs
    # The tokenizer puts no BOS first, and a token is a byte.
    assert about.tokens == list("Once upon") and about.text_offset == list(range(9))
    assert about.token_logprobs[0] is None and all(each < 0 for each in about.token_logprobs[1:])
    whole = client.completions.create(max_tokens=4, **asked).choices[0]  # type: ignore[call-overload]
    assert whole.text.startswith("Once upon") and whole.logprobs.tokens[:9] == about.tokens
    assert whole.logprobs.token_logprobs[1:9] == pytest.approx(about.token_logprobs[1:])
    for most, expected in ((4, whole), (0, nothing.choices[0])):
        events = list(client.completions.create(max_tokens=most, stream=True, **asked))  # type: ignore[call-overload]
        pieces = [event.choices[0] for event in events]
        assert "".join(piece.text for piece in pieces) == expected.text
        streamed = [each for piece in pieces if piece.logprobs for each in piece.logprobs.token_logprobs]
        assert streamed[0] is None and streamed[1:] == pytest.approx(expected.logprobs.token_logprobs[1:])
        assert pieces[-1].finish_reason
    plain = client.completions.create(**{**asked, "logprobs": None}, max_tokens=3).choices[0]  # type: ignore[call-overload]
    assert plain.text == whole.text[: len(plain.text)] and plain.logprobs is None


def test_what_scores_would_take_too_much_is_refused(server: Server) -> None:
    for body, says in (
        ({"prompt": "a", "max_tokens": 0}, "without echo"),
        ({"prompt": "a", "max_tokens": 0, "echo": True}, "without echo"),
        ({"prompt": ["a" * 120] * 16, "echo": True, "logprobs": 20, "n": 1, "max_tokens": 1}, None),
        ({"prompt": ["a" * 200] * 4, "echo": True, "logprobs": 20, "n": 4, "max_tokens": 1}, "may have 65536"),
        ({"prompt": ["a" * 200] * 4, "echo": True, "logprobs": 1, "n": 4, "max_tokens": 1}, None),
    ):
        status, _, found = server.ask("POST", "/v1/completions", body)
        assert status == (400 if says else 200), found
        assert says is None or says in found["error"]["message"]


def test_first_pieces_bring_the_prompts_scores(folder: Path) -> None:
    with load(folder, plan=plans(folder)["resident"]) as engine, closing(Service(engine, prompt_rows=5, queue=9)) as s:
        heard = Heard()
        s.submit([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=1), heard.tell)
        told = [heard.next() for _ in range(4)]
        assert [isinstance(each, AnswerPiece) and each.prompt_scores is not None for each in told] == [
            True,
            False,
            False,
            False,
        ]


def test_log_probabilities_of_a_request_are_bounded() -> None:
    # Within 200 MiB 16 answers of 3,000 tokens with 20 each had the server killed.
    with pytest.raises(BadRequest, match=r"1008000 log probabilities.*65536, here with max_tokens of 195"):
        _require_few_scores(SamplingParams(max_tokens=3000, logprobs=20), 16, [[1, 2]], 4096)
    _require_few_scores(SamplingParams(max_tokens=3000, logprobs=20), 16, [[1, 2]], 190)  # no room for more
    _require_few_scores(SamplingParams(max_tokens=1 << 20), 16, [[1, 2]], 1 << 20)
    given = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    assert ChatRequest.model_validate(given).params({}, 4096).max_tokens == 65536 // 21
    assert ChatRequest.model_validate({**given, "max_tokens": 9}).params({}, 4096).max_tokens == 9
