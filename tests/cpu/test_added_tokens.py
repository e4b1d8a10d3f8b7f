"""Added tokens that tokenizer.json and the files beside it tell differently: ids and texts as transformers has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core
from transformers import AutoTokenizer

from penstock.serve.vocabulary import Vocabulary

TEXTS = ("ab <|X|> cd <y>e <z>f", "<|X|><y>", "q<z> <y> y", " <|X|>  <z> ")
X, Y, Z = 256, 257, 258


def entry(text: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": text, **plain, **flags}


CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "spaces": {"added_tokens_decoder": {str(Y): entry("<y>", lstrip=True, rstrip=True, special=True)}},
    "special after all": {"added_tokens_decoder": {str(Z): entry("<z>", special=True)}},
    "special no more": {"added_tokens_decoder": {str(Y): entry("<y>")}},
    "another one": {"added_tokens_decoder": {"259": entry("cd", special=True)}},
    "named": {"bos_token": "<y>", "added_tokens_decoder": {str(Y): entry("<y>", rstrip=True)}},
    "named alone": {"bos_token": "<|X|>", "eos_token": {"__type": "AddedToken", **entry("<y>", special=True)}},
    "in a list": {"additional_special_tokens": ["<|X|>", "<y>", "q"]},
    "by other names": {"extra_special_tokens": {"foo_token": "<z>"}},
}


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    words = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Core(models.BPE(words, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([
        AddedToken("<|X|>", special=True, rstrip=True), AddedToken("<y>", special=True), AddedToken("<z>"),
    ])  # fmt: skip
    core.save(str(tmp_path / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, CASES[name])
    here, there = Vocabulary.open(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = there(text, add_special_tokens=False)["input_ids"]
        assert here.encode(text, add_special=False) == ids
        for skip in (True, False):
            assert here.decode(ids, skip) == there.decode(ids, skip_special_tokens=skip)


GARBAGE: tuple[Any, ...] = (
    [], 7, {"a": entry("<q>")}, {"1": 2}, {"259": {"content": 7}}, {"9" * 30: entry("<q>")}, {"400": entry("<q>")},
    {"259": {"content": ""}}, {"²": entry("<q>")}, {"259": {"content": "<y>", "lstrip": "yes"}},
)  # fmt: skip


@pytest.mark.parametrize("given", GARBAGE)
def test_what_is_no_token_is_left_out(given: Any, tmp_path: Path) -> None:
    """Nor is one whose id is not the next."""
    folder = folder_of(tmp_path, {"added_tokens_decoder": given, "additional_special_tokens": [7, {}, "<nowhere>"]})
    assert Vocabulary.open(folder).facts["size"] == 259
