"""Workers of benches on shapes other than the benches' own."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from bench.peers.ours import ATTENDED, Attention
from penstock.store.packed import open_packed
from tests.cpu.engines import make_model


@pytest.mark.parametrize("model", ["llama", "opt"])
@pytest.mark.parametrize("kv", ATTENDED)
def test_attention_over_more_than_a_model_has_positions(model: str, kv: str, tmp_path: Path) -> None:
    packed = open_packed(make_model(tmp_path, model, "int4"))
    tokens = packed.spec.max_positions + 64
    with closing(Attention(packed.spec, packed.weights, 1, tokens, kv, None)) as attention:
        assert attention.measure()["bytes"] > 0
