"""A checkpoint whose copies the tests of the cache look at."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.models import spec_from_config
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.source import Source, resolve
from penstock.spec.ask import Ask
from penstock.store.synth import byte_tokenizer
from tests.cpu.checkpoints import folder_bytes, random_tensors, save_checkpoint, save_tensors
from tests.cpu.commands import MACHINE
from tests.cpu.configs import TINY_CONFIGS

CONFIG: dict[str, Any] = json.loads(TINY_CONFIGS["llama"])
SMALL_SHARDS = 100_000  # the model becomes 5 shards


def make_checkpoint(folder: Path, dtype: str = "F32", **keys: Any) -> Path:
    """`keys`: of its config, in place of CONFIG's."""
    save_checkpoint(folder, CONFIG | keys, dtype=dtype)
    for name, content in byte_tokenizer(spec_from_config(CONFIG, "test")).items():
        (folder / name).write_bytes(content)
    return folder


class Ears:
    """Hears what is told: news, and the kinds of progress."""

    def __init__(self) -> None:
        self.news: list[str] = []
        self.work: set[str] = set()

    def __call__(self, what: str, done: int, total: int) -> None:
        if total:
            self.work.add(what.split()[0])
        else:
            self.news.append(what)


def resolved(checkpoint: Path, cache: Path, weights: str | None = None) -> tuple[Path, Ears]:
    """The copy's folder, not held any more, and what was said meanwhile."""
    ears = Ears()
    source = resolve(str(checkpoint), weights=weights, cache=cache, on_progress=ears)
    source.close()
    return source.folder, ears


def names(cache: Path) -> list[str]:
    models = cache / "models"
    return sorted(os.listdir(models)) if models.exists() else []


def changed(tensors: dict[str, Any]) -> dict[str, Any]:
    """One number of one matrix."""
    name = "model.layers.1.mlp.down_proj.weight"
    other = tensors[name].copy()
    other[-1, -1] += 1
    return {**tensors, name: other}


def replace_file(file: Path) -> None:
    """Other content of the same size and time in a file of its own."""
    status = file.stat()
    save_tensors(file.with_name("new"), changed(random_tensors(CONFIG)))
    os.utime(file.with_name("new"), ns=(status.st_atime_ns, status.st_mtime_ns))
    file.with_name("new").rename(file)
    assert file.stat().st_size == status.st_size and file.stat().st_mtime_ns == status.st_mtime_ns


def weights(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in folder_bytes(folder).items() if name.startswith("model-")}


@contextmanager
def opened(source: Source, **ask: Any) -> Iterator[Engine]:
    engine = Engine.open(source, Ask(**ask), Loading(machine=MACHINE))
    try:
        yield engine
    finally:
        engine.close()


def held(checkpoint: Path, cache: Path, ears: Ears | None = None) -> Source:
    return resolve(str(checkpoint), weights=None, cache=cache, on_progress=ears or Ears())
