"""Asks the Hub, through huggingface_hub's client: its address, its login, its proxies and its offline mode count.

The library's own downloads are not used. Version 2.4 begins an interrupted file again from its first byte, compares no
checksum, waits as long as a server says, and writes as many bytes as a server sends. Here all of these are bounded.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import quote, urljoin, urlsplit

import penstock
from penstock.errors import BadRequest, BrokenModel, PenstockError, StorageFailed
from penstock.hubs.listing import COMMIT, MAX_LIST_BYTES, Listing, RemoteFile, parse_listing
from penstock.hubs.where import Tell, Where
from penstock.units import format_bytes

if TYPE_CHECKING:
    import httpx2

_TIMEOUT_S = 20.0  # without a byte
_WHOLE_ANSWER_S = 120.0  # for a list, an index, a header
_MAX_REDIRECTS = 10
TRIES, _TRIES_TO_REACH = 6, 3
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_MOST_SAID_S = 10**9  # 30 years
_AGAIN = (408, 429, 500, 502, 503, 504)
_SAID = 200  # characters of what a server says that are repeated
_LOGIN = "log in with `hf auth login`"


class Cut(Exception):
    """The connection ended before all bytes came."""


class Unreachable(Cut):
    """There was no connection at all."""


class Hub:
    """`tell`: gets news of waits. Raises BadRequest from each method for what the Hub refuses or does not have,
    StorageFailed where it cannot be reached, BrokenModel where it answers what it should not."""

    def __init__(self, where: Where, tell: Tell | None = None) -> None:
        from huggingface_hub import constants

        self.endpoint = (where.endpoint or constants.ENDPOINT).rstrip("/")
        self._sleep, self._tell = where.sleep, tell

    def listing(self, repo: str, revision: str) -> Listing:
        """The files of a repository at a revision. Raises BrokenModel if the Hub answers with another revision."""
        url = f"{self.endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"
        with self._asked(url, f"{repo} at {revision}") as response:
            listing = parse_listing(_whole(response, MAX_LIST_BYTES, f"the list of {repo}"), repo)
        if COMMIT.fullmatch(revision) and listing.commit != revision:
            raise BrokenModel(f"the Hub was asked for {repo} at {revision}, and lists {listing.commit}")
        return listing

    def read(self, listing: Listing, file: RemoteFile, first: int = 0, end: int | None = None) -> bytes:
        """Bytes first..end of a file, in memory; None: to its end. Cut connections are tried again.

        Raises StorageFailed if the connection is cut TRIES times, or if all takes more than _WHOLE_ANSWER_S seconds."""
        end = file.nbytes if end is None else min(end, file.nbytes)
        content, what = bytearray(), f"{listing.repo}/{file.name}"
        until_s = time.monotonic() + _WHOLE_ANSWER_S
        for nth in range(TRIES):
            try:
                for chunk in self.stream(listing, file, first + len(content), end):
                    content += chunk
                    if time.monotonic() > until_s:
                        raise StorageFailed(f"the Hub was too slow: {what} took more than {_WHOLE_ANSWER_S:.0f} s")
            except Cut as cut:
                self.wait(nth, f"{what}: {cut}")
            if len(content) == end - first:
                return bytes(content)
        raise StorageFailed(f"{what}: the connection was cut {TRIES} times")

    def stream(self, listing: Listing, file: RemoteFile, first: int, end: int) -> Iterator[bytes]:
        """Bytes first..end of a file, as they come, and no byte more. Raises Cut where the connection ends before."""
        if first == end:
            return
        what = f"{listing.repo}/{file.name}"
        url = f"{self.endpoint}/{listing.repo}/resolve/{listing.commit}/{quote(file.name)}"
        with self._asked(url, what, first, end) as response:
            skip = _skipped(response, what, first, end, file.nbytes)
            left = end - first
            for chunk in _pieces(response):
                if skip:
                    chunk, skip = chunk[skip:], max(0, skip - len(chunk))
                chunk = chunk[:left]
                left -= len(chunk)
                if chunk:
                    yield chunk
                if not left:
                    return
            raise Cut("the connection was closed")

    def wait(self, nth: int, why: str, asked_s: float | None = None) -> None:
        """Waits before a request is tried again: 1 s, 2 s and so on, or as long as the server asks."""
        wait_s = asked_s if asked_s is not None else min(_FIRST_WAIT_S * 2**nth, _LONGEST_WAIT_S)
        if self._tell is not None:
            self._tell(f"{why}; goes on in {wait_s:.0f} s", 0, 0)
        self._sleep(wait_s)

    @contextmanager
    def _asked(self, url: str, what: str, first: int = 0, end: int | None = None) -> Iterator[httpx2.Response]:
        """The answer to a GET, whose status is good. `first`, `end`: the bytes that are wanted; None: all."""
        for nth in range(TRIES):
            try:
                response = self._followed(url, what, first, end)
            except Cut as cut:
                if nth == (_TRIES_TO_REACH if isinstance(cut, Unreachable) else TRIES) - 1:
                    raise StorageFailed(
                        f"{what} is not whole on this machine, and the Hub at {self.endpoint} cannot be reached: {cut}"
                    ) from None
                self.wait(nth, f"{what}: {cut}")
                continue
            try:
                status = response.status_code
                asked_s = _asked_to_wait_s(response)
                if status not in _AGAIN or nth == TRIES - 1 or (asked_s or 0.0) > _LONGEST_WAIT_S:
                    if status // 100 != 2:
                        raise _refusal(response, what, self.endpoint, asked_s)
                    yield response
                    return
            finally:
                response.close()
            self.wait(nth, f"{what}: the Hub answers {status}", asked_s)
        raise AssertionError

    def _followed(self, url: str, what: str, first: int, end: int | None) -> httpx2.Response:
        """The answer after redirects, whose bodies are not read. Other hosts do not get the user's token. Raises
        Cut where there is no answer."""
        import httpx2
        from huggingface_hub import get_session
        from huggingface_hub.errors import OfflineModeIsEnabled
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        headers = build_hf_headers(library_name="penstock", library_version=penstock.__version__)
        if not headers.get("authorization", "").isascii():
            raise BadRequest(f"the Hub's token has letters that no token has: {_LOGIN}, or set HF_TOKEN right")
        headers["accept-encoding"] = "identity"  # sizes are those of the files, and nothing unfolds
        if end is not None:
            headers["range"] = f"bytes={first}-{end - 1}"
        try:
            for _ in range(_MAX_REDIRECTS):
                client = get_session()
                request = client.build_request("GET", url, headers=headers, timeout=_TIMEOUT_S)
                response = _sent(partial(client.send, request, stream=True, follow_redirects=False))
                location = response.headers.get("location")
                if response.status_code not in (301, 302, 303, 307, 308) or location is None:
                    return response
                response.close()
                before, url = urlsplit(url), urljoin(url, location)
                after = urlsplit(url)
                if after.scheme != before.scheme and after.scheme != "https":
                    raise BrokenModel(f"{what}: the Hub leads from {before.scheme} to {after.scheme!r:.20}")
                if after[:2] != before[:2]:
                    headers.pop("authorization", None)
        except OfflineModeIsEnabled:
            raise BadRequest(
                f"{what} is not whole on this machine, and HF_HUB_OFFLINE forbids to ask the Hub"
            ) from None
        except httpx2.ConnectError as error:
            raise Unreachable(_why(error)) from None
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, ValueError) as error:
            raise BrokenModel(f"{what}: the Hub leads to no address: {_short(str(error))}") from None
        except (httpx2.TransportError, OSError) as error:
            raise Cut(_why(error)) from None
        raise BrokenModel(f"{what}: the Hub redirects more than {_MAX_REDIRECTS} times")


def _sent(send: Callable[[], httpx2.Response]) -> httpx2.Response:
    """What `send` returns or raises. Raises Cut where that takes too long: the client's own limit is from one byte to
    the next, so headers that drip would never end. The thread that waits for them does so until the connection ends."""
    answers: Queue[httpx2.Response | BaseException] = Queue()

    def wait() -> None:
        try:
            answers.put(send())
        except BaseException as error:
            answers.put(error)

    Thread(target=wait, name="penstock-hub", daemon=True).start()
    try:
        answer = answers.get(timeout=_WHOLE_ANSWER_S)
    except Empty:
        raise Cut(f"no whole headers within {_WHOLE_ANSWER_S:.0f} s") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _pieces(response: httpx2.Response) -> Iterator[bytes]:
    """The body as it comes. Raises Cut."""
    import httpx2

    try:
        yield from response.iter_raw()  # with a size it would hold back the last bytes before a cut, and lose them
    except (httpx2.TransportError, httpx2.StreamError, OSError) as error:
        raise Cut(_why(error)) from None


def _whole(response: httpx2.Response, max_bytes: int, what: str) -> bytes:
    content = bytearray()
    until_s = time.monotonic() + _WHOLE_ANSWER_S
    try:
        for chunk in _pieces(response):
            content += chunk
            if len(content) > max_bytes:
                raise BrokenModel(f"{what} is longer than {format_bytes(max_bytes)}")
            if time.monotonic() > until_s:
                raise StorageFailed(f"the Hub was too slow: {what} took more than {_WHOLE_ANSWER_S:.0f} s")
    except Cut as cut:
        raise StorageFailed(f"{what} did not come whole: {cut}") from None
    return bytes(content)


def _skipped(response: httpx2.Response, what: str, first: int, end: int, nbytes: int) -> int:
    """How many bytes of the body come before byte `first`. Raises BrokenModel where other bytes come than were asked
    for, or the file has another size than its list says."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise BrokenModel(f"{what}: the Hub sends it in another encoding than it was asked for")
    if response.status_code == 206:
        said = response.headers.get("content-range", "")
        match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", said, re.ASCII)
        if match is None or int(match[1]) != first or int(match[2]) >= end or match[3] not in (str(nbytes), "*"):
            asked = f"bytes {first}-{end - 1} of {nbytes}"
            raise BrokenModel(f"{what}: the Hub was asked for {asked} and sends {_short(said) or 'nothing'}")
        return 0
    length = response.headers.get("content-length", str(nbytes))
    if length != str(nbytes):
        raise BrokenModel(f"{what} should have {nbytes} bytes, and the Hub sends {_short(length)}")
    return first  # a server without ranges


