"""The oracle follows our choice of experts where scores nearly tie, and nowhere else."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.spec.ask import Ask
from penstock.store.pack import pack
from tests.cpu.near_ties import choosing, heard
from tests.cpu.oracle import Oracle, prompt, save
from tests.cpu.test_exact import MACHINE, TOLERANCE
from tests.cpu.variants import CONTEXT, LONGEST_PROMPT, VARIANTS

BY_NAME = {variant.name: variant for variant in VARIANTS}


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe-normalised", "olmoe", "glm4-moe", "glm4-moe-raw"])
def test_near_ties_go_to_our_choice(name: str, tmp_path: Path) -> None:
    """Of two experts with the same scores we take the lower. The oracle's differ by some 1e-6, then by far more."""
    variant = BY_NAME[name]
    save(variant, tmp_path / "hf")
    oracle = Oracle(tmp_path / "hf")
    _scale(oracle, 1)
    for gate in _gates(oracle):
        if hasattr(gate, "e_score_correction_bias"):
            gate.e_score_correction_bias[1] = gate.e_score_correction_bias[0]
    oracle.model.save_pretrained(tmp_path / "tied")
    pack(tmp_path / "tied", tmp_path / "packed")
    ids = prompt(variant, LONGEST_PROMPT)
    ask = Ask(prompt_tokens=LONGEST_PROMPT, output_tokens=1, context=CONTEXT, score=True)
    with closing(Engine.load(tmp_path / "packed", ask, Loading(machine=MACHINE))) as engine, heard(engine) as said:
        ours = engine.logits(ids)
    assert all(len(rows) == LONGEST_PROMPT for rows in said.values())
    assert len(said) == len(_gates(oracle))

    _scale(oracle, 1 + 1e-6)
    assert np.abs(oracle.logits(ids) - ours).max() > TOLERANCE
    with choosing(oracle.model, said) as forced:
        assert np.abs(oracle.logits(ids) - ours).max() <= TOLERANCE
    assert forced and {layer for layer, _ in forced} <= said.keys()

    _scale(oracle, 1.1)
    with choosing(oracle.model, said):
        assert np.abs(oracle.logits(ids) - ours).max() > TOLERANCE


def _gates(oracle: Oracle) -> list[Any]:
    return [layer.mlp.gate for layer in oracle.model.model.layers if hasattr(layer.mlp, "gate")]


def _scale(oracle: Oracle, by: float) -> None:
    """Makes the logits of expert 1 those of expert 0 times `by`."""
    with torch.no_grad():
        for gate in _gates(oracle):
            gate.weight[1] = gate.weight[0] * by
