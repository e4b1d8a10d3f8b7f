"""A service whose KV pages are kept in a folder: what the tests of kept KV share."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np

from penstock.serve.engine import Engine
from penstock.serve.generation import Generation
from penstock.serve.kv_store import KvStore, store_key
from penstock.serve.sampling import SamplingParams
from penstock.serve.service import Service
from penstock.serve.told import Ended
from tests.cpu.services import Heard

PROMPT = np.random.default_rng(2).integers(0, 200, 200).tolist()
SIZES = {"batch_seqs": 2, "chunk_rows": 64, "logits_rows": 64, "context": 256}


def store(engine: Engine, where: Path, pages: int = 100) -> KvStore:
    page_bytes = engine.session.kv_pages.page_bytes
    return KvStore(where, store_key(engine.plan, engine.packed.sums, False), page_bytes, pages * (page_bytes + 32))


def answered(
    engine: Engine, where: Path, prompts: Iterable[list[int]], params: SamplingParams, pages: int, owner: str = ""
) -> list[Generation]:
    """One answer after the other, with time between in which pages are kept. `pages`: the most that are kept."""
    answers = []
    with closing(Service(engine, prompt_rows=8, queue=9, store=store(engine, where, pages))) as service:
        for ids in prompts:
            heard = Heard()
            service.submit(ids, params, heard.tell, owner=owner)
            _, told = heard.end()
            assert isinstance(told, Ended)
            answers.append(told.answer)
            while service._unsaved():
                time.sleep(0.01)
    return answers
