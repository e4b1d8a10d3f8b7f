"""Tokenizers that want all time or memory end in one line, within the limits; large honest ones and long texts work."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.serve.tokenizer import Tokenizer
from penstock.store.packed import TOKENIZER_PEAK
from tests.cpu.hostile import MIB, checkpoint, refused, tokenizer_files, within_limits
from tests.cpu.test_tokenizer import build
from tests.cpu.warm import Taken, Warm

PLAIN: dict[str, Any] = tokenizer_files()["tokenizer.json"]
EVERY = {"Regex": "(?m:.)|\\n"}  # each character, so that any text brings it out


def spoilt(**parts: Any) -> dict[str, Any]:
    """The byte tokenizer with other parts."""
    return {**copy.deepcopy(PLAIN), **parts}


def model(**fields: Any) -> dict[str, Any]:
    return spoilt(model={**PLAIN["model"], **fields})


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def in_turn(kind: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(parts)}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


DOUBLED = [replace(EVERY, "ab")] * 40
SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": True}

# Content of tokenizer.json → what the line says.
ATTACKS: dict[str, tuple[Any, str]] = {
    "normaliser that doubles": (spoilt(normalizer=in_turn("normalizers", *DOUBLED)), "encoding a text with it takes"),
    "normaliser with a long content": (spoilt(normalizer=replace(EVERY, "a" * 10**6)), "encoding a text with it takes"),
    "normaliser between characters": (spoilt(normalizer=replace({"Regex": ""}, "x" * 10**6)), "encoding a text with"),
    "pattern that backtracks": (spoilt(normalizer=replace({"Regex": "(x|x|x|xx)+y"}, "")), "encoding a text with it"),
    "pattern that nests": (spoilt(pre_tokenizer=split("(" * 20_000 + "a" + ")" * 20_000)), "is not a tokenizer"),
    "pattern that repeats": (
        spoilt(pre_tokenizer=split("((((x{1,999}){1,999}){1,999}){1,999}){1,999}y")),
        "encoding a text with it",
    ),
    "bytes of bytes": (
        spoilt(pre_tokenizer=in_turn("pretokenizers", *[{**PLAIN["pre_tokenizer"], "add_prefix_space": True}] * 200)),
        "encoding a text with it takes",
    ),
    "post-processor": (
        spoilt(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 10**5,
                "pair": [],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1] * 10**4, "tokens": ["<s>"] * 10**4}},
            }
        ),
        "encoding a text with it takes",
    ),
    "decoder that doubles": (spoilt(decoder=in_turn("decoders", *DOUBLED)), "decoding an answer with it takes"),
    "decoder with a long content": (spoilt(decoder=replace(EVERY, "a" * 10**6)), "decoding an answer with it gives"),
    "charsmap that is none": (
        spoilt(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "tokenizer.json: opening it fails",
    ),
    "charsmap that promises 4 GiB": (
        spoilt(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAAAAAA"}),
        "tokenizer.json: opening it takes more than 128 MiB of memory",
    ),
    "charsmap that leads outside": (
        spoilt(normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AAAAA"}),
        "encoding a text with it fails",
    ),
    "steps of nothing": (spoilt(pre_tokenizer={"type": "FixedLength", "length": 0}), "encoding a text with it fails"),
    "no unknown token": (
        spoilt(model={"type": "WordLevel", "vocab": {"a": 1}, "unk_token": "b"}),
        "encoding a text with it fails",
    ),
    "id below zero": (model(vocab={"a": -1}), "is not a tokenizer"),
    "merges of nothing": (model(merges=["x y"] * 9), "is not a tokenizer"),
    "unknown id beyond": (
        spoilt(model={"type": "Unigram", "unk_id": 10**9, "vocab": [["a", 0.0]]}),
        "is not a tokenizer",
    ),
    "parts within parts": (
        '{"version": "1.0", "normalizer": ' + '{"type": "Sequence", "normalizers": [' * 5000 + "]}" * 5000 + "}",
        "is not a tokenizer",
    ),
    "lists within lists": ("[" * 10**6 + "]" * 10**6, "is not a tokenizer"),
    "objects within objects": ('{"a": ' * 10**6 + "1" + "}" * 10**6, "is not a tokenizer"),
}
# Odd, and yet they answer: ids far apart, alike or huge, empty tokens, sizes that make no sense.
ODD: dict[str, Any] = {
    "huge ids": model(vocab={character: 2**32 - 1 - i for character, i in PLAIN["model"]["vocab"].items()}),
    "one id for all": model(vocab=dict.fromkeys(PLAIN["model"]["vocab"], 7)),
    "nested twice": spoilt(normalizer=in_turn("normalizers", in_turn("normalizers", in_turn("normalizers")))),
    "added of no length": spoilt(added_tokens=[{"id": 256, "content": "", **SPECIAL}]),
    "added by the thousand": spoilt(
        added_tokens=[{"id": 256 + i, "content": f"<{i}>", **SPECIAL} for i in range(20_000)]
    ),
    "padded to 10^12": spoilt(
        padding={
            "strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": 10**9, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "x",
        }
    ),
    "cut to nothing": spoilt(
        truncation={"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 10**9}
    ),
    "stripped for ever": spoilt(decoder={"type": "Strip", "content": "x", "start": 10**18, "stop": 10**18}),
}  # fmt: skip
SIDE_FILES = {
    "tokenizer_config_json": ("[]", "tokenizer_config.json should hold a JSON object"),
    "special_tokens_map_json": ("[" * 10**6, "special_tokens_map.json is not JSON: it nests too deep"),
    "generation_config_json": ({"eos_token_id": list(range(10**6))}, "opening it gives more than 1.00 MiB"),
}


@pytest.fixture
def run(warm: Warm, hostile_weights: Path, cache: Path, tmp_path: Path) -> Callable[..., tuple[Taken, Path]]:
    """`penstock run` of a checkpoint with these files: what it took, and the folder."""

    def call(*arguments: object, **files: Any) -> tuple[Taken, Path]:
        folder = checkpoint(tmp_path / "model", hostile_weights, **files)
        text = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
        return warm.run("run", folder, text, "--max-tokens", 4, "--cache", cache, *arguments), folder

    return call


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(run: Callable[..., tuple[Taken, Path]], name: str) -> None:
    content, says = ATTACKS[name]
    refused(*run(tokenizer_json=content), "tokenizer.json", says)


@pytest.mark.parametrize("name", SIDE_FILES)
def test_files_beside_it(run: Callable[..., tuple[Taken, Path]], name: str) -> None:
    content, says = SIDE_FILES[name]
    refused(*run(**{name: content}), says)


def test_a_file_that_takes_24_times_its_size(run: Callable[..., tuple[Taken, Path]]) -> None:
    taken, folder = run(tokenizer_config_json='{"x": [' + "{}," * 3_000_000 + "{}]}")
    assert taken.code == 0, taken
    within_limits(taken, folder)


@pytest.mark.parametrize("name", ODD)
def test_odd_ones_answer_or_refuse(run: Callable[..., tuple[Taken, Path]], name: str) -> None:
    taken, folder = run(tokenizer_json=ODD[name])
    if taken.code:
        refused(taken, folder)
    within_limits(taken, folder)


def test_host_memory_counts_the_child(run: Callable[..., tuple[Taken, Path]]) -> None:
    """Under a limit the child has what is left of it, and no 128 MiB."""
    limit = 160 * MIB
    taken, folder = run("--host-memory", limit, tokenizer_json=ATTACKS["normaliser that doubles"][0])
    refused(taken, folder, "takes more than", "of memory, all that --host-memory leaves it")
    assert taken.peak_bytes <= limit
    assert taken.peak_bytes < 128 * MIB


# --- one that is mutated ---------------------------------------------------------------------------------------------

KINDS = ["byte-level", "byte-fallback", "wordpiece"]
ATOMS = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**32,
        10**20,
        1e308,
        "",
        "a",
        "\x00",
        "é" * 500,
        [],
        {},
        [[]],
        ["a", "b"],
        "Sequence",
    ]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value but within vocabularies, which are most of it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path]
    for key, child in inside:
        found += [(*path, key)] if path[-1:] == ("vocab",) and key != "a" else places(child, (*path, key))
    return found


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_mutated(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    content = json.loads(build(kind).to_str())
    for _ in range(data.draw(st.integers(1, 3))):
        *above, last = data.draw(st.sampled_from(places(content)[1:]))
        target = content
        for key in above:
            target = target[key]
        if data.draw(st.booleans()) and isinstance(target, dict):
            del target[last]
        else:
            target[last] = data.draw(ATOMS)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    try:
        tokenizer = Tokenizer.open(tmp_path)
        ids = tokenizer.encode("ab é <think> 中 <|end|>")
        tokenizer.decode(ids)
        stream = tokenizer.stream()
        for token in [*ids, 0, 10**6]:
            stream.take(token)
            stream.text()
        stream.finish()
        tokenizer.close()
    except PenstockError as error:
        assert error.exit_code == 2, error.message
        assert "\n" not in error.message


# --- honest ones -----------------------------------------------------------------------------------------------------


def large(entries: int) -> dict[str, Any]:
    """A byte-level BPE tokenizer of so many entries, each made of two before it."""
    chance = random.Random(1)
    vocab, merges = dict(PLAIN["model"]["vocab"]), []
    pieces = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    while len(vocab) < entries:
        pair = [pieces[int(chance.random() ** 2 * len(pieces))] for _ in range(2)]
        if len(pair[0] + pair[1]) <= 12 and pair[0] + pair[1] not in vocab:
            vocab[pair[0] + pair[1]] = len(vocab)
            merges.append(pair)
            pieces.append(pair[0] + pair[1])
    return spoilt(added_tokens=[], model={**PLAIN["model"], "vocab": vocab, "merges": merges})


def test_128_k_entries(tmp_path: Path) -> None:
    content = large(128_000)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=1))
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.size == 128_000
    text = "the quick brown fox jumps over the lazy dog " * 25_000
    assert len(text) > 10**6
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    nbytes = (tmp_path / "tokenizer.json").stat().st_size
    assert tokenizer.peak_bytes < 24 * MIB + TOKENIZER_PEAK * nbytes + 256 * len(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_megabyte_of_text_has_the_ids_that_the_library_gives(tmp_path: Path, kind: str) -> None:
    core = build(kind)
    core.save(str(tmp_path / "tokenizer.json"))
    text = "abc é中 <think> fgh\n<|end|>  aab " * 32_000
    assert len(text.encode()) > 10**6
    assert Tokenizer.open(tmp_path).encode(text) == core.encode(text).ids
