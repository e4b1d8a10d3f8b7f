"""Fixtures of the command-line tests; and Triton's interpreter, for all tests on the processor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.store.synth import synth
from tests.cpu.commands import Call, here, machine_cache
from tests.cpu.configs import TINY_CONFIGS

# Triton reads it where it is imported first, which may be deep within some other test's imports. `tests/gpu` runs in a
# process of its own.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return machine_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied llama of 256 positions in float32."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(TINY_CONFIGS["llama"])
    return synth(folder, folder / "model")


@pytest.fixture
def call(cache: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """A command with --json in this process. `--cache` first, so that another one counts."""
    return lambda name, *args: here(capsys, name, "--cache", cache, "--json", *args)
