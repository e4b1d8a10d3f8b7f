"""Refuses requests that should not reach the model, before anything reads them: the outermost layer of the server.

A page in a browser may send requests to a server on this machine, under a name of its own that leads here (DNS
rebinding), or as a form of another site. So Host must be a name of this machine, Origin must be this server's or one
that was allowed, and a body must be declared as JSON, which a form cannot do. With an address inside a page, as of an
image, browsers send no Origin. They send Sec-Fetch-Site, which tells of another site. Slow bodies and slow readers time
out.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

from penstock.serve.api.errors import error_body
from penstock.serve.api.keys import Key, Spending, known, seconds_to_wait

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PAGE = "/page/"  # the files of the page
# In the scope: a digest of the key that a request came with (not its name: what is kept of one outlives a change of
# keys), and a function that takes the tokens that it took.
OWNER, SPEND = "penstock.owner", "penstock.spend"
# A function that says that the request needs nothing of its body any more. Without it, what the body holds counts until
# the request ends.
LET_GO = "penstock.let_go"
# In the scope too, where the server puts it: a function that closes the connection at once. What was not read is lost.
ABORT = "penstock.abort"
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_SMALL_BODY_BYTES, _BODY_BYTES_PER_TOKEN = 64 << 10, 16
# What a body takes at most until its request needs nothing of it: each byte four times (the body, its texts and their
# tokens, twice), and each of these bytes so many more. A message of a chat, which may be 30 bytes long, is a dict
# and an object of its fields: 990 bytes.
_BYTE_TIMES, _PART_BYTES = 4, {b"{": 800, b"[": 150, b",": 50, b":": 50}
# Of such bytes in texts nothing is made: a prompt may be JSON itself. A string that nobody closes goes to the end, so
# that each byte is looked at once.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_PARSED_BYTES, _PARSED_BYTES_PER_TOKEN = 24 << 20, 100
_CHECKED = (b"host", b"origin", b"authorization", b"x-api-key", b"content-type", b"content-length")
# Paths that need no key: those for monitoring, and the page, which asks for a key.
_OPEN_PATHS = ("/health", "/")


@dataclass(frozen=True)
class Limits:
    """Limits of what clients send and take.

    body_bytes    the longest body of a request
    bodies_bytes  the most bytes of all bodies that are held at once
    parsed_bytes  the most memory of what bodies hold. They count until their streams begin or their requests end
    body_s        a whole body must come within so many seconds
    send_s        a client must take what it is sent within so many seconds
    """

    body_bytes: int
    bodies_bytes: int = 16 << 20
    parsed_bytes: int = _PARSED_BYTES
    body_s: float = 30.0
    send_s: float = 60.0

    @classmethod
    def of(cls, context: int) -> Limits:
        """For a model with room for so many tokens. A token of English has 4 to 5 bytes, one of Chinese that JSON
        escapes has 6."""
        body_bytes = min(_SMALL_BODY_BYTES + _BODY_BYTES_PER_TOKEN * context, cls.bodies_bytes // 2)
        return cls(body_bytes, parsed_bytes=max(_PARSED_BYTES, _PARSED_BYTES_PER_TOKEN * context))


@dataclass(frozen=True)
class Access:
    """Who may ask.

    host     the name or address that the server listens on
    keys     a request must bear one of them; () if only this machine reaches the server
    origins  origins of web pages that may ask, beside the server's own page
    """

    host: str
    keys: tuple[Key, ...] = ()
    origins: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """The names that Host may say; () for any: then keys are required, and a page without one gets nothing."""
        return () if self.keys and not is_loopback(self.host) else (*_LOOPBACK, self.host.lower())


class Refused(Exception):
    """A request that the guard answers itself, with a status and a line that says why. `retry_s`: seconds after which
    the client may try again."""

    def __init__(self, status: int, message: str, code: str, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_s = status, message, code, retry_s


class Guard:
    """The application `app` behind all checks. `clock`: seconds, for what keys may ask a minute."""

    def __init__(self, app: App, access: Access, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._access, self._limits = app, access, limits
        self._spending = Spending(clock)
        self._bodies_bytes = self._parsed_bytes = 0  # of all requests that are here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # Ollama's command line begins so. No body is sent: uvicorn knows the method
            scope = {**scope, "method": "GET"}
        begun = unread = False
        parsed_bytes = 0

        def let_go() -> None:
            nonlocal parsed_bytes
            self._parsed_bytes -= parsed_bytes
            parsed_bytes = 0

        async def sending(message: Message) -> None:
            nonlocal begun, unread
            begun = True
            try:
                await asyncio.wait_for(send(message), self._limits.send_s)
            except TimeoutError:
                unread = True
                scope.get(ABORT, lambda: None)()
                raise ConnectionError("the client does not read its answer") from None

        held_bytes, begun_by = 0, None
        try:
            headers = _single(scope["headers"])
            self._check(scope, headers)
            key = self._key(scope, headers)
            if key is not None:
                if (refuses := self._spending.refuses(key)) is not None:
                    raise Refused(429, refuses[0], "key_limit", refuses[1])
                self._spending.begin(key)
                begun_by = key
                scope[OWNER] = blake2b(key.secret.encode(), digest_size=16).hexdigest()
                scope[SPEND] = partial(self._spending.spend, key)
            held_bytes = self._room(headers)
            body = [await self._body(receive)]
            parsed_bytes = self._parsed(body[0])
            scope[LET_GO] = let_go
            await self._app(scope, _replayed(body, receive), sending)
        except Refused as refused:
            if not begun:
                await _answer(sending, scope["path"], refused)
        except Exception:
            if not unread:
                raise
            await asyncio.sleep(0)  # the server notes that the connection is gone, and so has no fault to log
        finally:
            self._bodies_bytes -= held_bytes
            let_go()
            if begun_by is not None:
                self._spending.end(begun_by)

    def _room(self, headers: dict[bytes, str]) -> int:
        """Takes room for a body until its request has ended, and returns its bytes. Raises Refused."""
        limits, length = self._limits, headers.get(b"content-length", "")
        if length and (not length.isdecimal() or int(length[:20]) > limits.body_bytes):
            raise self._too_large()
        nbytes = int(length) if length else limits.body_bytes if b"transfer-encoding" in headers else 0
        if self._bodies_bytes + nbytes > limits.bodies_bytes:
            raise Refused(503, f"requests of {self._bodies_bytes} bytes are here already: try again later", "busy")
        self._bodies_bytes += nbytes
        return nbytes

    def _parsed(self, body: bytes) -> int:
        """Takes room for what a body holds, and returns its bytes. Raises Refused."""
        parts = _STRING.sub(b"", body)
        nbytes = _BYTE_TIMES * len(body) + sum(each * parts.count(part) for part, each in _PART_BYTES.items())
        if nbytes > self._limits.parsed_bytes:
            raise Refused(413, f"a body of so many parts takes {nbytes} bytes of memory", "body_too_large")
        if self._parsed_bytes + nbytes > self._limits.parsed_bytes:
            raise Refused(503, f"requests of {self._parsed_bytes} bytes of memory are here: try again later", "busy")
        self._parsed_bytes += nbytes
        return nbytes

    def _too_large(self) -> Refused:
        return Refused(413, f"a body may have {self._limits.body_bytes} bytes for this context", "body_too_large")

    async def _body(self, receive: Receive) -> bytes:
        """The whole body. Raises Refused where it is too long or too slow. If the client is gone, the rest of its body
        is empty."""
        parts: list[bytes] = []
        until_s = asyncio.get_running_loop().time() + self._limits.body_s
        more = True
        while more:
            left_s = until_s - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, left_s))
            except TimeoutError:
                raise Refused(408, f"the body did not come within {self._limits.body_s:g} s", "slow_body") from None
            parts.append(message.get("body", b""))
            more = message["type"] == "http.request" and message.get("more_body", False)
            if sum(map(len, parts)) > self._limits.body_bytes:
                raise self._too_large()
        return b"".join(parts)

    def _check(self, scope: Scope, headers: dict[bytes, str]) -> None:
        """Raises Refused for a request that a page of another site may have made."""
        host, names = headers.get(b"host", "").lower(), self._access.names()
        if names and _name(host) not in names:
            raise Refused(
                421, f"this server is not {host!r}: ask it as {names[0]} or {self._access.host}", "wrong_host"
            )
        origin = headers.get(b"origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}", *self._access.origins):
            raise Refused(403, f"pages of {origin!r} may not ask this server", "wrong_origin")
        elif origin is None and headers.get(b"sec-fetch-site") in ("cross-site", "same-site"):
            raise Refused(403, "pages of other sites may not ask this server", "wrong_origin")
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise Refused(415, "Content-Type must be application/json", "wrong_content_type")

    def _key(self, scope: Scope, headers: dict[bytes, str]) -> Key | None:
        """The key of a request; None where none is needed. Raises Refused."""
        if not self._access.keys or scope["path"] in _OPEN_PATHS or scope["path"].startswith(PAGE):
            return None
        scheme, _, given = headers.get(b"authorization", "").partition(" ")
        if not scheme and b"x-api-key" in headers:  # Anthropic's clients
            scheme, given = "bearer", headers[b"x-api-key"]
        key = known(self._access.keys, given.strip())
        if scheme.lower() != "bearer" or key is None:
            raise Refused(401, "a key is needed: Authorization: Bearer KEY", "invalid_api_key")
        return key


def _replayed(body: list[bytes], receive: Receive) -> Receive:
    """Receives the one body in one piece, then what the client does afterwards: to go away. The body leaves the list
    with that, so that it can be let go."""

    async def replayed() -> Message:
        if not body:
            return await receive()
        return {"type": "http.request", "body": body.pop(), "more_body": False}

    return replayed


def is_loopback(host: str) -> bool:
    """Whether a server that listens on this host is reached from this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


async def _answer(send: Send, path: str, refused: Refused) -> None:
    kind = "rate_limit_error" if refused.status == 429 else "invalid_request_error"
    body = json.dumps(error_body(path, refused.status, refused.message, kind, refused.code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.status in (429, 503):
        headers.append((b"retry-after", seconds_to_wait(refused.retry_s or 5)))
    # The rest of the body is not read, so nothing else can come over this connection.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _single(headers: list[tuple[bytes, bytes]]) -> dict[bytes, str]:
    """Headers by name, in small letters. Raises Refused if a checked header comes twice: a later reader might take the
    one that was not checked."""
    single: dict[bytes, str] = {}
    for name, value in headers:
        key = name.lower()
        if key in single and key in _CHECKED:
            raise Refused(400, f"the header {key.decode()} comes twice", "header_twice")
        single[key] = value.decode("latin-1")
    return single


def _name(host: str) -> str:
    """The name of a Host header, without the port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
