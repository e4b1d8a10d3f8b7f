"""`penstock serve` as clients meet it: a process of its own, the openai package, raw sockets, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.serve.api.guard import Access, Guard, Limits
from penstock.serve.engine import Engine
from penstock.serve.sampling import SamplingParams
from tests.cpu.cached_copies import make_checkpoint
from tests.cpu.commands import here, machine_cache, start
from tests.cpu.engines import load
from tests.cpu.servers import CONTEXT, Server, serving, text_of


@pytest.fixture(scope="module")
def server(model: Path, cache: Path) -> Iterator[Server]:
    with serving(model, cache, "--batch", 4, "--queue", 40, "--name", "tiny") as found:
        yield found


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    """The same model without a server, as the oracle."""
    with load(model, context=CONTEXT) as found:
        yield found


def test_openai_client_completes_and_chats(server: Server, engine: Engine) -> None:
    client = server.client()
    assert [each.id for each in client.models.list()] == ["tiny"]
    done = client.completions.create(model="tiny", prompt="Once upon", max_tokens=9, temperature=0)
    assert done.choices[0].text == text_of(engine, "Once upon", max_tokens=9)
    assert done.usage is not None and done.usage.completion_tokens <= 9
    two = client.completions.create(model="tiny", prompt=["a", "bc"], max_tokens=4, n=2, temperature=1, seed=3)
    assert [each.index for each in two.choices] == [0, 1, 2, 3]
    expected = [text_of(engine, p, max_tokens=4, temperature=1.0, seed=s) for p in ("a", "bc") for s in (3, 4)]
    assert [each.text for each in two.choices] == expected
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], max_completion_tokens=5, temperature=0
    )
    assert chat.choices[0].finish_reason in ("stop", "length") and chat.choices[0].message.role == "assistant"


def test_heads_are_answered(server: Server) -> None:
    """Ollama's command line and load balancers begin with one."""
    for path, status in (("/", 200), ("/health", 200), ("/v1/models/tiny", 200), ("/nope", 404)):
        assert server.ask("HEAD", path)[0] == status and server.ask("GET", path)[0] == status
    assert server.ask("HEAD", "/v1/chat/completions")[0] == 405


def test_openai_client_streams(server: Server, engine: Engine) -> None:
    client = server.client()
    whole = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=12, temperature=0
    )
    events = list(
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == whole.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == whole.choices[0].finish_reason
    usage, first = events[-1].usage, whole.usage
    assert usage is not None and first is not None and not events[-1].choices
    assert (usage.prompt_tokens, usage.completion_tokens) == (first.prompt_tokens, first.completion_tokens)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1  # the first one left them


def test_log_probabilities_biases_and_penalties(server: Server, engine: Engine) -> None:
    client = server.client()
    ids = engine.tokenizer.encode("Once")
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3)
    expected = engine.generate([ids], params)[0]
    asked = {"model": "tiny", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    done = client.completions.create(prompt="Once", logprobs=3, **asked).choices[0]
    assert done.logprobs is not None
    assert done.logprobs.token_logprobs == pytest.approx([each.logprob for each in expected.logprobs])
    assert done.logprobs.tokens == [engine.tokenizer.decode([i], skip_special=False) for i in expected.token_ids]
    assert [max(best.values()) for best in done.logprobs.top_logprobs or ()] == done.logprobs.token_logprobs
    chats = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2, **asked}
    chat = client.chat.completions.create(**chats).choices[0]
    assert chat.logprobs is not None and chat.logprobs.content is not None and len(chat.logprobs.content) == 6
    assert all(len(each.top_logprobs) == 2 for each in chat.logprobs.content)
    streamed = [
        token
        for event in client.chat.completions.create(**chats, stream=True)
        for token in (event.choices[0].logprobs and event.choices[0].logprobs.content) or ()
    ]
    assert [each.logprob for each in streamed] == [each.logprob for each in chat.logprobs.content]

    first = expected.token_ids[0]
    client.completions.create(prompt="Once", logit_bias={str(first): -100}, **asked)
    assert engine.generate([ids], SamplingParams(max_tokens=1, logit_bias={first: -100}))[0].token_ids != [first]
    biased = client.completions.create(prompt="Once", logit_bias={"65": 100}, **asked).choices[0].text
    assert biased == engine.tokenizer.decode([65] * 6)
    varied = client.completions.create(
        prompt="Once", logit_bias={"65": 10, "66": 9.5}, frequency_penalty=2, presence_penalty=2, **asked
    )
    alone = SamplingParams(
        max_tokens=6, ignore_eos=True, logit_bias={65: 10, 66: 9.5}, frequency_penalty=2, presence_penalty=2
    )  # type: ignore[arg-type]
    assert varied.choices[0].text == engine.generate([ids], alone)[0].text


