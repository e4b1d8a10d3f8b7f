"""`penstock list`, `rm`, `prune`, `--cache-limit` and where the cache lies: on caches that people and crashes made."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.options import cache_folder
from penstock.serve.source import resolve
from penstock.spec.format import parse_format
from penstock.store import cache as caches
from penstock.store import copies
from penstock.store.pack import pack
from tests.cpu.cached_copies import make_checkpoint, names, resolved
from tests.cpu.commands import apart, here, machine_cache, refused


def listed(capsys: pytest.CaptureFixture[str], cache: Path) -> dict[str, dict[str, Any]]:
    done = here(capsys, "list", "--cache", cache, "--json")
    assert done.code == 0, done.err
    return {each["name"]: each for each in done.report["models"]}


def states(cache: Path) -> dict[str, str]:
    return {entry.name: entry.state for entry in caches.entries(cache / "models")}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# --- list ------------------------------------------------------------------------------------------------------


def test_an_empty_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, cache) == {}
    assert "holds no packed models" in here(capsys, "list", "--cache", cache).err
    assert here(capsys, "prune", "--cache", cache, "--json").report == {"removed": [], "in_use": [], "freed_bytes": 0}
    refused(here(capsys, "rm", "x", "--cache", cache, "--json"), "holds no 'x'", "BadRequest")
    assert not cache.exists()  # nothing is made by looking


def test_what_is_listed(checkpoint: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = resolved(checkpoint, cache, "int4")
    os.utime(folder / "source.json", (1e9, 1e9))
    size_bytes = sum(file.stat().st_size for file in folder.iterdir())
    expected = {
        "name": folder.name,
        "format": "int4",
        "bytes": size_bytes,
        "last_used": "2001-09-09T01:46:40Z",
        "state": "whole",
        "packed_from": [str(checkpoint)],
        "why": None,
        "in_use": False,
    }
    done = here(capsys, "list", "--cache", cache, "--json")
    assert done.report == {"folder": str(folder.parent), "bytes": size_bytes, "models": [expected]}
    table = here(capsys, "list", "--cache", cache).out.splitlines()
    assert table[0].split()[:3] == ["name", "format", "size"] and table[0].split()[-2:] == ["packed", "from"]
    assert table[1].split()[:2] == [folder.name, "int4"] and table[1].endswith(f"whole  {checkpoint}")
    resolved(checkpoint, cache, "int4")
    assert listed(capsys, cache)[folder.name]["last_used"] > "2020"
    source = resolve(str(checkpoint), weights="int4", cache=cache)
    assert listed(capsys, cache)[folder.name]["in_use"]
    source.close()


def crowded(tmp_path: Path, cache: Path) -> dict[str, str]:
    """A cache with one of each, by name; and what must survive whatever is removed, beside it."""
    checkpoint, models = tmp_path / "tiny", cache / "models"
    whole, _ = resolved(checkpoint, cache, "int4")
    made = {whole.name: caches.WHOLE}

    gone, _ = resolved(make_checkpoint(tmp_path / "gone"), cache, "int8")
    shutil.rmtree(tmp_path / "gone")
    made[gone.name] = caches.ORPHANED

    damaged, _ = resolved(checkpoint, cache, "int8")
    os.truncate(damaged / "model-00001.safetensors", 5000)
    made[damaged.name] = caches.DAMAGED
    marked, _ = resolved(checkpoint, cache, "float16")
    copies.mark_damaged(marked, "seen by a pass")
    made[marked.name] = caches.DAMAGED

    for name, version, state in (("old", 2, caches.OLD), ("new", 99, caches.NEWER)):
        folder = models / f"{name}-0123456789ab-int4"
        folder.mkdir()
        (folder / "penstock.json").write_text(json.dumps({"schema": f"penstock.packed/{version}"}))
        made[folder.name] = state

    partial, removed = "some-0123456789ab-int4.partial", "some-0123456789ab-int4.1700000000.removed"
    for name in (partial, removed):
        (models / name).mkdir()
        (models / name / "model-00001.safetensors").write_bytes(b"x" * 1000)
        (models / name / "resume.json.tmp").write_bytes(b"{")
        made[name] = caches.PARTLY

    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "model-00001.safetensors").write_text("mine")
    (models / "link-0123456789ab-int4").symlink_to(tmp_path / "precious")
    (models / "dangling-0123456789ab-int4").symlink_to(tmp_path / "nowhere")
    (models / "file-0123456789ab-int4").write_text("mine")
    os.mkfifo(models / "pipe-0123456789ab-int4.partial")
    for name in ("photos", "my-0123456789ab-int4.partial", "\x1b[2J\nstrange \udcff", "-rf"):
        (models / name).mkdir()
        (models / name / "thesis.tex").write_text("mine")
    (models / "deep-0123456789ab-int4" / "config.json").mkdir(parents=True)
    (models / "deep-0123456789ab-int4" / "config.json" / "x").write_text("mine")
    pack(checkpoint, models / "packed-by-hand", parse_format("int8"))
    for name in ("file-0123456789ab-int4", "pipe-0123456789ab-int4.partial", "photos", "my-0123456789ab-int4.partial"):
        made[name] = caches.FOREIGN
    for name in ("\x1b[2J\nstrange \udcff", "-rf", "deep-0123456789ab-int4", "packed-by-hand"):
        made[name] = caches.FOREIGN
    made |= dict.fromkeys(("link-0123456789ab-int4", "dangling-0123456789ab-int4"), caches.LINK)
    return made


def test_every_state_is_told(checkpoint: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = crowded(tmp_path, cache)
    assert states(cache) == made
    done = here(capsys, "list", "--cache", cache)
    assert done.code == 0 and "\x1b" not in done.out + done.err and len(done.out.splitlines()) == 1 + len(made)
    assert {each["state"] for each in listed(capsys, cache).values()} == set(made.values())


def test_a_shard_on_a_second_disk_is_no_reason_to_call_a_copy_strange(cache: Path, tmp_path: Path) -> None:
    folder = cache / "models" / "a-0123456789ab-int4.partial"
    folder.mkdir(parents=True)
    (tmp_path / "elsewhere").write_text("mine")
    (folder / "model-00001.safetensors").symlink_to(tmp_path / "elsewhere")
    assert caches.prune(cache / "models").freed_bytes < 100
    assert names(cache) == [] and (tmp_path / "elsewhere").read_text() == "mine"


# --- prune and rm ----------------------------------------------------------------------------------------------


def test_prune_takes_what_is_of_no_use_and_nothing_else(
    checkpoint: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = crowded(tmp_path, cache)
    before = {name: nbytes(cache / "models" / name) for name in made}
    done = here(capsys, "prune", "--cache", cache, "--json")
    waste = {name for name, state in made.items() if state in caches.WASTE}
    assert done.code == 0 and set(done.report["removed"]) == waste and done.report["in_use"] == []
    assert done.report["freed_bytes"] == sum(before[name] for name in waste)
    assert set(names(cache)) == made.keys() - waste
    assert {name: nbytes(cache / "models" / name) for name in names(cache)}.items() <= before.items()
    assert (tmp_path / "precious" / "model-00001.safetensors").read_text() == "mine"
    again = here(capsys, "prune", "--cache", cache)
    assert (again.code, again.err) == (0, "penstock: freed 0 B\n")


def nbytes(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(nbytes(each) for each in path.iterdir())


def test_prune_takes_copies_of_commits_that_a_branch_has_left(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository, old, new = tmp_path / "models--org--name", "a" * 40, "b" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(old)
    (repository / "snapshots").mkdir()
    folder, _ = resolved(make_checkpoint(repository / "snapshots" / old), cache, "int4")
    assert listed(capsys, cache)[folder.name]["state"] == "whole"
    (repository / "refs" / "main").write_text(new)
    assert listed(capsys, cache)[folder.name]["state"] == "whole"  # it was asked for by its path
    (repository / ".penstock" / f"{old}.pinned").unlink()
    assert listed(capsys, cache)[folder.name]["state"] == "superseded"
    assert here(capsys, "prune", "--cache", cache, "--json").report["removed"] == [folder.name]
    assert (repository / "snapshots" / old).is_dir()


def test_prune_leaves_what_is_in_use(checkpoint: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = resolve(str(checkpoint), weights=None, cache=cache)
    shutil.rmtree(checkpoint)
    done = here(capsys, "prune", "--cache", cache, "--json")
    assert done.report == {"removed": [], "in_use": [source.folder.name], "freed_bytes": 0}
    assert "is in use by another process and stays" in done.err
    source.close()
    assert here(capsys, "prune", "--cache", cache, "--json").report["removed"] == [source.folder.name]


def test_an_unmounted_or_unreadable_checkpoint_is_not_the_same_as_none(checkpoint: Path, cache: Path) -> None:
    folder, _ = resolved(checkpoint, cache)
    copies.update(folder, lambda record: copies.Record(record.weights, (copies.Origin("\0", {}), *record.origins)))
    assert states(cache)[folder.name] == caches.WHOLE


def test_rm_takes_what_is_named(
    checkpoint: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = crowded(tmp_path, cache)
    for name, state in made.items():
        if state == caches.FOREIGN:
            found = here(capsys, "rm", "--cache", cache, "--json", "--", name)
            assert refused(found, "is not ours")["message"]
    whole = next(name for name, state in made.items() if state == caches.WHOLE)
    for bad in ("..", ".", "/", "../models", f"{whole}/", f"./{whole}", "", "nothing"):
        refused(here(capsys, "rm", "--cache", cache, "--json", whole, bad), "holds no", "BadRequest")
    assert set(names(cache)) == made.keys()  # all or none
    ours = [name for name, state in made.items() if state != caches.FOREIGN]
    done = here(capsys, "rm", "--cache", cache, "--json", *ours)
    assert done.code == 0 and done.report["removed"] == ours
    assert set(names(cache)) == made.keys() - set(ours)
    assert (tmp_path / "precious" / "model-00001.safetensors").read_text() == "mine"


def test_rm_refuses_what_is_in_use(checkpoint: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, other = resolve(str(checkpoint), weights=None, cache=cache), resolved(checkpoint, cache, "int4")[0]
    found = here(capsys, "rm", other.name, source.folder.name, "--cache", cache, "--json")
    refused(found, "is in use by another process", "BadRequest")
    assert len(names(cache)) == 2
    source.close()


def test_an_interrupted_rm_leaves_what_prune_removes(
    checkpoint: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = resolved(checkpoint, cache)

    def interrupted(path: Path) -> None:
        next(iter(Path(path).iterdir())).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        assert here(capsys, "rm", folder.name, "--cache", cache).code == 130
    assert list(states(cache).values()) == [caches.PARTLY]
    again, ears = resolved(checkpoint, cache)  # the name is free at once
    assert again == folder and ears.work == {"packing"}
    caches.prune(cache / "models")
    assert names(cache) == [folder.name]


# --- the limit -------------------------------------------------------------------------------------------------


def resolved_within(limit_bytes: int, checkpoint: Path, cache: Path, weights: str) -> tuple[Path, list[str]]:
    news: list[str] = []

    def tell(what: str, done: int, total: int) -> None:
        if not total:
            news.append(what)

    source = resolve(str(checkpoint), weights=weights, cache=cache, cache_limit_bytes=limit_bytes, on_progress=tell)
    source.close()
    return source.folder, [line for line in news if line.startswith("removed")]


def test_the_longest_unused_copies_go_first(checkpoint: Path, cache: Path) -> None:
    copies_by_format = {fmt: resolved(checkpoint, cache, fmt)[0] for fmt in ("float16", "int8", "int4")}
    for age, fmt in enumerate(("int8", "float16", "int4")):  # int8 was used last
        os.utime(copies_by_format[fmt] / "source.json", (1e9 - age, 1e9 - age))
    total = sum(nbytes(folder) for folder in copies_by_format.values())
    new = nbytes(resolved(checkpoint, cache.with_name("other"), "bfloat16")[0])
    limit = total + new - nbytes(copies_by_format["int4"]) - 1  # so int4 alone is a byte too little
    folder, removed = resolved_within(limit, checkpoint, cache, "bfloat16")
    assert sorted(names(cache)) == sorted([folder.name, copies_by_format["int8"].name])
    assert [line.split()[1] for line in removed] == [copies_by_format[fmt].name for fmt in ("int4", "float16")]
    # Also where nothing is packed; what is used stays, were it alone too much.
    folder, removed = resolved_within(1000, checkpoint, cache, "bfloat16")
    assert names(cache) == [folder.name] and len(removed) == 1


def test_what_is_of_no_use_goes_before_what_is(checkpoint: Path, cache: Path, tmp_path: Path) -> None:
    old, _ = resolved(checkpoint, cache, "int8")
    os.utime(old / "source.json", (1e9, 1e9))
    partial = cache / "models" / "a-0123456789ab-int4.partial"
    partial.mkdir()
    (partial / "model-00001.safetensors").write_bytes(b"x" * 1000)
    new = nbytes(resolved(checkpoint, tmp_path / "other", "int4")[0])
    resolved_within(nbytes(old) + new + 500, checkpoint, cache, "int4")
    assert old.name in names(cache) and partial.name not in names(cache)


def test_a_limit_that_cannot_be_kept_is_refused_before_the_work(
    checkpoint: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_cache(cache)
    kept, _ = resolved(checkpoint, cache, "int4")
    args = ("run", checkpoint, "abc", "--cache", cache, "--json", "--weights", "int8", "--cache-limit")
    error = refused(here(capsys, *args, "100KiB"), "more than --cache-limit 100 KiB allows", "BadRequest")
    assert error["limit_bytes"] == 100 * 1024 < error["need_bytes"]
    with resolve_held(checkpoint, cache, "int4"):
        refused(here(capsys, *args, "400KiB"), "in use beside it", "BadRequest")
    assert names(cache) == [kept.name]
    refused(here(capsys, *args, "3q"), "--cache-limit '3q' is not a size", "BadRequest")
    done = here(capsys, *args, "400KiB")
    assert done.code == 0 and f"removed {kept.name}" in done.err


def resolve_held(checkpoint: Path, cache: Path, weights: str) -> Any:
    from contextlib import closing

    return closing(resolve(str(checkpoint), weights=weights, cache=cache))


# --- where it lies ---------------------------------------------------------------------------------------------


def test_xdg_cache_home_counts_where_it_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(None) == tmp_path / "xdg" / "penstock"
    assert cache_folder(str(tmp_path / "named")) == tmp_path / "named"
    for useless in ("", "relative/path", "~"):
        monkeypatch.setenv("XDG_CACHE_HOME", useless)
        assert cache_folder(None) == tmp_path / "home" / ".cache" / "penstock"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(None) == tmp_path / "home" / ".cache" / "penstock"


def test_commands_use_xdg_cache_home(checkpoint: Path, tmp_path: Path) -> None:
    machine_cache(tmp_path / "xdg" / "penstock")
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    done = apart("run", checkpoint, "abc", "--max-tokens", 2, "--json", env=environment)
    assert done.code == 0, done.err
    assert not (tmp_path / "home").exists()
    found = apart("list", "--json", env=environment).report
    assert found["folder"] == str(tmp_path / "xdg/penstock/models") and len(found["models"]) == 1


@pytest.mark.parametrize("what", ["cache", "models"])
def test_a_cache_that_is_no_folder(
    checkpoint: Path, cache: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if what == "cache":
        cache.write_text("mine")
    else:
        cache.mkdir()
        (cache / "models").write_text("mine")
    for args in (("list",), ("prune",), ("rm", "x"), ("run", checkpoint, "abc")):
        found = here(capsys, *args, "--cache", cache, "--json")
        error = refused(found, str(cache))
        assert error["type"] == "StorageFailed"
