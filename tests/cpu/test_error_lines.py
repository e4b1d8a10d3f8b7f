"""The line of an error: one, short enough to read, and nothing in it that a terminal obeys."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.cli.cache_flag import naming_cache_flag
from penstock.cli.output import note, one_line
from penstock.errors import StorageFailed
from penstock.store import writer
from tests.cpu.commands import ROOT, Call


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain", "plain"),
        ("two\nlines\u2028and more\r\n", "two lines and more"),
        ("\x1b[2J\x07\x7f\x9b", "\\x1b[2J\\x07\\x7f\\x9b"),
        ("a\u202efdp.exe", "a\\u202efdp.exe"),
        ("Zürich – 東京", "Zürich – 東京"),
        ("a" * 1000, "a" * 1000),
    ],
)
def test_one_line(text: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert one_line(text) == line
    note(text)
    assert capsys.readouterr().err == f"penstock: {line}\n"


def test_the_middle_of_a_long_line_is_left_out() -> None:
    line = one_line("generation_config.json: top_k is " + "[1, 2], " * 10_000 + "it should be a whole number")
    assert len(line) == 1000
    assert line.startswith("generation_config.json: top_k is [1, 2]") and line.endswith("it should be a whole number")


def test_a_hostile_file_in_an_error(call: Call, model: Path, tmp_path: Path) -> None:
    packed = Path(shutil.copytree(model, tmp_path / "model"))
    (packed / "generation_config.json").write_text(json.dumps({"top_k": ["\x1b[2J\n"] * 3000}))
    found = call("run", packed, "hi", "--no-verify")
    assert found.code == 2
    message = found.report["error"]["message"]
    assert found.err.splitlines()[1:] == [f"penstock: {one_line(message)}"]
    (packed / "generation_config.json").unlink()
    (packed / "chat_template.jinja").write_text("{{ raise_exception('\\x1b[2Jno\\nturn') }}")
    found = call("run", packed, "hi", "--no-verify")
    assert found.code == 2 and "\\x1b[2Jno turn" in found.err and "\x1b" not in found.err


@pytest.mark.parametrize(
    ("error", "line"),
    {
        StorageFailed("cannot write /c/models/x: Read-only file system"): " (--cache DIR names another place)",
        StorageFailed(
            "the disk is too full: /c/models/x needs 2 B, 1 B are free"
        ): " (--cache DIR names another place)",
        PermissionError(13, "Permission denied", "/c/machines"): " (--cache DIR names another place)",
        StorageFailed("cannot read /c/models/x: Input/output error"): "",
        StorageFailed("cannot write /elsewhere: Read-only file system"): "",
    }.items(),
)
def test_a_cache_without_room_names_its_flag(error: Exception, line: str) -> None:
    with pytest.raises((StorageFailed, OSError)) as found, naming_cache_flag("/c"):
        raise error
    assert str(found.value).endswith(line) and ("--cache" in str(found.value)) == bool(line)


def test_commands_name_the_flag_of_a_full_cache(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "free_bytes", lambda _: 1)
    found = call("run", ROOT / "penstock/assets/tale-llama", "hi", "--resident", "1500KB")
    assert found.code == 2 and "too full" in found.err and "(--cache DIR names another place)" in found.err
    assert found.report["error"]["have_bytes"] == 1
    packed = call("pack", ROOT / "penstock/assets/tale-llama", tmp_path / "packed")
    assert packed.code == 2 and "too full" in packed.err and "--cache" not in packed.err
