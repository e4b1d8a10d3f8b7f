"""Services over a small model in several plans, and who hears their answers."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.graph.arenas import with_arenas
from penstock.serve.engine import Engine
from penstock.serve.service import Service
from penstock.serve.told import AnswerPiece, Told
from penstock.spec.plan import Plan
from penstock.store.packed import open_packed
from tests.cpu.engines import streaming
from tests.plans import resident_plan

SEQS, CONTEXT = 4, 96


def plans(folder: Path) -> dict[str, Plan]:
    packed = open_packed(folder)
    sizes = {"batch_seqs": SEQS, "chunk_rows": 16, "logits_rows": 16, "context": CONTEXT}
    halves = sizes | {"batch_seqs": SEQS // 2, "batches_per_pass": 2}
    return {
        "resident": resident_plan(packed.spec, packed.weights, **sizes),
        "streaming": streaming(packed, **sizes),  # type: ignore[arg-type]
        "two batches": streaming(packed, **halves),  # type: ignore[arg-type]
        "few pages": with_arenas(replace(resident_plan(packed.spec, packed.weights, **sizes), kv_pages=3)),
        "KV on disk": streaming(packed, **halves, kv_spilled=frozenset({1})),  # type: ignore[arg-type]
        "guests": replace(streaming(packed, **sizes), guests=True),  # type: ignore[arg-type]
    }


@contextmanager
def serving(engine: Engine, prompt_rows: int = 5, queue: int = 100) -> Iterator[Service]:
    with closing(Service(engine, prompt_rows=prompt_rows, queue=queue)) as service:
        yield service


class Heard:
    """What one request is told."""

    def __init__(self) -> None:
        self._told: queue.Queue[Told] = queue.Queue()
        self.tell: Callable[[Told], None] = self._told.put

    def next(self) -> Told:
        return self._told.get(timeout=600)

    def end(self) -> tuple[str, Told]:
        """The text of all pieces, and what came last."""
        text = ""
        while isinstance(told := self.next(), AnswerPiece):
            text += told.text
        assert self._told.empty()
        return text, told


def prompts(count: int, vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab, rng.integers(1, 60)).tolist() for _ in range(count)]