def _asked_to_wait_s(response: httpx2.Response) -> float | None:
    """Seconds that a server asks to wait for. None where it does not say."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    if response.status_code == 429:
        with suppress(ValueError, OverflowError):  # a number with thousands of digits
            limit = parse_ratelimit_headers(response.headers)
            if limit is not None and limit.remaining == 0:
                return float(min(max(0, limit.reset_in_seconds), _MOST_SAID_S))
    try:
        asked_s = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return max(0.0, asked_s) if math.isfinite(asked_s) else None


def _refusal(response: httpx2.Response, what: str, endpoint: str, asked_s: float | None) -> PenstockError:
    """The error for an answer that is not good, in one line, with what would help."""
    status, code = response.status_code, response.headers.get("x-error-code", "")
    said = _short(response.headers.get("x-error-message", ""))
    told = f": {said}" if said else ""
    repo = "/".join(what.split(" ")[0].split("/")[:2])
    if code == "GatedRepo":
        how = "this login has no access" if status == 403 else _LOGIN
        return BadRequest(f"{repo} is gated: ask for access at {endpoint}/{repo}, and {how} (the Hub answers {status})")
    if status == 401 and code != "RepoNotFound":
        return BadRequest(f"the Hub wants a login for {repo}{told}: {_LOGIN} (it answers 401)")
    if code == "RevisionNotFound":
        return BadRequest(f"the Hub has no {what}: there is no such branch, tag or commit")
    if code == "EntryNotFound":
        return BadRequest(f"the Hub has no file {what}")
    if status == 404 or code == "RepoNotFound":
        return BadRequest(f"{repo} is no folder here, and the Hub has no such model; if it is private, {_LOGIN}")
    if status == 403:
        return BadRequest(f"the Hub refuses {what}{told} (it answers 403)")
    if status == 429:
        when = f" in {asked_s:.0f} s" if asked_s is not None else " later"
        return StorageFailed(
            f"the Hub had too many requests for {what}{told}: try again{when}; a login is allowed more"
        )
    return StorageFailed(f"the Hub answers {status} for {what}{told}")


def _why(error: Exception) -> str:
    return _short(str(error)) or type(error).__name__


def _short(text: str) -> str:
    return " ".join(text.split())[:_SAID]
