"""The server under requests that nobody planned for: no answer of 5xx, nothing leaks, nobody else is kept waiting.

Schemathesis draws bodies by our OpenAPI document. Raw sockets send what no client library would. `make test` runs a few
fixed examples, `make fuzz` many.
"""

from __future__ import annotations

import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.cpu.servers import Server, serving

SEQS = 4
MANY = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server(model: Path, cache: Path) -> Iterator[Server]:
    with serving(model, cache, "--batch", SEQS, "--queue", 200, "--name", "tiny") as found:
        yield found
        require_nothing_left(found)


class Held(NamedTuple):
    """What the server's process has open."""

    threads: int
    files: int


def held(server: Server) -> Held:
    process = Path(f"/proc/{server.process.pid}")
    return Held(len(os.listdir(process / "task")), len(os.listdir(process / "fd")))


def require_nothing_left(server: Server) -> None:
    """Waits until no request is there. Every sequence is free then, and the server still answers."""
    for _ in range(600):
        status, _, metrics = server.ask("GET", "/metrics")
        assert status == 200
        gauges = dict(re.findall(r"^penstock_(\w+) ([\d.]+)$", metrics, re.MULTILINE))
        if gauges["requests_running"] == gauges["requests_waiting"] == "0.0":
            break
        time.sleep(0.05)
    assert gauges["sequences_free"] == f"{SEQS}.0", metrics
    assert server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


OPERATIONS = (
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/v1/models"), ("GET", "/v1/models/{name}"), ("GET", "/v1/plan"), ("GET", "/metrics"), ("GET", "/health"),
    ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"), ("POST", "/api/chat"), ("POST", "/api/generate"),
    ("POST", "/api/show"), ("POST", "/v1/responses"), ("GET", "/api/tags"), ("GET", "/api/ps"), ("GET", "/api/version"),
    ("GET", "/v1/live"), ("POST", "/v1/embeddings"), ("POST", "/api/embed"), ("POST", "/api/embeddings"),
)  # fmt: skip


def test_the_document_names_every_operation(server: Server) -> None:
    paths = server.ask("GET", "/openapi.json")[2]["paths"]
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == set(OPERATIONS)


