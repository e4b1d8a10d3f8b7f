"""The line of an error: one, short enough to read, and nothing in it that a terminal obeys."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.cli.output import note, one_line
from tests.cpu.commands import Call


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