def test_64_streams_at_once_are_right(model: Path, cache: Path, engine: Engine) -> None:
    """The server is a process of its own. A third of its clients leave in the middle; none of the others notices."""
    prompts = [f"{i} " * (1 + i % 7) for i in range(64)]
    expected = [text_of(engine, prompt, max_tokens=20, ignore_eos=True) for prompt in prompts]

    with serving(model, cache, "--batch", 4, "--queue", 60) as server, ThreadPoolExecutor(64) as pool:

        def one(i: int) -> str | None:
            stream = server.client().completions.create(
                model=model.name, prompt=prompts[i], max_tokens=20, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            text = ""
            for number, event in enumerate(stream):
                text += event.choices[0].text
                if i % 3 == 0 and number == 4:
                    stream.close()
                    return None
            return text

        found = list(pool.map(one, range(64)))
        assert [text for i, text in enumerate(found) if i % 3] == [text for i, text in enumerate(expected) if i % 3]
        for _ in range(1200):  # those that were cut off leave at the next pass
            metrics = server.ask("GET", "/metrics")[2]
            if "penstock_requests_running 0.0" in metrics and "penstock_sequences_free 4.0" in metrics:
                break
            time.sleep(0.05)
        else:
            raise AssertionError(metrics)
        assert 'penstock_requests_total{ended="failed"} 0.0' in metrics and "Once" not in metrics


def test_what_is_not_supported_or_wrong_is_refused_in_openais_shape(server: Server) -> None:
    for body, says in (
        ({}, "prompt"),
        ({"prompt": "a", "temprature": 1}, "temprature: there is no such field here"),
        ({"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"99999999": 1}}, "vocabulary"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "n": 99}, "n"),
        ({"prompt": []}, "1 to 16"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [-1]}, "vocabulary"),
        ({"prompt": [1 << 70]}, "64 bits"),
        ({"prompt": "a " * 500}, f"room for {CONTEXT}"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream"),
    ):
        status, _, answer = server.ask("POST", "/v1/completions", body)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error", (body, answer)
        assert says in answer["error"]["message"], (body, answer)
    _, _, answer = server.ask("POST", "/v1/completions", b'{"prompt": }')
    assert answer["error"]["message"].startswith("the body is no JSON: ") and answer["error"]["param"] is None
    for raw in (b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 60_000):
        assert server.ask("POST", "/v1/completions", raw)[0] == 400, raw[:20]
    status, _, answer = server.ask("POST", "/v1/chat/completions", {"messages": [], "model": "other"})
    assert status in (400, 404)
    with pytest.raises(openai.NotFoundError, match="no model"):
        server.client().completions.create(model="gpt-4", prompt="a")
    assert server.ask("GET", "/nothing")[0] == 404 and server.ask("GET", "/v1/completions")[0] == 405


def test_pages_of_other_sites_are_refused(server: Server) -> None:
    def status(headers: dict[str, str], body: object = None) -> int:
        return int(server.ask("POST" if body is not None else "GET", "/v1/models", body, headers)[0])

    assert status({"host": f"localhost:{server.port}"}) == status({"host": f"127.0.0.1:{server.port}"}) == 200
    assert status({"host": "rebound.example"}) == 421
    assert status({"host": f"localhost.evil.example:{server.port}"}) == 421
    assert status({"origin": "https://evil.example"}) == status({"origin": "null"}) == 403
    assert status({"origin": f"http://127.0.0.1:{server.port}"}) == 200
    assert status({"content-type": "text/plain"}, {}) == 415
    for site, expected in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        assert status({"sec-fetch-site": site}) == expected, site  # an address in a page, as of an image: no Origin
    assert status({"sec-fetch-site": "same-origin", "origin": f"http://127.0.0.1:{server.port}"}) == 200


def test_bodies_are_bounded_one_by_one_and_together(server: Server) -> None:
    status, _, answer = server.ask("POST", "/v1/completions", {"prompt": "x" * (128 << 10)})
    assert status == 413 and "bytes for this context" in answer["error"]["message"]

    async def scenario() -> list[int]:
        release, statuses = asyncio.Event(), []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert (await receive())["body"] == b"x" * 50
            await release.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def ask(headers: list[tuple[bytes, bytes]]) -> None:
            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"x" * 50, "more_body": False}

            async def send(message: Any) -> None:
                statuses.extend([message["status"]] if "status" in message else [])

            scope = {"type": "http", "method": "POST", "path": "/", "headers": [
                (b"host", b"localhost"), (b"content-type", b"application/json"), *headers]}  # fmt: skip
            await guard(scope, receive, send)

        guard = Guard(app, Access("127.0.0.1"), Limits(100, 250))
        long, chunked, too_long = (
            (b"content-length", b"90"),
            (b"transfer-encoding", b"chunked"),
            (b"content-length", b"101"),
        )
        held = [asyncio.create_task(ask([each])) for each in (long, chunked)]
        await asyncio.sleep(0)
        for refused in (long, chunked, too_long):
            await ask([refused])
        release.set()
        await asyncio.gather(*held)
        await ask([long])
        return statuses

    assert asyncio.run(scenario()) == [503, 503, 413, 200, 200, 200]


def test_tokenizes_and_tells_its_plan(server: Server, engine: Engine) -> None:
    _, _, found = server.ask("POST", "/tokenize", {"prompt": "Hello there"})
    assert found["tokens"] == engine.tokenizer.encode("Hello there") and found["count"] == len(found["tokens"])
    _, _, text = server.ask("POST", "/detokenize", {"tokens": found["tokens"]})
    assert text["prompt"].endswith("Hello there")
    assert server.ask("POST", "/detokenize", {"tokens": [1 << 40]})[0] == 400
    _, _, plan = server.ask("GET", "/v1/plan")
    assert plan["sequences"] == 4 and plan["prompt_rows"] >= 1 and plan["predicted"]["decode_tokens_per_s"] > 0
    assert server.ask("GET", "/health")[2] == {"status": "ok"}


def test_tells_what_a_request_would_find_that_came_now(server: Server) -> None:
    idle = server.ask("GET", "/v1/plan?prompt_tokens=8&output_tokens=5")[2]["next_request"]
    assert (idle["prompt_tokens"], idle["output_tokens"], idle["refused"]) == (8, 5, None)
    assert idle["place"] == 0 and idle["wait_s"] == 0 and idle["ttft_s"] > 0 and idle["tokens_per_s"] > 0
    context = server.ask("GET", "/v1/models")[2]["data"][0]["max_model_len"]
    long = server.ask("GET", f"/v1/plan?prompt_tokens={context + 1}")
    assert long[0] == 400 and str(context) in long[2]["error"]["message"]
    assert server.ask("GET", "/v1/plan?prompt_tokens=0")[0] == 400


def test_raw_sockets_block_nobody(server: Server) -> None:
    """Half requests, bodies that never come, pipelines, many headers: others are answered meanwhile."""
    held = []
    for sent in (
        b"",
        b"POST /v1/comple",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
        b'content-length: 100\r\n\r\n{"prompt"',
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(100_000)) + b"\r\n",
        b"\x00\x01\x02\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 99999999999\r\n\r\n",
    ):
        raw = socket.create_connection(("127.0.0.1", server.port), timeout=600)
        with suppress(ConnectionResetError, BrokenPipeError):  # refused before all of it was sent
            raw.sendall(sent)
        held.append(raw)
    pipelined = socket.create_connection(("127.0.0.1", server.port), timeout=600)
    pipelined.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
    seen = b""
    while seen.count(b'"ok"') < 3:
        got = pipelined.recv(65536)
        assert got, seen
        seen += got
    assert server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    for raw in [*held, pipelined]:
        raw.close()


def test_keys_are_needed_where_they_are_given(model: Path, cache: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret-one\nsecret-two\nann secret-three tokens-per-minute=30\n")
    with serving(model, cache, "--key-file", keys, "--batch", 2) as server:
        assert server.ask("GET", "/health")[0] == 200
        status, headers, answer = server.ask("GET", "/v1/models")
        assert status == 401 and answer["error"]["code"] == "invalid_api_key" and headers["www-authenticate"]
        for wrong in ("Bearer secret", "Basic secret-one", "Bearer ", "secret-one", "Bearer secret-one secret-two"):
            assert server.ask("GET", "/metrics", headers={"authorization": wrong})[0] == 401
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        assert [each.id for each in server.client("secret-two").models.list()] == [model.name]
        cached = []
        for key in ("secret-one", "secret-one", "secret-two"):  # what one has sent makes nothing faster for another
            done = server.client(key).completions.create(model=model.name, prompt="Once upon", max_tokens=1)
            assert done.usage is not None and done.usage.prompt_tokens_details is not None
            cached.append(done.usage.prompt_tokens_details.cached_tokens == done.usage.prompt_tokens - 1)
        assert cached == [False, True, False]
        ann = server.client("secret-three")
        for size in (20, 100):  # the first leaves some, the second takes what comes in three minutes
            list(ann.completions.create(model=model.name, prompt="a" * size, max_tokens=1, stream=size > 20))
        with pytest.raises(openai.RateLimitError, match="30 tokens a minute"):
            ann.completions.create(model=model.name, prompt="a", max_tokens=1)


def test_beyond_this_machine_a_key_is_needed(
    model: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = here(capsys, "serve", model, "--cache", cache, "--host", "0.0.0.0")
    assert found.code == 2 and "--key-file" in found.err
    (tmp_path / "empty").write_text("# none\n")
    found = here(capsys, "serve", model, "--cache", cache, "--key-file", tmp_path / "empty")
    assert found.code == 2 and "has no key" in found.err


def test_a_port_that_is_taken(server: Server, model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = here(capsys, "serve", model, "--cache", cache, "--context", 64, "--port", server.port)
    assert found.code == 2 and f"127.0.0.1:{server.port}" in found.err and "Traceback" not in found.err


@pytest.mark.parametrize("flags", [(), ("--kv-home", "disk")])
def test_a_prompt_goes_on_after_a_restart(model: Path, cache: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    prompt, cached = "Once upon a time there was a tree. " * 3, []
    for _ in range(2):
        with serving(model, cache, "--name", "tiny", "--keep-kv", tmp_path / "kv", *flags) as server:
            done = server.client().completions.create(model="tiny", prompt=prompt, max_tokens=3, temperature=0)
            assert done.usage is not None and done.usage.prompt_tokens > 65
            details = done.usage.prompt_tokens_details
            cached.append(details.cached_tokens if details is not None else 0)
    assert cached == [0, 64]


def test_sigterm_lets_answers_end_and_takes_no_more(model: Path, cache: Path, engine: Engine) -> None:
    with serving(model, cache, "--batch", 2) as server:
        stream = server.client().completions.create(
            model=model.name, prompt="Once", max_tokens=100, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        text = next(iter(stream)).choices[0].text
        server.process.send_signal(signal.SIGTERM)
        for _ in range(200):
            try:
                status, _, answer = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})
            except OSError:
                break  # it has ended
            if status != 200:
                assert status == 503 and answer["error"]["code"] == "ending"
                break
        text += "".join(event.choices[0].text for event in stream)
        assert text == text_of(engine, "Once", max_tokens=100, ignore_eos=True)
        server.process.wait(600)
    assert server.process.returncode == 0 and "penstock: ended\n" in server.said


def test_sigterm_while_the_model_is_loaded_leaves_nothing(tmp_path: Path) -> None:
    model, temporary = make_checkpoint(tmp_path / "model"), tmp_path / "temporary"
    temporary.mkdir()
    flags = ("--cache", machine_cache(tmp_path / "cache"), "--port", 0, "--context", CONTEXT)
    process = start("serve", model, *flags, env={**os.environ, "TMPDIR": str(temporary)})
    while not list(temporary.iterdir()):  # its small files
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0 and said.endswith(b"penstock: ended\n")
    assert b"Traceback" not in said and not list(temporary.iterdir())


def test_answers_are_not_kept_from_those_who_wait(server: Server) -> None:
    """A full queue says so at once, and when to come again."""
    with ThreadPoolExecutor(60) as pool:
        body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}
        found = list(pool.map(lambda _: server.ask("POST", "/v1/completions", body), range(60)))
    statuses = [status for status, _, _ in found]
    assert set(statuses) <= {200, 429} and statuses.count(200) >= 44
    for status, headers, answer in found:
        assert status == 200 or (headers["retry-after"] == "5" and answer["error"]["code"] == "queue_full")


def test_the_openapi_document_is_there(server: Server) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/openapi.json", timeout=600) as answer:
        document = json.load(answer)
    assert "/v1/chat/completions" in document["paths"]