@pytest.mark.fuzz
@pytest.mark.parametrize("method, path", OPERATIONS)
def test_bodies_by_the_openapi_document(server: Server, method: str, path: str) -> None:
    schema = schemathesis.openapi.from_dict(server.ask("GET", "/openapi.json")[2])
    schema.config.update(base_url=f"http://127.0.0.1:{server.port}")

    # Bodies as the document has them, and such as it forbids, where it can forbid any.
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if method == "POST" else (GenerationMode.POSITIVE,):

        @given(case=schema[path][method].as_strategy(generation_mode=mode))
        @settings(max_examples=max(12, settings().max_examples // 12), suppress_health_check=list(HealthCheck))
        def run(case: schemathesis.Case) -> None:
            response = case.call(timeout=600)
            case.validate_response(response, checks=[not_a_server_error])

        run()
    require_nothing_left(server)


def good(rng: random.Random, stream: bool) -> bytes:
    body = b'{"prompt": "%d", "max_tokens": %d, "ignore_eos": true, "stream": %s}' % (
        rng.randrange(1000), rng.randrange(1, 60), b"true" if stream else b"false",
    )  # fmt: skip
    return HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def script(rng: random.Random) -> list[bytes]:
    """What a raw socket sends, piece by piece."""
    whole = good(rng, stream=rng.random() < 0.5)
    kind = rng.randrange(13)
    if kind == 0:  # half a request
        return [whole[: rng.randrange(len(whole))]]
    if kind == 1:  # a slow one
        return [whole[i : i + 9] for i in range(0, len(whole), 9)]
    if kind == 2:  # several at once
        return [b"".join(good(rng, rng.random() < 0.5) for _ in range(rng.randrange(2, 6)))]
    if kind == 3:  # a body that never comes
        return [HEAD + b"Content-Length: %d\r\n\r\n{" % rng.randrange(1, 60_000)]
    if kind == 4:  # very many headers
        return [HEAD, b"".join(b"x-%d: y\r\n" % i for i in range(rng.choice([300, 100_000]))), b"\r\n"]
    if kind == 5:  # a very long one
        return [HEAD + b"X: " + b"y" * rng.choice([40_000, 1_000_000]), b"\r\n\r\n"]
    if kind == 6:  # two lengths
        return [HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + whole]
    if kind == 7:  # chunks, good and bad
        size = rng.choice([b"5", b"-5", b"ffffffffffffffff", b"zz", b"5;x=y"])
        return [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", size + b'\r\n{"a":\r\n', b"0\r\n\r\n"]
    if kind == 8:  # noise
        return [rng.randbytes(rng.randrange(1, 300))]
    if kind == 9:  # noise within
        at = rng.randrange(len(whole))
        return [whole[:at] + rng.randbytes(rng.randrange(1, 9)) + whole[at:]]
    if kind == 10:  # other words
        method, target = (
            rng.choice([b"GET", b"PUT", b"CONNECT", b"", b"POST"]),
            rng.choice([b"*", b"//x", b"/%00", b"/v1/models/" + b"a/" * 200]),
        )
        version = rng.choice([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b""])
        return [b"%s %s %s\r\nHost: localhost\r\n\r\n" % (method, target, version)]
    if kind == 11:  # an upgrade, and one that waits for a word
        extra = rng.choice([b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"Expect: 100-continue\r\n"])
        return [whole.replace(b"\r\n", b"\r\n" + extra, 1)]
    return [whole]


def misbehave(port: int, seed: int) -> bytes:
    """One socket's life. Returns what the server said."""
    rng, said = random.Random(seed), b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as raw, suppress(OSError):
        for piece in script(rng):
            raw.sendall(piece)
        end = rng.randrange(4)
        raw.settimeout(rng.choice([0.05, 0.3]))
        if end == 0:  # gone at once, with a reset
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif end == 1:  # says that it has said all
            raw.shutdown(socket.SHUT_WR)
        for _ in range(rng.randrange(1, 6) if end < 3 else 200):  # cut in the middle, or read as long as it comes
            if not (got := raw.recv(rng.choice([64, 65536]))):
                break
            said += got
    return said


@pytest.mark.fuzz
def test_raw_sockets_leave_nothing_behind(server: Server) -> None:
    """Beside them others ask, and get the right answers."""
    body = {"prompt": "Once upon", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    expected = server.ask("POST", "/v1/completions", body)[2]["choices"][0]["text"]
    ends, wrong = threading.Event(), list[object]()

    def beside() -> None:
        while not ends.is_set():
            status, _, found = server.ask("POST", "/v1/completions", body)
            if status != 200 or found["choices"][0]["text"] != expected:
                wrong.append((status, found))

    others = threading.Thread(target=beside)
    others.start()
    counted: list[Held] = []
    try:
        for turn in range(20 if MANY else 3):
            with ThreadPoolExecutor(16) as pool:
                for said in pool.map(misbehave, [server.port] * 60, range(60 * turn, 60 * turn + 60)):
                    statuses = re.findall(rb"HTTP/1\.1 (\d+)", said)
                    assert all(status < b"500" for status in statuses), said[:500]
            for _ in range(1200):  # the server sees that they are gone
                time.sleep(0.05)
                if held(server).files <= (counted or [held(server)])[0].files:
                    break
            counted.append(held(server))
    finally:
        ends.set()
        others.join()
    assert not wrong, wrong[0]
    require_nothing_left(server)
    # Threads of the pool come with the first turn. After that nothing grows.
    assert max(each.threads for each in counted[1:]) <= counted[0].threads + 2, counted
    assert counted[-1].files <= counted[0].files + 2, counted
