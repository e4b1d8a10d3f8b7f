"""Engines of checkpoints that are loaded without a packed copy, for tests of first runs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from penstock.serve.cached import Cached
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.source import Source
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.store import copies
from penstock.store.identity import stamps
from penstock.store.unpacked import Unpacked
from tests.cpu.commands import MACHINE
from tests.cpu.engines import GREEDY

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def opened(checkpoint: Path, cache: Path, weights: Format | None = None) -> Source:
    """A checkpoint that has no copy, whatever its tokenizer."""
    unpacked = Unpacked.open(checkpoint, weights, stamps(checkpoint))
    where = Cached(checkpoint, "model", weights, cache / copies.MODELS, chat=False)
    return Source(unpacked.model.folder, None, where, 0, unpacked)


def engine_of(source: Source, tell: Any = None, prompt: tuple[int, ...] = PROMPT, **ask: Any) -> Engine:
    return Engine.open(source, Ask(**ask), Loading(machine=MACHINE, prompt=prompt), tell)


def first_run(checkpoint: Path, cache: Path, weights: Format | None = None) -> tuple[list[int], Engine]:
    """The answer of a run without a copy, and its engine, which has written the copy and is closed."""
    with closing(engine_of(opened(checkpoint, cache, weights))) as engine:
        assert not engine.packed.files
        ids = engine.generate_ids(PROMPT, GREEDY)
        engine.write_copy()
        return ids, engine
