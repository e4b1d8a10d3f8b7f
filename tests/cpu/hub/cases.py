"""What tests of the Hub share: a small model as a repository has it, and what is to come of a download."""

from __future__ import annotations

import pytest

from penstock.errors import PenstockError
from penstock.hubs.names import HubName, hub_name
from penstock.hubs.pull import Pulled, pull
from penstock.hubs.where import Where
from tests.cpu.checkpoints import LLAMA

CONFIG = {**LLAMA, "vocab_size": 300}
INDEX = "model.safetensors.index.json"
NOT_WANTED = {"pytorch_model.bin": b"x" * 20_000, "modeling_x.py": b"boom", "original/consolidated.00.pth": b"y"}


class Waits(list[float]):
    """Seconds that would have been waited."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def name_of(text: str = "org/name") -> HubName:
    name = hub_name(text)
    assert name is not None
    return name


def refusal(where: Where, text: str = "org/name") -> PenstockError:
    with pytest.raises(PenstockError) as caught:
        pull(name_of(text), where)
    assert "\n" not in caught.value.message
    return caught.value


def check(pulled: Pulled, files: dict[str, bytes]) -> None:
    """All that is needed is there, and nothing else."""
    assert {file.name: file.read_bytes() for file in pulled.path.iterdir()} == files
