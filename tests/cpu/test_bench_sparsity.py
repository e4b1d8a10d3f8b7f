"""`bench.sparsity` ends with one JSON line whatever failed, and its page keeps what was not measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")  # of the reference kernels that the bench's page names

from bench import sparsity, sparsity_page
from bench.peers import WorkerEnded
from bench.report import Stopped
from bench.sparsity_models import LIMIT_BYTES, OPT, Models

KEYS = {"ops", "ram", "disk_2.4", "tale_opt", "cuda"}


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    monkeypatch.setattr(sparsity, "absent", lambda names: {"scipy": f"of {sorted(names)}"})
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
    with pytest.raises((SystemExit, OSError)):
        sparsity.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_part_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def ops(*_: object) -> Iterator[dict[str, Any]]:
        yield {"ops": {"90": 0.1}}
        raise MemoryError("no memory")

    def ram(*_: object) -> Iterator[dict[str, Any]]:
        yield {"exact_vs_off": 1.3}
        raise WorkerEnded("predict: ended")

    def nemotron(*_: object) -> Iterator[dict[str, Any]]:
        yield {"vs_llamacpp": {"off": None}}

    monkeypatch.setattr(sparsity, "operators", ops)
    monkeypatch.setattr(sparsity, "in_ram", ram)
    monkeypatch.setattr(sparsity, "beside_llamacpp", nemotron)
    monkeypatch.setattr(sparsity, "_machine", lambda _: None)
    monkeypatch.setattr(Models, "make", lambda *_: tmp_path)
    only = ("--only", "ops", "ram", "nemotron", "--folder", tmp_path, "--results", tmp_path / "kept.json")
    found = run(monkeypatch, capsys, *only)
    assert found.keys() >= KEYS
    assert found["failed"] == {"ops": "MemoryError: no memory", "ram": "WorkerEnded: predict: ended"}
    assert found["ops"] == {"90": 0.1} and found["ram"] == {"exact_vs_off": 1.3} and found["disk_2.4"] is None
    assert found["nemotron"] == {"vs_llamacpp": {"off": None}}
    assert found["absent"] == {"scipy": "of ['llamacpp', 'scipy', 'torch']"}
    assert json.loads((tmp_path / "kept.json").read_text())["ram"] == {"exact_vs_off": 1.3}


def test_a_bench_that_is_stopped_says_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def ops(*_: object) -> Iterator[dict[str, Any]]:
        yield {"ops": {"90": 0.1}}
        raise Stopped("by SIGTERM")

    monkeypatch.setattr(sparsity, "operators", ops)
    found = run(monkeypatch, capsys, "--only", "ops", "placement", "--folder", tmp_path)
    assert found.keys() >= KEYS and found["failed"] == {"bench": "Stopped: by SIGTERM"} and found["ops"] == {"90": 0.1}


def test_a_folder_that_cannot_be_made_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    found = run(monkeypatch, capsys, "--folder", tmp_path / "file" / "models")
    assert found.keys() >= KEYS and found["failed"]["bench"].startswith("NotADirectoryError")


def test_fewer_layers_have_a_smaller_limit(tmp_path: Path) -> None:
    assert Models(tmp_path).limit_bytes == LIMIT_BYTES
    small = Models(tmp_path, 2)
    assert json.loads(small.config(OPT).read_text())["num_hidden_layers"] == 2
    assert small.limit_bytes < LIMIT_BYTES / 4
    assert small.missing_bytes(["ram", "disk"]) < Models(tmp_path).missing_bytes(["ram"]) / 4


PAGE = """# Which neurons fire

Words.

## tale-opt

| layer |

## Operators (Figure 16)

old operators

## OPT-6.7B's shape in RAM (Figures 14 and 17)

old RAM
"""


def test_the_page_keeps_what_was_not_measured() -> None:
    disk: dict[str, Any] = {f"{kind}_bytes_per_token": 1e6 for kind in ("disk", "records", "alignment", "hole")}
    disk |= {"tokens_per_s": [2.0, 4.0], "vs_dense": 2.5, "predicted_tokens_per_s": 3.0, "share_of_bound": 0.8}
    disk["reads_per_token"] = 70.0
    ops = {"90": 0.15, "50": 0.6, "10": 1.0, "dense_ms": 0.3}
    result = {"ops_by_format": {"int4": ops}, "ops_peers": {"scipy.sparse": None}, "disk_2.4": {"predict": disk}}
    page = sparsity_page.merged(PAGE, result, "predictors.svg")
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == [
        "## tale-opt", "## Operators (Figure 16)", "## OPT-6.7B's shape in RAM (Figures 14 and 17)",
        "## OPT-6.7B's shape within 2.4 GB",
    ]  # fmt: skip
    assert "old RAM" in page and "old operators" not in page and "| scipy" not in page
    assert "| predict | 3.00 | 2.50 × | 3.00 | 0.80 | 1 | 1 | 1 | 1 | 70 |" in page
    assert sparsity_page.merged(page, result, "predictors.svg") == page
