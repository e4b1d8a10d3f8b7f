"""Models of the Hub come as they should, whatever the server does: huggingface_hub is the real one."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from pathlib import Path

import huggingface_hub
import pytest

from penstock.errors import StorageFailed
from penstock.hubs import web
from penstock.hubs.pull import Pulled, find, pull
from penstock.hubs.transfer import Repository, is_superseded
from penstock.hubs.where import Where
from penstock.serve.named import locate, to_plan
from tests.cpu.hub.cases import INDEX, NOT_WANTED, Waits, check, name_of, refusal
from tests.cpu.hub.server import COMMIT, FakeHub, Fault, Handler, cuts

# --- what comes ----------------------------------------------------------------------------------------------------


def test_only_what_is_needed_comes(hub: FakeHub, where: Where, files: dict[str, bytes]) -> None:
    told: list[tuple[str, int, int]] = []
    assert find(name_of(), where) is None
    pulled = pull(name_of(), where, lambda *each: told.append(each))
    check(pulled, files)
    total = sum(map(len, files.values()))
    assert (pulled.brought_bytes, pulled.choice.nbytes, pulled.commit) == (total, total, COMMIT)
    assert told[0][0].startswith("downloads ") and told[0][0].endswith(" free") and told[0][1:] == (0, 0)
    assert told[-1][1:] == (total, total) and told[-1][0].startswith("downloading model-00002")
    assert not any(unwanted in path for path in hub.paths() for unwanted in NOT_WANTED)
    before = len(hub.seen)
    assert pull(name_of(), where).brought_bytes == 0 and len(hub.seen) == before + 2  # the list, the index
    found = find(name_of(), where)
    assert found is not None and found.path == pulled.path


def test_a_model_that_is_here_is_taken_without_asking(hub: FakeHub, where: Where) -> None:
    pulled, before = pull(name_of(), where), len(hub.seen)
    assert locate("org/name", where).path == pulled.path and locate("org/name", where).name == "name"
    with to_plan("hf.co/org/name", where) as path:
        assert path == pulled.path
    assert len(hub.seen) == before


def test_the_server_and_the_folders_are_as_huggingface_hub_has_them(
    hub: FakeHub, where: Where, files: dict[str, bytes], tmp_path: Path
) -> None:
    """It downloads from the server, and finds in our cache what we downloaded."""
    info = huggingface_hub.HfApi(endpoint=hub.endpoint).model_info("org/name", revision="main", files_metadata=True)
    assert info.sha == COMMIT and {s.rfilename: s.size for s in info.siblings or ()} == {
        name: len(content) for name, content in (files | NOT_WANTED).items()
    }
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        theirs = huggingface_hub.hf_hub_download("org/name", name, endpoint=hub.endpoint, cache_dir=tmp_path / "other")
        assert Path(theirs).read_bytes() == files[name]
    pulled = pull(name_of(), where)
    for name in files:
        ours = huggingface_hub.hf_hub_download("org/name", name, cache_dir=where.hub_cache, local_files_only=True)
        assert Path(ours) == pulled.path / name
    before = len(hub.paths("GET"))
    huggingface_hub.hf_hub_download("org/name", "config.json", endpoint=hub.endpoint, cache_dir=where.hub_cache)
    assert len(hub.paths("GET")) == before


def test_what_others_downloaded_is_not_downloaded_again(hub: FakeHub, where: Where, files: dict[str, bytes]) -> None:
    shard = "model-00001-of-00002.safetensors"
    huggingface_hub.hf_hub_download("org/name", shard, endpoint=hub.endpoint, cache_dir=where.hub_cache)
    assert find(name_of(), where) is None
    assert pull(name_of(), where).brought_bytes == sum(map(len, files.values())) - len(files[shard])


def theirs(hub: FakeHub, where: Where, repo: str, *names: str) -> None:
    """Downloads as another program, which keeps no list."""
    for name in names:
        huggingface_hub.hf_hub_download(repo, name, endpoint=hub.endpoint, cache_dir=where.hub_cache)


def test_a_name_means_the_same_whatever_is_here(hub: FakeHub, where: Where, files: dict[str, bytes]) -> None:
    ggufs = {f"m-{kind}.gguf": kind.encode() * 9000 for kind in ("Q4_0", "Q8_0", "UD-Q4_K_XL")}
    hub.repos["org/both"] = {**files, **ggufs}
    one = pull(name_of("org/both:Q4_0"), where)
    assert find(name_of("org/both:Q4_0"), where) == Pulled(one.path, one.commit, one.choice)
    assert find(name_of("org/both"), where) is None and find(name_of("org/both:Q8_0"), where) is None
    assert pull(name_of("org/both"), where).path == one.path.parent
    assert find(name_of("org/both"), where) is not None
    assert huggingface_hub.scan_cache_dir(where.hub_cache).warnings == []

    hub.repos["org/ggufs"] = {name: content + b"2" for name, content in ggufs.items()}
    theirs(hub, where, "org/ggufs", "m-UD-Q4_K_XL.gguf")
    assert find(name_of("org/ggufs"), where) is None and find(name_of("org/ggufs:Q4_K_XL"), where) is None
    assert find(name_of("org/ggufs:UD-Q4_K_XL"), where) is not None
    pull(name_of("org/ggufs:Q4_K_XL"), where)  # now it is known to be the only one
    assert find(name_of("org/ggufs:Q4_K_XL"), where) is not None

    hub.repos["org/shards"] = files
    theirs(hub, where, "org/shards", "config.json", "tokenizer.json", "model-00001-of-00002.safetensors")
    assert find(name_of("org/shards"), where) is None
    theirs(hub, where, "org/shards", "model-00002-of-00002.safetensors", INDEX)
    assert find(name_of("org/shards"), where) is not None


def test_a_model_without_a_tokenizer_is_asked_for_once(hub: FakeHub, where: Where) -> None:
    hub.repos["org/bare"] = {"config.json": b"{}", "model.safetensors": bytes(20_000)}
    pull(name_of("org/bare"), where)
    assert find(name_of("org/bare"), where) is not None


def test_a_revision(hub: FakeHub, where: Where) -> None:
    hub.revisions["refs/pr/1"] = "a" * 40
    assert pull(name_of("org/name:refs/pr/1"), where).commit == "a" * 40
    assert find(name_of("org/name:refs/pr/1"), where) is not None and find(name_of(), where) is None
    assert "has no org/name at v9" in refusal(where, "org/name:v9").message


def test_a_commit_is_the_one_that_was_asked_for(hub: FakeHub, where: Where) -> None:
    hub.revisions["f" * 40] = "a" * 40
    told = refusal(where, f"org/name:{'f' * 40}").message
    assert told == f"the Hub was asked for org/name at {'f' * 40}, and lists {'a' * 40}"


def test_a_branch_that_moved_on(hub: FakeHub, where: Where, files: dict[str, bytes]) -> None:
    before = pull(name_of(), where)
    assert not is_superseded(str(before.path))
    hub.revisions["main"] = "b" * 40
    hub.repos["org/name"]["config.json"] += b" "
    again = pull(name_of(), where)
    assert (again.commit, again.brought_bytes) == ("b" * 40, len(files["config.json"]) + 1)
    found = find(name_of(), where)
    assert found is not None and found.path == again.path
    assert is_superseded(str(before.path)) and is_superseded(str(before.path / "model.gguf"))
    assert not is_superseded(str(again.path)) and not is_superseded(str(where.hub_cache))
    hub.revisions[before.commit] = before.commit
    pull(name_of(f"org/name:{before.commit}"), where)
    assert not is_superseded(str(before.path))  # a commit that somebody names


def test_a_commit_that_was_named_while_it_was_here_stays(hub: FakeHub, where: Where) -> None:
    """By its own name, or by its path: the Hub is not asked, and the branch moves on afterwards."""
    named, typed, planned = (
        pull(name_of(f"org/{name}"), where) for name in hub_copies(hub, "named", "typed", "planned")
    )
    assert locate(f"org/named:{named.commit}", where).path == named.path
    assert locate(str(typed.path), where).path == typed.path
    with to_plan(str(planned.path), where):
        pass
    hub.revisions["main"] = "b" * 40
    for name in ("named", "typed", "planned"):
        pull(name_of(f"org/{name}"), where)
    assert not is_superseded(str(named.path)) and not is_superseded(str(typed.path / "model.safetensors"))
    assert is_superseded(str(planned.path))  # a plan makes no copy


def hub_copies(hub: FakeHub, *names: str) -> tuple[str, ...]:
    """More repositories like org/name."""
    for name in names:
        hub.repos[f"org/{name}"] = dict(hub.repos["org/name"])
    return names


def test_a_pull_request_takes_nobodys_place(hub: FakeHub, where: Where) -> None:
    before = pull(name_of(), where)
    hub.revisions["refs/pr/3"] = "a" * 40
    asked = pull(name_of("org/name:refs/pr/3"), where)
    repository = Repository.of(before.path.parents[2], "org/name")
    repository.ref("main").unlink()
    assert repository.commits() == {"refs/pr/3": "a" * 40}
    assert not is_superseded(str(before.path)) and not is_superseded(str(asked.path))


def test_a_pin_in_a_cache_that_cannot_be_written(hub: FakeHub, where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled = pull(name_of(), where)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.hubs.transfer.write_bytes", full)
    assert find(name_of(f"org/name:{pulled.commit}"), where) == Pulled(pulled.path, pulled.commit, pulled.choice)


def test_headers_that_drip(hub: FakeHub, where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte every now and then, and no end."""
    monkeypatch.setattr(web, "_WHOLE_ANSWER_S", 0.2)

    def drips(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        with contextlib.suppress(OSError):
            for i in range(100):
                handler.wfile.write(b"x-%d: y\r\n" % i)
                time.sleep(0.02)
        handler.close_connection = True

    hub.faults.append(Fault("/api/", drips, 100))
    assert "no whole headers within 0 s" in refusal(where, "org/name").message


def test_another_process_downloads_it(hub: FakeHub, where: Where, files: dict[str, bytes]) -> None:
    """Both want all files; each comes once."""
    told, waits = list[str](), threading.Event()

    def tell(text: str, *_: int) -> None:
        told.append(text)
        if "another process is downloading" in text:
            waits.set()

    hub.faults.append(Fault("/stored/", lambda handler: (waits.wait(600), handler.right())[1], 2))
    pulls = [threading.Thread(target=pull, args=(name_of(), where, tell)) for _ in "12"]
    for thread in pulls:
        thread.start()
    for thread in pulls:
        thread.join()
    found = find(name_of(), where)
    assert found is not None
    check(found, files)
    assert any("another process is downloading" in text for text in told)
    assert len([path for path in hub.paths() if path.startswith("/stored/")]) == 2


# --- interrupted ---------------------------------------------------------------------------------------------------


def test_a_cut_connection_goes_on(hub: FakeHub, where: Where, files: dict[str, bytes], waits: Waits) -> None:
    hub.faults += [Fault("/stored/", cuts(1000), 3), Fault("config.json", cuts(10), 1)]
    check(pull(name_of(), where), files)
    assert len(waits) == 4
    firsts = [headers["range"].partition("-")[0] for _, path, headers in hub.seen if path.startswith("/stored/")]
    assert firsts[:4] == ["bytes=0", "bytes=1000", "bytes=2000", "bytes=3000"]


def test_an_interrupted_download_goes_on_later(hub: FakeHub, where: Where, files: dict[str, bytes]) -> None:
    hub.faults.append(Fault("/stored/", cuts(5000), 100))
    failed = refusal(where)
    assert isinstance(failed, StorageFailed) and "goes on from there" in failed.message
    assert "cut 6 times in a row" in failed.message
    assert find(name_of(), where) is None
    hub.faults.clear()
    hub.seen.clear()
    pulled = pull(name_of(), where)
    check(pulled, files)
    first = next(headers["range"] for _, path, headers in hub.seen if path.startswith("/stored/"))
    assert first.startswith("bytes=30000-")
    small = sum(len(content) for name, content in files.items() if not name.endswith(".safetensors"))
    assert pulled.brought_bytes == sum(map(len, files.values())) - small - 30_000


def test_ctrl_c_keeps_what_came(hub: FakeHub, where: Where, files: dict[str, bytes]) -> None:
    def stop(text: str, done: int, total: int) -> None:
        if "model-" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(name_of(), where, stop)
    assert find(name_of(), where) is None
    check(pull(name_of(), where), files)


def test_a_server_without_ranges(hub: FakeHub, where: Where, files: dict[str, bytes]) -> None:
    hub.ranges = False
    hub.faults.append(Fault("/stored/", cuts(1000), 1))
    check(pull(name_of(), where), files)


def test_a_part_that_was_damaged_here_comes_once_more(hub: FakeHub, where: Where, files: dict[str, bytes]) -> None:
    shard = files["model-00001-of-00002.safetensors"]
    assert where.hub_cache is not None
    incomplete = Repository.of(where.hub_cache, "org/name").folder / "blobs" / hashlib.sha256(shard).hexdigest()
    incomplete.parent.mkdir(parents=True)
    incomplete.with_name(f"{incomplete.name}.incomplete").write_bytes(bytes(9000))
    told: list[tuple[int, int]] = []
    check(pull(name_of(), where, lambda _, done, total: told.append((done, total))), files)
    assert all(0 <= done <= total for done, total in told) and told[-1][0] == told[-1][1]
    incomplete.unlink()
    incomplete.with_name(f"{incomplete.name}.incomplete").write_bytes(bytes(len(shard) + 9))  # too long
    check(pull(name_of(), where), files)


# --- refused -------------------------------------------------------------------------------------------------------


# --- hostile -------------------------------------------------------------------------------------------------------
