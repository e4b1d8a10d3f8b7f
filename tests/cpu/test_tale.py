"""The trained ReLU models in bench/: they run, say what transformers says, and have learnt something."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.tale_sparsity import live_neurons
from penstock.serve.evaluate import evaluate
from penstock.spec.format import FLOAT32, parse_format
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from tests.cpu.commands import ROOT, here, machine_cache
from tests.cpu.engines import load
from tests.cpu.oracle import Oracle

TALES = ("tale-opt", "tale-relu")
# In the style of the books that they read, but of none of them.
TEXT = """The captain looked out over the sea, and for a long time he said nothing. "We must go back to the ship," he
said at last, "before the night comes upon us." I did not answer him, for I had seen the face of the man who stood
behind the rocks, and I knew that we should not be permitted to return.
"""
# A model that knows only how often each token occurs has 780 on held-out text, which these texts are easier than.
MOST_PERPLEXITY = 150
MOST_LIVE = 0.5  # of all neurons, for random tokens


@pytest.fixture(params=TALES)
def tale(request: pytest.FixtureRequest) -> Path:
    return ROOT / "bench" / str(request.param)


def test_its_sizes_are_as_sparse_kernels_want_them(tale: Path, tmp_path: Path) -> None:
    packed = open_packed(pack(tale, tmp_path / "packed"))
    assert packed.spec.d_model % 256 == 0
    assert all(
        ffn.activation == "relu" and ffn.neurons % 256 == 0 for layer in packed.spec.layers for ffn in layer.ffns
    )
    assert (tale / "model.safetensors").stat().st_size <= 16_000_000


def test_it_says_what_transformers_says_and_has_learnt(tale: Path, tmp_path: Path) -> None:
    oracle = Oracle(tale)
    with load(pack(tale, tmp_path / "packed", FLOAT32), score=True, context=512, kv="float32") as engine:
        ids = engine.tokenizer.encode(TEXT)
        np.testing.assert_allclose(engine.logits(ids), oracle.logits(ids), atol=1e-4)
        assert evaluate(engine, TEXT).perplexity < MOST_PERPLEXITY


def test_most_of_its_neurons_are_silent_and_they_are_those_of_transformers(tale: Path, tmp_path: Path) -> None:
    oracle = Oracle(tale)
    packed = open_packed(pack(tale, tmp_path / "packed", FLOAT32))
    ids = np.random.default_rng(0).integers(2, packed.spec.vocab, 200, np.int32)
    above: list[np.ndarray] = []
    fire = [m for name, m in oracle.model.named_modules() if name.endswith(("gate_proj", "fc1"))]
    hooks = [m.register_forward_hook(lambda _, __, product: above.append((product > 0).numpy())) for m in fire]
    oracle.logits(ids.tolist())
    for hook in hooks:
        hook.remove()
    found = live_neurons(packed, [ids])
    assert len(found) == len(above) == len(packed.spec.layers)
    for ours, theirs in zip(found, above, strict=True):
        assert (ours != theirs.reshape(ours.shape)).mean() < 1e-4
    assert np.mean([layer.mean() for layer in found]) < MOST_LIVE


def test_it_runs(tale: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack(tale, tmp_path / "packed", parse_format("int4"))
    cache = machine_cache(tmp_path / "cache")
    flags = ("--cache", cache, "--json", "--max-tokens", 8, "--threads", 1)
    ran = here(capsys, "run", tmp_path / "packed", "Once upon a time", *flags)
    assert ran.code == 0, ran
