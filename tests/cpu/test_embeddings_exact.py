"""Embeddings are the last hidden states of transformers, pooled: resident and streamed, several kinds of models."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.serve.pooling import POOLS, Pooling
from penstock.serve.service import Service
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from tests.cpu.engines import load
from tests.cpu.oracle import Oracle, prompt, save
from tests.cpu.services import plans
from tests.cpu.variants import VARIANTS

NAMED = {variant.name: variant for variant in VARIANTS}
# opt-post-norm projects its output, as OPT-350m does.
CHOSEN = ("llama-gqa", "opt-post-norm", "gemma3-text", "opt-no-final-norm", "qwen3-moe")


def by_transformers(oracle: Oracle, ids: list[int], pool: str) -> NDArray[np.float32]:
    """float32 [D]: the last hidden state, as every decoder of transformers gives it."""
    with torch.inference_mode():
        hidden = oracle.model.get_decoder()(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    return (hidden[-1] if pool == "last" else hidden.mean(dim=0)).numpy()


@pytest.mark.parametrize("name", CHOSEN)
def test_they_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    save(NAMED[name], tmp_path / "hf")
    oracle = Oracle(tmp_path / "hf")
    pack(tmp_path / "hf", tmp_path / "packed")
    packed = open_packed(tmp_path / "packed")
    for plan in plans(tmp_path / "packed").values() if name == "llama-gqa" else [None]:
        with load(tmp_path / "packed", plan=plan, context=400 if plan is None else None) as engine:
            lengths = (1, 17, 60) if plan is not None else (1, 17, 300)
            given = [prompt(NAMED[name], length) for length in lengths]
            with closing(Service.of_whole_answers(engine)) as service:
                for pool in POOLS:
                    for ids, answer in zip(given, service.generate(given, Pooling(pool)), strict=True):
                        expected = by_transformers(oracle, ids, pool)
                        assert answer.embedding is not None and answer.embedding.shape == expected.shape
                        assert answer.output_tokens == 0 and expected.shape == (packed.spec.d_embed,)
                        assert np.abs(answer.embedding - expected).max() <= 1e-3, (pool, len(ids))
