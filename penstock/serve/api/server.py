"""Runs the server: listens, answers until it is told to end, and ends in an orderly way."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.errors import BadRequest
from penstock.serve.api.app import guarded
from penstock.serve.api.guard import ABORT, Access, Limits, Receive, Scope, Send
from penstock.serve.api.shelf import Shelf

_HEADER_BYTES = 32 << 10
# The thread that steps the model comes back from a kernel, and waits so long at most for the one that serves clients.
# Python's default is 5 ms.
_TURN_S = 5e-4
_LONGEST_END_S = 30.0  # what is under way may take so long after SIGTERM


class Impatient(H11Protocol):
    """Closes connections on which no whole head of a request comes: half a request would be waited for, for ever. One
    that is closed is aborted in a while, for what its client does not read would be kept for ever. The application may
    abort it at once.

    `idle_s`: a connection may be open so long without a whole request. `unread_s`: a client has so long to read what is
    left when its connection is closed."""

    idle_s, unread_s = 20.0, 60.0

    def __init__(self, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self._next: asyncio.TimerHandle | None = None
        answer: Any = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await answer({**scope, ABORT: self.transport.abort}, receive, send)

        self.app = app

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch(self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._next is not None:
            self._next.cancel()

    def _watch(self, before: Any) -> None:
        """Looks again in a while, whether a request has come since."""
        self._next = self.loop.call_later(self.idle_s, self._look, before)

    def _look(self, before: Any) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if self.transport.is_closing() or (idle and self.cycle is before):
            self.transport.close()
            self._next = self.loop.call_later(self.unread_s, self.transport.abort)
        else:
            self._watch(self.cycle)


class _Server(uvicorn.Server):
    """Ends new work at the first signal, lets what is under way end, and ends at once at the second."""

    def __init__(self, config: uvicorn.Config, shelf: Shelf, ready: Callable[[int], None]) -> None:
        super().__init__(config)
        self._shelf, self._ready = shelf, ready
        self._ends = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._ready(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._ends:
            self._shelf.abandon()
            self.should_exit = self.force_exit = True
            return
        self._ends = True
        threading.Thread(target=self._end, name="penstock-end", daemon=True).start()

    def _end(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._shelf.refuse, "the server is ending")
            while not self._shelf.ending:
                time.sleep(0.01)
        if not self._shelf.settle(_LONGEST_END_S) and not self._shelf.loads:
            self._shelf.abandon()
            self._shelf.settle(_LONGEST_END_S)
        self.should_exit = True


def serve(shelf: Shelf, access: Access, context: int, port: int, ready: Callable[[int], None]) -> None:
    """Listens until SIGTERM or Ctrl-C, and returns when the last answer has ended. `context`: the tokens that a prompt
    may have, which bound a body. `port`: 0 for any that is free.
    `ready`: is called with the port when requests are taken. Raises BadRequest where nothing can listen there."""
    config = uvicorn.Config(
        guarded(shelf, access, Limits.of(context)),
        host=access.host,
        port=port,
        http=Impatient,
        ws="none",
        lifespan="off",
        log_level="error",  # whoever sends nonsense must not fill a log
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=_HEADER_BYTES,
    )
    server = _Server(config, shelf, ready)
    turn_s = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_S)
    try:
        asyncio.run(server.serve())
    except SystemExit:  # uvicorn's answer to a port that is taken, which it has logged
        raise BadRequest(f"nothing can listen on {access.host}:{port}: is it another server's?") from None
    finally:
        sys.setswitchinterval(turn_s)
