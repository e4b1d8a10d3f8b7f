"""Clients that ask and do not read what they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.responses import Response, StreamingResponse

from penstock.serve.api.guard import Access, Guard, Limits, Receive, Scope, Send
from penstock.serve.api.server import Impatient


class Quick(Impatient):
    idle_s = unread_s = 0.1


MIB = 1 << 20
MORE_MIB = 64  # than the system keeps for a connection


async def pieces() -> AsyncIterator[bytes]:
    for _ in range(MORE_MIB):
        yield bytes(MIB)


@pytest.mark.parametrize("streams", [False, True])
def test_whoever_does_not_read_is_cut_off_and_fills_no_log(streams: bool, caplog: pytest.LogCaptureFixture) -> None:
    ended = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal ended
        try:
            response = StreamingResponse(pieces()) if streams else Response(bytes(MORE_MIB * MIB))
            await response(scope, receive, send)
        finally:
            ended += 1

    async def scenario() -> None:
        guard = Guard(app, Access("127.0.0.1"), Limits(1000, send_s=0.1))
        server = uvicorn.Server(uvicorn.Config(guard, port=0, http=Quick, ws="none", lifespan="off", log_config=None))
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while not ended or server.server_state.connections:
            await asyncio.sleep(0.01)
        server.should_exit = True
        await serving
        writer.close()

    with caplog.at_level("ERROR"):
        asyncio.run(asyncio.wait_for(scenario(), 120))
    assert ended == 1 and not caplog.records
