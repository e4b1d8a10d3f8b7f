"""`tests.beside_transformers` itself: narrow cases give the numbers of transformers, and it sees what differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.models import model_types, spec_from_config
from tests.beside_transformers import __main__ as beside
from tests.beside_transformers import keys
from tests.beside_transformers.draws import VOCABULARY, Case, draw
from tests.beside_transformers.shapes import NAMES, config_of
from tests.cpu.variants import VARIANTS

WIDTHS = {
    "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
PLAIN = Case(3, "llama-3.2-1b", {"model_type": "llama", **WIDTHS}, "bfloat16", True, "", 1, False)
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
LINEAR = {"rope_scaling": {"type": "linear", "factor": 2.0}}
CASES = {
    "in three files": replace(PLAIN, files=3, config=PLAIN.config | LINEAR),
    "as transformers writes it": replace(PLAIN, as_published=False, dtype="float32"),
    "gptq": replace(PLAIN, quantised="gptq-act-order", dtype="float16"),
    "stacked": replace(
        PLAIN, config={**WIDTHS, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 6}, stacked=True
    ),
    "mxfp4": replace(
        PLAIN, quantised="mxfp4", config={**WIDTHS, **EXPERTS, "model_type": "gpt_oss", "num_local_experts": 5}
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(beside, "PROMPTS", (1, 70))
    yield


@pytest.mark.parametrize("name", CASES)
def test_a_folder_gives_the_numbers_of_transformers(name: str, tmp_path: Path) -> None:
    found, largest = beside.differences(CASES[name], tmp_path)
    assert not found and 0 < largest["exact"] < 3e-5


def test_another_number_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = beside.answers

    def wrong(*args: Any) -> Any:
        return answers(*args) + (len(args[1]) > 10)

    monkeypatch.setattr(beside, "answers", wrong)
    found, _ = beside.differences(PLAIN, tmp_path)
    assert found and all("after 70" in each for each in found)


def test_cases_have_every_type_that_runs() -> None:
    cases = [draw(number) for number in range(2 * len(NAMES))]
    assert {case.shape for case in cases} == set(NAMES)
    # Gemma 3 with pictures has the text model of gemma3_text.
    assert {case.config["model_type"] for case in cases} == set(model_types()) - {"gemma3"}
    for case in cases:
        assert case.config["hidden_size"] == config_of(case.shape)["hidden_size"]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_key_that_is_passed_over_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(config: dict[str, Any], where: str) -> Any:
        return spec_from_config({key: each for key, each in config.items() if key != "hidden_act"}, where)

    assert VARIANTS[0].model_type == "llama"
    monkeypatch.setattr(keys, "spec_from_config", forgetful)
    told = list(keys.passed_over(VARIANTS[0]))
    assert told and all(each.startswith("hidden_act 'silu' → ") for each in told)
