"""Bodies of many small parts take much more memory than bytes: the guard has room for so much of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.serve.api.guard import Access, Guard, Limits, Refused

HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]


def test_what_bodies_hold_is_bounded_until_answers_begin() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": ""}] * 2000}).encode()  # 66 KB, and 2 MB as objects
    go, here = asyncio.Event(), 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal here
        here += 1
        await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
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
        assert 8 <= here <= limits.parsed_bytes // (2000 * 990)
        go.set()
        found = [await each for each in asked]
        assert sorted(set(found)) == [200, 503] and found.count(200) == here
        assert await ask(guard) == 200  # all of it is free again
        assert await ask(Guard(app, Access("127.0.0.1"), Limits(1 << 20, parsed_bytes=1 << 20))) == 413

    asyncio.run(asyncio.wait_for(scenario(), 600))


def test_a_text_counts_as_one_object() -> None:
    """A prompt that is JSON itself, as agents send it, has no more parts than another. A string without an end, whose
    escaped quotes could each begin another one, is looked at once."""
    guard = Guard(_no_app, Access("127.0.0.1"), Limits.of(131_072))
    text = json.dumps([{"a": 1, "b": [2, 3]}] * 20_000)
    body = json.dumps({"prompt": text}).encode()
    assert guard._parsed(body) < 3 * len(body) + 2_000
    endless = b'{"' + b'\\"' * 1_000_000
    assert Guard(_no_app, Access("127.0.0.1"), Limits.of(131_072))._parsed(endless) < 3 * len(endless) + 2_000
    with pytest.raises(Refused, match="body of so many parts"):
        guard._parsed(text.encode())


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError
