"""The file fuzzer: its seeds as they are, under every command that reads them, and what it takes for a fault."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.commands import ROOT
from tests.fuzz_files import corpus
from tests.fuzz_files.__main__ import unmutated
from tests.fuzz_files.checks import KINDS, faults
from tests.fuzz_files.child import Outcome
from tests.fuzz_files.mutate import mutant
from tests.fuzz_files.scenes import SCENES, Case

SEEDS = corpus.seeds()


def test_the_corpus() -> None:
    assert len(SEEDS) >= 150
    assert {seed.kind for seed in SEEDS} == set(SCENES)
    assert max(len(seed.content) for seed in SEEDS) < 20_000
    assert all(seed.codes(0) for seed in SEEDS)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What went wrong with the seeds, one of each signature; by a process of its own, since it forks."""
    folder = tmp_path_factory.mktemp("findings") / "found"
    command = [sys.executable, "-m", "tests.fuzz_files", "--seeds", "--findings", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["cases"] == sum(unmutated(seed) for seed in SEEDS), done.stderr
    records = [json.loads(file.read_text()) for file in sorted(folder.glob("*/finding.json"))]
    assert bool(records) == bool(done.returncode), done.stdout + done.stderr
    return records


@pytest.mark.parametrize("kind", SCENES)
def test_seeds(kind: str, found: list[dict[str, Any]]) -> None:
    """`good-…` works, `bad-…` is refused, and none of them does what no file may do."""
    assert [record for record in found if record["case"].startswith(f"{kind}/")] == []


def test_a_mutant_comes_again_from_its_name() -> None:
    for seed in SEEDS[::20]:
        family = [other for other in SEEDS if other.kind == seed.kind]
        first, again, other = (mutant(random.Random(f"{seed.name}:{n}"), seed, family) for n in (7, 7, 8))
        assert first == again
        assert len(first) < 10_000_000
        assert other != first or len(seed.content) < 5


# --- what counts as a fault ------------------------------------------------------------------------------------------

REFUSED = b'{"error": {"type": "BadRequest", "message": "no such thing"}}\n'
SAID = b"penstock: no such thing\n"
FILE = {"model/config.json": (33188, 10, 1, "a")}


def kinds_of(
    code: int = 2, out: bytes = REFUSED, err: bytes = SAID, after: dict[str, Any] | None = None, **fields: Any
) -> list[str]:
    case = Case("config/x.json:1", ("plan", "model", "--json"), Path("."), None, Path("model/config.json"), True)
    values = {"seconds": 0.1, "cpu_seconds": 0.1, "peak_bytes": 1 << 20, "late": False, "orphans": 0, **fields}
    wrong = faults(case, Outcome(code, out, err, **values), FILE, FILE if after is None else after, (0, 2, 130))
    return [fault.kind for fault in wrong]


def test_what_is_no_fault() -> None:
    assert kinds_of() == []
    assert kinds_of(0, b'text\n{"plan": {}}\n', b"penstock: a warning\npacking 0.ffn: 1 KiB of 2 KiB, 1 GB/s\n") == []
    assert kinds_of(130, b'{"error": {}}', b"penstock: stopped\n") == []
    assert kinds_of(err=b"penstock: a note\n" + SAID + b"Try `penstock plan --help`.\n") == []


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("tracebacks", {"code": 1, "err": b"penstock: a fault of ours: x\n"}),
        ("tracebacks", {"err": b"Traceback (most recent call last):\n" + SAID}),
        ("aborts", {"code": -6}),
        ("over_5_s", {"late": True, "code": -9}),
        ("over_5_s", {"seconds": 5.1}),
        ("changed_files", {"after": {}}),
        ("changed_files", {"after": {"model/config.json": (33188, 10, 2, "a")}}),
        ("changed_files", {"after": {**FILE, "cwd/core": (33188, 0, 0, "")}}),
        ("bad_exit_codes", {"code": 3}),
        ("orphans", {"orphans": 1}),
        ("bad_output", {"out": b"hm\n"}),
        ("bad_output", {"out": b""}),
        ("bad_output", {"err": b""}),
        ("bad_output", {"err": SAID + b"RuntimeWarning: overflow\n"}),
        ("bad_output", {"err": SAID + SAID}),
        ("bad_output", {"err": SAID + b"penstock: \x1b[2J\n"}),
        ("bad_output", {"err": SAID + b"penstock: " + b"x" * 5000 + b"\n"}),
    ],
)
def test_what_is_a_fault(kind: str, fields: dict[str, Any]) -> None:
    assert kind in KINDS
    assert kind in kinds_of(**fields)
