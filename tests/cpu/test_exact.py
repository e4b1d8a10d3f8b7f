"""The engine says what transformers says: every model type, odd shapes, prompts of 1, 17 and 300 tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tokenizers import Tokenizer

from penstock.kernels import cpu
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.store.pack import pack
from tests.cpu.near_ties import choosing, heard
from tests.cpu.oracle import Oracle, prompt, save
from tests.cpu.variants import CONTEXT, LONGEST_PROMPT, NEW_TOKENS, VARIANTS, Variant
from tests.pure.machine import MACHINE as WITH_GPU

TOLERANCE = 1e-3

# Where the two best logits differ by less, either is right.
CLEAR_MARGIN = 2e-3

MACHINE = replace(WITH_GPU, tiers=tuple(tier for tier in WITH_GPU.tiers if not tier.name.startswith("gpu")))
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
STORIES = Path(__file__).resolve().parents[3] / "shared" / "models" / "stories-260k"


class Subject(NamedTuple):
    variant: Variant
    oracle: Oracle
    packed: Path


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.name)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp(request.param.name)
    save(request.param, folder / "hf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no tensor of a checkpoint as transformers saves it is strange to us
        if request.param.model_type == "gemma3":  # what sees pictures is left out
            warnings.filterwarnings("ignore", r".* tensors are not used: 'multi_modal_projector")
        pack(folder / "hf", folder / "packed")
    yield Subject(request.param, Oracle(folder / "hf"), folder / "packed")


@pytest.mark.parametrize("kernels", [*cpu.available(), "reference"])
def test_logits_are_those_of_transformers(subject: Subject, kernels: str) -> None:
    ask = Ask(prompt_tokens=LONGEST_PROMPT, output_tokens=1, context=CONTEXT, score=True)
    with closing(Engine.load(subject.packed, ask, Loading(machine=MACHINE, kernels=kernels))) as engine:
        for length in subject.variant.prompts:
            ids = prompt(subject.variant, length)
            found, expected = engine.logits(ids), subject.oracle.logits(ids)
            assert found.shape == expected.shape and found.dtype == np.float32
            if engine.packed.spec.is_routed and np.abs(found - expected).max() > TOLERANCE:
                with heard(engine) as said:
                    assert np.array_equal(engine.logits(ids), found)
                with choosing(subject.oracle.model, said):
                    expected = subject.oracle.logits(ids)
            assert np.abs(found - expected).max() <= TOLERANCE, f"prompt of {length} tokens"


@pytest.mark.thinned(3)
def test_greedy_answers_are_those_of_transformers(subject: Subject) -> None:
    ask = Ask(prompt_tokens=LONGEST_PROMPT, output_tokens=NEW_TOKENS, context=CONTEXT)
    with closing(Engine.load(subject.packed, ask, Loading(machine=MACHINE))) as engine:
        for length in subject.variant.prompts:
            ids = prompt(subject.variant, length)
            found, expected = engine.generate_ids(ids, GREEDY), subject.oracle.greedy(ids, NEW_TOKENS)
            assert len(found) == NEW_TOKENS
            if engine.packed.spec.is_routed and not _agree(found, expected):
                with heard(engine) as said:
                    assert engine.generate_ids(ids, GREEDY) == found
                with choosing(subject.oracle.model, said):
                    expected = subject.oracle.greedy(ids, NEW_TOKENS)
            assert _agree(found, expected), f"prompt of {length} tokens"


def _agree(found: list[int], expected: list[tuple[int, float]]) -> bool:
    """Up to the first token of which either of two is right."""
    unclear = next((i for i, (_, margin) in enumerate(expected) if margin <= CLEAR_MARGIN), NEW_TOKENS)
    return found[:unclear] == [token for token, _ in expected[:unclear]]


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs shared/models/stories-260k beside the repository")
def test_a_trained_model_tells_its_story(tmp_path: Path) -> None:
    pack(STORIES, tmp_path / "packed")
    tokenizer = Tokenizer.from_file(str(STORIES / "tokenizer.json"))
    ids = tokenizer.encode("Once upon a time").ids
    ask = Ask(prompt_tokens=len(ids), output_tokens=NEW_TOKENS)
    with closing(Engine.load(tmp_path / "packed", ask, Loading(machine=MACHINE))) as engine:
        text = tokenizer.decode(ids + engine.generate_ids(ids, GREEDY))
    expected = ", there was a little girl named Lily. She loved to play outside in the park."
    assert text.startswith("Once upon a time" + expected)
