"""Downloads that end in one line: what the Hub refuses, what no honest server sends, a full disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from penstock.errors import BadRequest, BrokenModel
from penstock.hubs import web
from penstock.hubs.pull import find, pull
from penstock.hubs.where import Where
from penstock.serve.named import locate
from tests.cpu.hub.cases import INDEX, Waits, check, name_of, refusal
from tests.cpu.hub.server import FakeHub, Fault, Handler, answers


def test_no_such_model(hub: FakeHub, where: Where) -> None:
    told = refusal(where, "org/other").message
    assert told.startswith("org/other is no folder here, and the Hub has no such model; if it is private, log in with")


def login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str) -> None:
    """As `hf auth login` leaves it."""
    (tmp_path / "token").write_text(token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))


def test_a_private_model(
    hub: FakeHub, where: Where, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.private.add("org/name")
    assert "if it is private, log in with `hf auth login`" in refusal(where).message
    login(monkeypatch, tmp_path, "hf_wrong")
    told = refusal(where).message
    assert told.startswith("the Hub wants a login for org/name: Invalid credentials in Authorization header: log in")
    login(monkeypatch, tmp_path, hub.token)
    check(pull(name_of(), where), files)
    stored = [headers for _, path, headers in hub.seen if path.startswith("/stored/")]
    assert stored and not any("authorization" in headers for headers in stored)  # the token stays with the Hub


def test_a_token_that_is_none(hub: FakeHub, where: Where, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    login(monkeypatch, tmp_path, "hf_sécret")
    assert refusal(where).message.startswith("the Hub's token has letters that no token has: log in with")


def test_a_gated_model(hub: FakeHub, where: Where, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.gated.add("org/name")
    ask = f"org/name is gated: ask for access at {hub.endpoint}/org/name, and "
    assert refusal(where).message == f"{ask}log in with `hf auth login` (the Hub answers 401)"
    login(monkeypatch, tmp_path, hub.token)
    assert refusal(where).message == f"{ask}this login has no access (the Hub answers 403)"


def test_a_file_that_vanishes(hub: FakeHub, where: Where) -> None:
    def gone(handler: Handler) -> None:
        handler.refuse(404, "EntryNotFound", "Entry not found")

    hub.faults.append(Fault("resolve.*tokenizer.json", gone))
    assert refusal(where).message == "the Hub has no file org/name/tokenizer.json"


def test_too_many_requests_are_waited_for(hub: FakeHub, where: Where, files: dict[str, bytes], waits: Waits) -> None:
    hub.faults += [
        Fault("/api/", answers(429, Retry_After="7")),
        Fault("config.json", answers(429, RateLimit='"resolvers";r=0;t=9')),
        Fault("/stored/", answers(503)),
    ]
    check(pull(name_of(), where), files)
    assert waits == [7, 9, 1]


@pytest.mark.parametrize(("headers", "tries", "says"), [
    ({"Retry_After": "3"}, 6, "too many requests for org/name at main: try again in 3 s"),
    ({"Retry_After": "86400"}, 1, "try again in 86400 s"),
    ({"Retry_After": "1e999"}, 6, "try again later"),
    ({"Retry_After": "Wed, 21 Oct 2099 07:28:00 GMT"}, 6, "try again later"),
    ({"RateLimit": '"api";r=0;t=99999999999999999999'}, 1, "try again in 1"),
    ({"RateLimit": '"api";r=0;t=' + 400 * "9"}, 1, "try again in 1000000000 s"),
    ({"RateLimit": '"api";r=0;t=' + 5000 * "9"}, 6, "try again later"),
    ({}, 6, "try again later"),
])  # fmt: skip
def test_too_many_requests_for_too_long(
    headers: dict[str, str], tries: int, says: str, hub: FakeHub, where: Where, waits: Waits
) -> None:
    hub.faults.append(Fault("/api/", answers(429, b"{}", **headers), 1000))
    assert says in refusal(where).message
    assert len(hub.seen) == tries and sum(waits) < 120


def test_a_hub_that_is_down(hub: FakeHub, where: Where, waits: Waits) -> None:
    hub.faults.append(Fault("/api/", answers(500, b"<html>" * 1000, X_Error_Message="so\tsorry " + "x" * 9999), 1000))
    told = refusal(where).message
    assert told.startswith("the Hub answers 500 for org/name at main: so sorry xxx") and len(told) < 300


def test_nobody_there(where: Where, hub: FakeHub, waits: Waits) -> None:
    closed = Where("http://127.0.0.1:9", where.hub_cache, sleep=waits)
    told = refusal(closed).message
    says = "org/name at main is not whole on this machine, and the Hub at http://127.0.0.1:9 cannot be reached: "
    assert told.startswith(says) and waits == [1, 2]


def test_offline(hub: FakeHub, where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    told = refusal(where).message
    assert told == "org/name at main is not whole on this machine, and HF_HUB_OFFLINE forbids to ask the Hub"
    with pytest.raises(BadRequest, match="HF_HUB_OFFLINE"):
        locate("org/name", where)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    pulled = pull(name_of(), where)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate("org/name", where).path == pulled.path


def test_a_full_disk(hub: FakeHub, where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.store import writer

    monkeypatch.setattr(writer, "free_bytes", lambda folder: 5000)
    told = refusal(where).message
    assert told.startswith("the disk is too full: org/name needs ") and "5000 B" not in told and "4.88 KiB are" in told
    assert not any("resolve" in path and INDEX not in path for path in hub.paths())  # nothing was begun


def other_bytes(content: bytes) -> Any:
    """A fault: these bytes, as if they were the range that was asked for."""

    def act(handler: Handler) -> None:
        handler.hub.repos, kept = {"x/x": {"x": content}}, handler.hub.repos
        try:
            handler.content(content)
        finally:
            handler.hub.repos = kept

    return act


def test_content_that_is_not_what_was_promised(hub: FakeHub, where: Where, files: dict[str, bytes]) -> None:
    wrong = bytes(len(files["model-00001-of-00002.safetensors"]))
    hub.faults.append(Fault("/stored/", other_bytes(wrong), 5))
    failed = refusal(where)
    assert isinstance(failed, BrokenModel) and "is not what the Hub promised: its checksum should be" in failed.message
    assert where.hub_cache is not None
    assert find(name_of(), where) is None and not list(where.hub_cache.rglob("*.incomplete"))


@pytest.mark.parametrize("length", [0, 100, 20_000_000])
def test_another_size_than_was_promised(length: int, hub: FakeHub, where: Where) -> None:
    hub.faults.append(Fault("/stored/", other_bytes(bytes(length)), 100))
    before = len(hub.seen)
    refusal(where)
    assert len(hub.seen) - before <= web.TRIES + 4  # the list, the index, and where the file lies
    assert where.hub_cache is not None
    assert sum(file.stat().st_size for file in where.hub_cache.rglob("*") if not file.is_symlink()) < 1_000_000


@pytest.mark.parametrize(
    ("path", "act", "says"),
    [
        ("/api/", answers(302, Location="/api/models/org/name/revision/main"), "redirects more than 10 times"),
        ("/stored/", answers(302, Location="/stored/" + 64 * "0"), "redirects more than 10 times"),
        ("/stored/", answers(302, Location="file:///etc/passwd"), "leads from http to 'file'"),
        ("/stored/", answers(302, Location="http://[::bad"), "leads to no address"),
        ("/stored/", answers(302, Location="http://" + 90_000 * "a"), ""),
        ("/stored/", answers(206, b"abc", Content_Range="bytes 5-7/9"), "and sends bytes 5-7/9"),
        ("/stored/", answers(206, b"abc"), "and sends nothing"),
        ("/stored/", answers(200, b"abc", Content_Encoding="gzip"), "in another encoding"),
        ("/stored/", answers(200, b"abc"), "and the Hub sends 3"),
        ("/stored/", answers(204), ""),
        ("/stored/", answers(418), "answers 418"),
        ("/api/", answers(200, b"{" * 1000), "is not JSON"),
        ("/api/", answers(200, b"\xff\xfe"), "is not UTF-8"),
        ("/api/", answers(200, b'{"x":[' + b"{}," * 600_000 + b"{}]}"), "has more than 500000 values"),
        ("/api/", answers(200, b"\xff\xfe", RateLimit='"api";r=0;t=' + 5000 * "9"), "is not UTF-8"),
        ("/api/", answers(200, b'{"sha": "x", "siblings": []}'), "names no commit"),
        ("/api/", answers(404, b"[]"), "has no such model"),
        ("/api/", lambda handler: handler.say(200, b'{"a": 1}', cut_at=4), "did not come whole"),
        ("resolve.*config.json", lambda handler: handler.wfile.write(b"\0" * 5000), ""),
    ],
)
def test_answers_that_no_hub_gives(path: str, act: Any, says: str, hub: FakeHub, where: Where) -> None:
    hub.faults.append(Fault(path, act, 1000))
    failed = refusal(where)
    assert says in failed.message and len(failed.message) < 700, failed.message
    assert find(name_of(), where) is None


def test_a_list_without_an_end(hub: FakeHub, where: Where, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(web, "MAX_LIST_BYTES", 1 << 20)

    def endless(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        while True:
            handler.wfile.write(bytes(1 << 16))

    hub.faults.append(Fault("/api/", endless))
    assert "the list of org/name is longer than 1.00 MiB" in refusal(where).message


def test_names_that_lead_elsewhere(hub: FakeHub, where: Where, tmp_path: Path) -> None:
    hub.repos["org/name"]["../../../../tokenizer.json"] = b"evil"
    pull(name_of(), where)
    assert {path.name for path in tmp_path.iterdir()} == {"hub"}
    hub.repos["org/bad"] = {"config.json": b"{}", INDEX: b'{"weight_map": {"a": "../x"}}', "a.safetensors": b"0"}
    assert "names '../x', which the repository does not have" in refusal(where, "org/bad").message
