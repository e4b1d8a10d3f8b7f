"""Checkpoints whose tokenizer or template is an attack, and what a command on one may take."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from penstock.models import spec_from_config
from penstock.serve.text_files import text_bytes
from penstock.store.synth import byte_tokenizer
from tests.cpu.checkpoints import LLAMA, save_checkpoint
from tests.cpu.warm import Taken

CONFIG = {**LLAMA, "vocab_size": 300}
MIB = 1 << 20

# What a request may take, and what a command takes beside: it imports, and so does its child (3.2 s where compilers run
# beside it, on a processor that counts to COUNT in COUNT_S); libraries and the stack, which the limit of memory does
# not count.
CPU_S, BESIDE_S = 4.0, 4.0
COUNT, COUNT_S = 500_000, 0.03
MEMORY_BYTES, PER_FILE_BYTE, BESIDE_BYTES = 128 * MIB, 16, 24 * MIB


def tokenizer_files() -> dict[str, Any]:
    """Name → content of a byte tokenizer's files, to be spoilt."""
    files = byte_tokenizer(spec_from_config(CONFIG, "test"))
    return {name: json.loads(content) for name, content in files.items()}


def checkpoint(folder: Path, weights: Path, **files: Any) -> Path:
    """A checkpoint in `folder` with the weights of another. `files`: content of tokenizer_json, tokenizer_config_json
    and so on instead of the byte tokenizer's, a text as it stands."""
    folder.mkdir()
    for name in ("model.safetensors", "config.json"):
        os.link(weights / name, folder / name)
    for name, content in {**tokenizer_files(), **{n.replace("_json", ".json"): c for n, c in files.items()}}.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def save_weights(folder: Path) -> Path:
    """A checkpoint to take weights from, in a new folder within `folder`."""
    save_checkpoint(folder / "weights", CONFIG)
    return folder / "weights"


def within_limits(taken: Taken, folder: Path) -> None:
    """Asserts that a command kept to the processor time and the memory that one request may take."""
    assert taken.cpu_s <= CPU_S + BESIDE_S * slowness(), taken
    assert taken.peak_bytes <= MEMORY_BYTES + PER_FILE_BYTE * text_bytes(folder) + BESIDE_BYTES, taken


def slowness() -> float:
    """How many times as long this processor takes, now, as the one that BESIDE_S is of; 1 where it is faster."""
    start_s, total = time.process_time(), 0
    for i in range(COUNT):
        total += i
    return max(1.0, (time.process_time() - start_s) / COUNT_S)


def refused(taken: Taken, folder: Path, *says: str) -> None:
    """Asserts that a command ended as it should: exit code 2, one line, within its limits."""
    within_limits(taken, folder)
    assert taken.code == 2, taken
    lines = [
        line for line in taken.err.splitlines() if "chat template: it continues" not in line and "writes " not in line
    ]
    assert len(lines) == 1 and lines[0].startswith("penstock: "), taken
    for word in says:
        assert word in lines[0], taken
    assert lines[0].isprintable()
