"""Keys of a server: the file that names them, and what each may ask. No clock is read: the test says what it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.errors import BadRequest
from penstock.serve.api.guard import OWNER, SPEND, Access, Guard, Limits
from penstock.serve.api.keys import Key, Spending, known, parse_keys

FILE = """
# ours
lonely-secret
ann  s3cret=x
bob  other at-once=2 tokens-per-minute=600
"""


def test_the_file() -> None:
    keys = parse_keys(FILE, "keys")
    assert keys == (Key("line 3", "lonely-secret"), Key("ann", "s3cret=x"), Key("bob", "other", 2, 600))
    assert "s3cret" not in repr(keys) and "other" not in repr(keys)
    assert known(keys, "other") is keys[2] and known(keys, "othe") is None and known(keys, "") is None
    for text, says in (
        ("", "no key"),
        ("# only\n", "no key"),
        ("a x\na y", "name comes twice"),
        ("a x\nb x", "key comes twice"),
        ("a x at-once=0", "line 1"),
        ("a x at-once=²", "line 1"),
        ("a x at-once=-1", "line 1"),
        ("a x hours=9", "line 1"),
    ):
        with pytest.raises(BadRequest, match=says) as refused:
            parse_keys(text, "keys")
        assert " x" not in refused.value.message.replace("keys", "")


def test_tokens_come_back_evenly() -> None:
    now_s = 0.0
    spending, key = Spending(lambda: now_s), Key("bob", "x", None, 600)
    assert spending.refuses(key) is None
    spending.spend(key, 700)  # an answer may take more than there was: it is owed
    why, wait_s = spending.refuses(key) or ("", 0.0)
    assert "600 tokens a minute" in why and wait_s == pytest.approx(10.1)
    now_s = 10.2
    assert spending.refuses(key) is None
    now_s = 1e6  # never more than a minute's
    spending.spend(key, 600)
    assert spending.refuses(key) is not None
    assert spending.refuses(Key("ann", "y")) is None


def test_a_key_has_so_many_requests_open_and_others_are_not_held_up() -> None:
    """Through the guard: one that is refused holds nothing, and one that ends makes room."""

    async def scenario() -> list[tuple[int, bytes]]:
        release, answered = asyncio.Event(), list[tuple[int, bytes]]()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            assert len(scope[OWNER]) == 32  # a digest, and not the key's name
            await release.wait()
            scope[SPEND](600)
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def ask(secret: str) -> None:
            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"{}", "more_body": False}

            async def send(message: Any) -> None:
                if "status" in message:
                    answered.append((message["status"], dict(message["headers"]).get(b"retry-after", b"")))

            headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"2"),
                       (b"authorization", f"Bearer {secret}".encode())]  # fmt: skip
            await guard({"type": "http", "method": "POST", "path": "/v1/models", "headers": headers}, receive, send)

        guard = Guard(app, Access("127.0.0.1", parse_keys(FILE, "keys")), Limits(100), lambda: 0.0)
        open_ = [asyncio.create_task(ask("other")) for _ in range(2)]
        await asyncio.sleep(0)
        await ask("other")  # a third
        third = asyncio.create_task(ask("s3cret=x"))
        await ask("wrong")
        release.set()
        await asyncio.gather(*open_, third)
        await ask("other")  # it owes 600 of 600 tokens a minute now
        await ask("s3cret=x")
        return answered

    assert asyncio.run(scenario()) == [
        (429, b"1"),
        (401, b""),
        (200, b""),
        (200, b""),
        (200, b""),
        (429, b"61"),
        (200, b""),
    ]
