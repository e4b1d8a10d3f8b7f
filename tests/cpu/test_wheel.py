"""What `make wheel` holds a wheel to (it tries each wheel itself, without this repository)."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.serve.tokenizer import Tokenizer
from tests.cpu.commands import ROOT
from tests.cpu.oracle import Oracle
from tools.wheel import build, pythons, trial

TALE = ROOT / "penstock/assets/tale-llama"


def test_the_words_that_a_wheel_should_say_are_those_of_transformers() -> None:
    tokenizer = Tokenizer.open(TALE)
    steps = Oracle(TALE).greedy(tokenizer.encode(trial.PROMPT), 16)
    assert min(ahead for _, ahead in steps) > 0.01  # no kernels differ by so much
    assert tokenizer.decode([token for token, _ in steps]).startswith(trial.GOLDEN)


GOOD = {
    f"{build.MODEL}config.json": 10, f"{build.MODEL}model.safetensors": 6_000_000, "penstock/py.typed": 0,
    "penstock/_native.pyi": 10, "penstock/_native.abi3.so": 2_000_000, "penstock-0.1.dist-info/METADATA": 9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"penstock/py.typed": None}, "penstock/py.typed is missing"),
        ({f"{build.MODEL}config.json": None}, "config.json is missing"),
        ({"penstock/_native.abi3.so": None}, "one extension, and has none"),
        ({"penstock/_native.cpython-311-x86_64-linux-gnu.so": 5}, "has penstock/_native.abi3.so, penstock/_native.cp"),
        ({"tests/test_a.py": 5}, "it brings tests"),
        ({"penstock/_native.abi3.so": 5_000_001}, "bytes beside the model, 5,000,000 at most"),
    ],
)
def test_what_is_wrong_with_a_wheel_is_told(change: dict[str, int | None], says: str | None, tmp_path: Path) -> None:
    told = build.faults(wheel_of(GOOD | change, "manylinux_2_27_x86_64.manylinux_2_28_x86_64", tmp_path))
    assert (not told) if says is None else any(says in each for each in told), told


@pytest.mark.parametrize("platform", ["linux_x86_64", "manylinux_2_31_x86_64"])
def test_a_wheel_that_needs_a_newer_glibc_is_told(platform: str, tmp_path: Path) -> None:
    assert build.faults(wheel_of(GOOD, platform, tmp_path)) == ["it should run with glibc 2.28"]


def wheel_of(files: Mapping[str, int | None], platform: str, folder: Path) -> Path:
    """A wheel with files of so many zeros; those of None are missing."""
    wheel = folder / f"penstock-0.1-cp312-abi3-{platform}.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, size in files.items():
            if size is not None:
                file.writestr(name, bytes(size))
    return wheel


def test_this_python_is_found(tmp_path: Path) -> None:
    """Which versions there are is the machine's matter; each is told apart, and none twice."""
    here = pythons.found(tmp_path)
    assert len({each.version for each in here}) == len(here) and all(each.version >= (3, 11) for each in here)
    for each in here:
        assert each.stable == (each.version != (3, 11)) and each.program.exists()
