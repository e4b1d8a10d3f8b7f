"""A small server that speaks the Hub's endpoints as huggingface_hub 2.4 calls them, with faults on demand.

    GET  /api/models/REPO/revision/REV?blobs=true    the files, with sizes and checksums
    HEAD, GET  /REPO/resolve/REV/FILE                a small file; a large one's place, on another host
    GET  /REPO/moved/…                               where a relative redirect leads
    GET  /stored/SHA256                              a large file's content, by ranges, on the other host

The other host is the same server by its other name: localhost for 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
LARGE_BYTES = 10_000  # from which on a file is not git's


@dataclass
class Fault:
    """What is wrong with the next `times` answers to paths that match. `act`: answers instead of the server."""

    path: str
    act: Callable[[Handler], None]
    times: int = 1


@dataclass
class FakeHub:
    """`repos`: repository → file → content. `seen`: (method, path, headers) of every request. `private`: repositories
    that want the token; `gated`: those that this token may not read either."""

    repos: dict[str, dict[str, bytes]]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    token: str = "hf_right"
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    port: int = 0
    ranges: bool = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self, method: str = "GET") -> list[str]:
        return [path for verb, path, _ in self.seen if verb == method]

    def fault(self, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times and re.search(fault.path, path):
                fault.times -= 1
                return fault
        return None

    def stored(self, digest: str) -> bytes | None:
        every = (content for files in self.repos.values() for content in files.values())
        return next((content for content in every if hashlib.sha256(content).hexdigest() == digest), None)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self) -> None:
        self.hub.seen.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        fault = self.hub.fault(self.path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if fault is not None:
                fault.act(self)
            else:
                self.right()

    def right(self) -> None:
        """As the Hub answers."""
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/stored/([0-9a-f]{64})", path):
            if "authorization" in self.headers:
                return self.say(400, b"the storage takes no token")
            content = self.hub.stored(match[1])
            return self.content(content) if content is not None else self.say(404)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            if self.allowed(match[1]) and (commit := self.commit(match[1], match[2])) is not None:
                self.say(200, json.dumps(listing(self.hub.repos[match[1]], commit)).encode(), mime="application/json")
            return None
        if match := re.fullmatch(r"/([^/]+/[^/]+)/(?:resolve|moved)/(refs/[^/]+/[^/]+|[^/]+)/(.+)", path):
            if self.allowed(match[1]) and (commit := self.commit(match[1], match[2])) is not None:
                self.file(match[1], commit, match[3])
            return None
        return self.say(404)

    def allowed(self, repo: str) -> bool:
        """Whether the repository is there for this user. Answers where it is not."""
        login = self.headers.get("authorization")
        if login not in (None, f"Bearer {self.hub.token}"):
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif repo in self.hub.gated:
            self.refuse(403 if login else 401, "GatedRepo", "Access to this model is restricted.")
        elif repo not in self.hub.repos or (repo in self.hub.private and not login):
            self.refuse(404 if login else 401, "RepoNotFound", "Repository not found")
        else:
            return True
        return False

    def commit(self, repo: str, revision: str) -> str | None:
        commit = self.hub.revisions.get(revision, revision if revision in self.hub.revisions.values() else None)
        if commit is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def file(self, repo: str, commit: str, name: str) -> None:
        content = self.hub.repos[repo].get(name)
        if content is None:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit}
        if len(content) < LARGE_BYTES:
            return self.content(content, {**headers, "ETag": f'"{git_digest(content)}"'})
        digest = hashlib.sha256(content).hexdigest()
        place = f"http://localhost:{self.hub.port}/stored/{digest}"
        more = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{digest}"', "Location": place}
        return self.say(302, b"Found", {**headers, **more})

    def content(self, content: bytes, headers: dict[str, str] | None = None) -> None:
        """A file's content, or the range of it that was asked for."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if wanted is None or not self.hub.ranges:
            return self.say(200, content, headers)
        first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        if first >= len(content):
            return self.say(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        place = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        return self.say(206, content[first : last + 1], {**(headers or {}), **place})

    def refuse(self, status: int, code: str, message: str) -> None:
        codes = {"X-Error-Code": code} if code else {}
        self.say(status, json.dumps({"error": message}).encode(), {**codes, "X-Error-Message": message})

    def say(
        self,
        status: int,
        content: bytes = b"",
        headers: dict[str, str] | None = None,
        mime: str = "application/octet-stream",
        cut_at: int | None = None,
    ) -> None:
        """An answer. `cut_at`: so many bytes of its body are sent, then the connection is closed."""
        self.send_response(status)
        for name, value in {"Content-Type": mime, "Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut_at])
        if cut_at is not None:
            self.close_connection = True


def listing(files: dict[str, bytes], commit: str = COMMIT) -> dict[str, Any]:
    """What `api/models` says of a repository."""
    siblings: list[dict[str, Any]] = []
    for name, content in files.items():
        siblings.append({"rfilename": name, "size": len(content), "blobId": git_digest(content)})
        if len(content) >= LARGE_BYTES:
            digest = hashlib.sha256(content).hexdigest()
            siblings[-1]["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
    return {"_id": "1", "id": "org/name", "modelId": "org/name", "sha": commit, "private": False, "siblings": siblings}


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is none."""


@contextlib.contextmanager
def serving(repos: dict[str, dict[str, bytes]]) -> Iterator[FakeHub]:
    hub = FakeHub(repos)
    handler = type("OfThisHub", (Handler,), {"hub": hub})
    server = Server(("127.0.0.1", 0), handler)
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def cuts(at: int) -> Callable[[Handler], None]:
    """A fault: the right range, of which `at` bytes come."""

    def act(handler: Handler) -> None:
        plain, handler.say = handler.say, lambda *args, **how: plain(*args, **how, cut_at=at)  # type: ignore[method-assign]
        handler.right()

    return act


def answers(status: int, content: bytes = b"", **headers: str) -> Callable[[Handler], None]:
    """A fault: this answer. `headers`: with _ for -."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.say(status, content, named)
