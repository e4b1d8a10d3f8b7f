"""Bodies of many small parts take much more memory than bytes: the guard has room for so much of it, and streams let
go of it."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.serve.api.guard import LET_GO, Access, Guard, Limits, Refused
from tests.cpu.servers import serving

HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]


@pytest.mark.parametrize("lets_go", [False, True])
def test_what_bodies_hold_is_bounded_until_their_requests_end(lets_go: bool) -> None:
    """An answer that has begun may hold its body still: an error does so until its last byte is sent."""
    body = json.dumps({"messages": [{"role": "user", "content": ""}] * 2000}).encode()  # 66 KB, and 2 MB as objects
    go, here = asyncio.Event(), 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal here
        here += 1
        if lets_go:
            scope[LET_GO]()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await go.wait()
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(guard: Guard) -> int:
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": HEADERS}
        await guard(scope, receive, send)
        return statuses[0]

    async def scenario() -> None:
        limits = Limits.of(1024)
        guard = Guard(app, Access("127.0.0.1"), limits)
        asked = [asyncio.ensure_future(ask(guard)) for _ in range(40)]
        while here + sum(each.done() for each in asked) < 40:
            await asyncio.sleep(0.01)
        go.set()
        found = [await each for each in asked]
        assert found.count(200) == here and found.count(503) == 40 - here
        assert here == 40 if lets_go else 8 <= here <= limits.parsed_bytes // (2000 * 990)
        assert await ask(guard) == 200  # all of it is free again
        assert await ask(Guard(app, Access("127.0.0.1"), Limits(1 << 20, parsed_bytes=1 << 20))) == 413

    asyncio.run(asyncio.wait_for(scenario(), 600))


def test_a_text_counts_as_one_object() -> None:
    """A prompt that is JSON itself, as agents send it, has no more parts than another. A string without an end, whose
    escaped quotes could each begin another one, is looked at once."""
    guard = Guard(_no_app, Access("127.0.0.1"), Limits.of(131_072))
    text = json.dumps([{"a": 1, "b": [2, 3]}] * 20_000)
    body = json.dumps({"prompt": text}).encode()
    assert guard._parsed(body) < 4 * len(body) + 2_000
    endless = b'{"' + b'\\"' * 1_000_000
    assert Guard(_no_app, Access("127.0.0.1"), Limits.of(131_072))._parsed(endless) < 4 * len(endless) + 2_000
    with pytest.raises(Refused, match="body of so many parts"):
        guard._parsed(text.encode())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_streams_that_wait_hold_nothing_of_their_bodies(model: Path, cache: Path) -> None:
    """Each body is 59 KB, and 0.7 MB as objects; 150 of them took 100 MB while their streams waited."""
    about = {"metadata": {str(i): "" for i in range(5000)}, "max_tokens": 100, "ignore_eos": True}
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "stream": True, **about}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with serving(model, cache, "--batch", 1, "--no-schemas") as server, ExitStack() as open_:
        status = Path(f"/proc/{server.process.pid}/status")
        before = _resident_mib(status)
        for _ in range(150):
            client = open_.enter_context(socket.create_connection(("127.0.0.1", server.port), 600))
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            assert client.recv(20).startswith(b"HTTP/1.1 200")
        assert _resident_mib(status) < before + 40


def _resident_mib(status: Path) -> int:
    return int(status.read_text().partition("VmRSS:")[2].split()[0]) >> 10


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError
