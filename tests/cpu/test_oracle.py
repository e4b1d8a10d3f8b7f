"""The oracle is worth agreeing with: its models are alive, and each variant differs by what it is named for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.models import model_types
from tests.cpu.oracle import Oracle, prompt, save
from tests.cpu.variants import LONGEST_PROMPT, NEW_TOKENS, VARIANTS, Variant

BY_NAME = {variant.name: variant for variant in VARIANTS}


def load(variant: Variant, folder: Path) -> Oracle:
    save(variant, folder)
    return Oracle(folder)


def test_every_model_type_has_variants() -> None:
    assert {variant.model_type for variant in VARIANTS} == set(model_types())
    assert len(BY_NAME) == len(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_logits_spread_over_tokens_and_positions(variant: Variant, tmp_path: Path) -> None:
    oracle = load(variant, tmp_path)
    logits = oracle.logits(prompt(variant, LONGEST_PROMPT))
    assert logits.shape == (LONGEST_PROMPT, variant.vocab) and logits.dtype == np.float32
    # Wide enough that an error shows, narrow enough that float32's own stays far below 1e-3.
    assert 0.8 < logits.std() < 8 and logits.std(axis=0).mean() > 0.5
    # With and without a KV cache transformers says the same.
    steps = oracle.greedy(prompt(variant, 17), NEW_TOKENS)
    assert len(steps) == NEW_TOKENS and len({token for token, _ in steps}) > 3
    ids = prompt(variant, 17) + [token for token, _ in steps]
    best = oracle.logits(ids)[16:-1].argmax(axis=1)
    assert all(best[i] == token for i, (token, margin) in enumerate(steps) if margin > 2e-3)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama-gqa", {"rope_theta": 500.0}),
        ("llama-gqa", {"hidden_act": "gelu"}),
        ("llama-gelu", {"hidden_act": "gelu_new"}),
        ("llama-gelu", {"hidden_act": "quick_gelu"}),
        ("llama-llama3-rope", {"rope_scaling": None}),
        ("llama-linear-rope", {"rope_scaling": None}),
        ("mistral-window", {"sliding_window": 25}),
        ("qwen2-late-window", {"max_window_layers": 2}),
        ("qwen2-yarn", {"rope_scaling": None}),
        ("qwen3-biases", {"sliding_window": None, "use_sliding_window": False, "layer_types": None}),
        ("opt-post-norm", {"do_layer_norm_before": True}),
        ("gemma2", {"attn_logit_softcapping": 50.0}),
        ("gemma2", {"final_logit_softcapping": 30.0}),
        ("gemma2", {"query_pre_attn_scalar": 32}),
        ("gemma3-text", {"rope_local_base_freq": 200.0}),
        ("gemma3-text", {"rope_theta": 500.0}),
        ("gemma3-text", {"sliding_window": 25}),
        ("gemma3-text", {"query_pre_attn_scalar": 32}),
        ("gemma3-text-caps", {"rope_scaling": None}),
        ("smollm3", {"no_rope_layer_interval": 5}),
        ("gpt-oss", {"sliding_window": 25}),
        ("gpt-oss", {"swiglu_limit": 7.5}),
        ("gpt-oss", {"num_experts_per_tok": 3}),
        ("gpt-oss", {"rope_scaling": None}),
        ("phi3-window", {"sliding_window": None}),
        ("phi3-partial", {"partial_rotary_factor": 1.0}),
        ("phi3-longrope-short", {"original_max_position_embeddings": 290}),
        ("phi3-longrope-long", {"original_max_position_embeddings": 310}),
    ],
)
def test_what_a_variant_is_named_for_shows_in_its_logits(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """The same weights with one key changed give other logits, by twice the tolerance of the comparison."""
    variant, ids = BY_NAME[name], prompt(BY_NAME[name], LONGEST_PROMPT)
    as_is = load(variant, tmp_path / "a").logits(ids)
    changed = load(replace(variant, keys=variant.keys | keys), tmp_path / "b").logits(ids)
    assert np.abs(as_is - changed).max() > 2e-3
