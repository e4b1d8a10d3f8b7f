"""Parts of `bench.files` that several calls measured give one line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench import files
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


def test_facts_follow_all_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shape of the same name, another text or another build is something else."""
    shape, text = tmp_path / "llama.json", tmp_path / "text"
    shape.write_text("{}")
    wanted = argparse.Namespace(shape=shape, text=text, characters=100, limit_gb=1.0, mxfp4_layers=None)
    seen = [files.facts_of(wanted)]
    text.write_text("Once")
    seen.append(files.facts_of(wanted))
    text.write_text("Twice")
    seen.append(files.facts_of(wanted))
    wanted.characters = 50
    seen.append(files.facts_of(wanted))
    shape.write_text('{"num_hidden_layers": 2}')
    seen.append(files.facts_of(wanted))
    assert files.facts_of(wanted) == seen[-1] == json.loads(json.dumps(seen[-1]))
    monkeypatch.setattr(files, "build", lambda: 1)
    seen.append(files.facts_of(wanted))
    monkeypatch.setattr(files, "this_machine", lambda: {"cpu": "another"})
    seen.append(files.facts_of(wanted))
    assert all(one != other for i, one in enumerate(seen) for other in seen[:i])
