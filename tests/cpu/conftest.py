"""Fixtures of the command-line tests; and Triton's interpreter, for all tests on the processor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock.store.synth import synth
from tests.cpu.commands import Call, Outcome, here, machine_cache
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.warm import Warm

WITHOUT_CACHE = ("pack", "synth")  # commands that know no --cache

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

    def run(name: str, *args: object) -> Outcome:
        flags = [] if name in WITHOUT_CACHE else ["--cache", cache]
        return here(capsys, name, *flags, "--json", *args)

    return run


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """For the tests of the cache."""
    from tests.cpu.cached_copies import make_checkpoint

    return make_checkpoint(tmp_path / "tiny")


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """A process with all imports done, which forks a child for every command."""
    with closing(Warm()) as found:
        yield found


@pytest.fixture(scope="module")
def hostile_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that hostile ones take their weights from."""
    from tests.cpu.hostile import save_weights

    return save_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """For tiny tensors: on a busy machine torch's threads wait for each other 20 times longer than they compute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
