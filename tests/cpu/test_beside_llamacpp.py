"""`tests.beside_llamacpp` itself: narrow cases give llama.cpp's numbers, and it sees what differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python (extra bench) is not installed")
pytest.importorskip("gguf", reason="the package gguf, which writes GGUF, is not installed")

from tests.beside_llamacpp import __main__ as beside
from tests.beside_llamacpp.draws import SHAPES, VOCABULARY, Case, Shape, draw

NARROW = Shape("narrow", "llama", 256, 512, 4, 2, 64)
KEYS = {
    "block_count": 2, "context_length": 4096, "embedding_length": 256, "feed_forward_length": 512,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
PLAIN = Case(
    3, NARROW, 2, KEYS, "", (), tied=False, mix="q4_k_m", pure=False, overrides=(), alignment=32,
    shuffled=False, files=1,
)  # fmt: skip
CASES = {
    "split, aligned": replace(PLAIN, files=2, alignment=4096, shuffled=True, overrides=(("attn_v", "q8_0"),)),
    "biases of q, k and v alone": replace(PLAIN, biases=("attn_q", "attn_k", "attn_v"), mix="q8_0"),
    "divisors behind a factor": replace(PLAIN, rope="divisors", keys=KEYS | {"rope.scaling.factor": 4.0}),
    "a factor of 0": replace(PLAIN, keys=KEYS | {"rope.scaling.factor": 0.0}, tied=True, mix="iq4_xs"),
    "q, k and v in one tensor": replace(PLAIN, fused=True, biases=("attn_q", "attn_k", "attn_v", "attn_output")),
    "a bias of o alone": replace(PLAIN, biases=("attn_output",), mix="q8_0"),
    "yarn with a factor on cos and sin": replace(PLAIN, keys=KEYS | YARN | {"rope.scaling.attn_factor": 1.3}),
    "yarn without a factor": replace(PLAIN, keys=KEYS | {"rope.scaling.type": "yarn"}, mix="q6_k"),
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(beside, "PROMPTS", (1, 70))
    yield


@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_the_numbers_of_llama_cpp(name: str, tmp_path: Path) -> None:
    found, largest = beside.differences(CASES[name], tmp_path)
    assert not found and 0 < largest["exact"] < 1e-5 < largest["llama.cpp"]


def test_another_number_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = beside.answers

    def wrong(*args: Any) -> Any:
        return answers(*args) + (len(args[1]) > 10)

    monkeypatch.setattr(beside, "answers", wrong)
    found, _ = beside.differences(PLAIN, tmp_path)
    assert found and all("after 70" in each for each in found)


def test_cases_have_every_architecture_and_what_it_needs() -> None:
    cases = [draw(number) for number in range(2 * len(SHAPES))]
    assert {case.shape for case in cases} == set(SHAPES)
    for case in cases:
        assert case.layers <= case.shape.layers and case.keys.get("vocab_size", VOCABULARY) == VOCABULARY
