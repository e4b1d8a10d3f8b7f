"""Bodies of many small parts take much more memory than bytes: the guard has room for so much of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from penstock.serve.api.guard import Access, Guard, Limits

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
