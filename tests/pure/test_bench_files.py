"""Parts of `bench.files` that several calls measured give one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.files_parts import Parts

FACTS = {"shape": "llama-3.1-8b"}


def test_parts_of_several_calls_give_one_line(tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    Parts(file, FACTS).measure("q4_0", "ram", lambda: {"decode": 1.0}, 2)
    Parts(file, FACTS).measure("q4_0", "start", lambda: {"first": 3.0}, 3)
    again = Parts(file, FACTS)
    again.measure("q4_0", "ram", lambda: {"decode": 2.0}, 3)
    line = Parts(file, FACTS).line(("q4_0", "mxfp4"), ("decode", "perplexity"))
    assert again.line(("q4_0", "mxfp4"), ("decode", "perplexity")) == line
    told = line["q4_0"].pop("parts")
    assert line["q4_0"] == {"decode": 2.0, "perplexity": None, "first": 3.0}
    assert {name: part["rounds"] for name, part in told.items()} == {"ram": 3, "start": 3}
    assert line["mxfp4"] == {"decode": None, "perplexity": None, "parts": {}}


def test_parts_of_something_else_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    Parts(file, FACTS).measure("q4_0", "ram", dict, 1)
    with pytest.raises(SystemExit, match="figures of"):
        Parts(file, {"shape": "llama-3.2-1b"})


def test_without_a_file_a_call_has_its_own_parts_alone() -> None:
    parts = Parts(None, FACTS)
    parts.measure("q4_0", "ram", lambda: {"decode": 1.0}, 1)
    assert parts.line(("q4_0",), ())["q4_0"]["decode"] == 1.0
    assert "decode" not in Parts(None, FACTS).line(("q4_0",), ())["q4_0"]
