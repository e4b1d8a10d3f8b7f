"""Tokenizers out of GGUF metadata: the ids of seven real vocabularies, of tokenizers trained here with each way to cut
texts, of a brute force, and of llama.cpp itself where it is installed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from penstock.store.gguf.header import Value, read_gguf_header
from penstock.store.gguf.pretokenizers import PRE_TOKENIZERS
from penstock.store.gguf.tokenizer import text_files
from tests.cpu import gguf_files
from tests.cpu.gguf_files import SEEN

gguf = pytest.importorskip("gguf", reason="the package gguf, which writes GGUF, is not installed")

TEXTS = SEEN.parent
LINES = 10_000
# Beside real text, what the data has little of.
ODD = [
    "Ünïcödé ｆｕｌｌ ｗｉｄｔｈ", "  two  spaces\t\ttabs\r\n\r\nlines\n \n", "I'LL we'Ve they're 'tis it'd 'S",
    "½ ² ³ Ⅷ ٣٤٥ १२३",
    "1234567 3.14 1,000", "我在apple工作1314151天～ 가나다 ゟカタ", "x==y!=z && a||b <=> $5 + ^~`|", 
    "🚀 😶‍🌫️ ✅", "naïve ﬁne Ǆ ǅ ʰ",
    "camelCaseHTTPServer", "a/b//c\n/d", "…。，、।۔،", "́combining é", "　ideographic space", "   ", "\n", " ",
]  # fmt: skip


@cache
def lines(count: int = LINES) -> list[str]:
    """Lines of real text that are not empty. Skips where this machine has none."""
    files = [TEXTS / "wikitext2/wiki.test.raw", TEXTS / "wikitext2/wiki.valid.txt", TEXTS / "books/pg2591.txt"]
    if not all(file.is_file() for file in files):
        pytest.skip(f"{TEXTS} has no wikitext2 and no books on this machine")
    found = [line for file in files for line in file.read_text().split("\n") if line.strip()]
    return (ODD + found)[:count]


def core(metadata: dict[str, Value], name: str = "") -> Tokenizer:
    return Tokenizer.from_buffer(text_files(metadata, "test", name)["tokenizer.json"])


def ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [each.ids for each in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


@pytest.mark.parametrize("name", sorted(p.name for p in SEEN.glob("*.gguf")))
def test_seven_real_vocabularies(name: str) -> None:
    """Each with texts, and the ids that llama.cpp's project expects of them."""
    file = SEEN / name
    texts = Path(f"{file}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = [[int(i) for i in line.split()] for line in Path(f"{file}.out").read_text().split("\n")]
    assert len(texts) == len(expected) == 47
    assert ids(core(read_gguf_header(file).metadata), texts) == expected


def isolated(*patterns: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


def byte_level(cuts: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cuts)


BYTES, GPT2 = byte_level(False), byte_level(True)
HAN, DIGITS = "[一-龥ࠀ-一가-퟿]+", pre_tokenizers.Digits(individual_digits=True)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# How the tokenizer.json of a model of each kind cuts texts, in parts of the library where those have some. `True`: the
# model takes whole words that are entries.
AS_TRAINED: dict[str, tuple[list[Any], bool]] = {
    "gpt-2": ([GPT2], False),
    "llama-bpe": ([*isolated(WORDS % "{1,3}"), BYTES], True),
    "dbrx": ([*isolated(WORDS % "{1,3}"), BYTES], False),
    "qwen2": ([*isolated(WORDS % ""), BYTES], False),
    "tekken": ([*isolated(CASES % ("", "", "")), BYTES], True),
    "gpt-4o": ([*isolated(CASES % (ENDINGS, ENDINGS, "{1,3}")), BYTES], False),
    "starcoder": ([DIGITS, GPT2], False),
    "falcon": (
        [pre_tokenizers.Punctuation("contiguous"), GPT2, pre_tokenizers.Digits(), *isolated("[0-9][0-9][0-9]")], False,
    ),
    "deepseek-coder": ([*isolated(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN), DIGITS, BYTES], False),
    "deepseek-v3": (
        [
            *isolated(
                r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            BYTES,
        ],
        False,
    ),
    "bloom": ([*isolated(r" ?[^(\s|[.,!?…。，、।۔،])]+"), BYTES], False),
    "viking": ([*isolated(r" ?[^(\s|[.,!?…。，、।۔،])]+"), DIGITS, BYTES], False),
    "deepseek-llm": (
        [
            *isolated(
                r"[\r\n]", PRE_TOKENIZERS["deepseek-llm"].patterns[1], r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", HAN,
            ),
            DIGITS, BYTES,
        ],
        False,
    ),
    "default": ([*isolated(*PRE_TOKENIZERS["default"].patterns), BYTES], False),  # llama.cpp's fallback: no model's own
}  # fmt: skip


def metadata_of(trained: Tokenizer, pre: str, file: Path) -> dict[str, Value]:
    """What a converter writes of a byte-level BPE tokenizer, read back out of the file."""
    state = json.loads(trained.to_str())
    by_id = sorted(trained.get_vocab().items(), key=lambda each: each[1])
    special = {token["id"]: 3 if token["special"] else 4 for token in state["added_tokens"]}
    gguf_files.write(
        file,
        "llama",
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": [text for text, _ in by_id],
            "tokenizer.ggml.token_type": [special.get(i, 1) for _, i in by_id],
            "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
            "tokenizer.ggml.bos_token_id": trained.token_to_id("<s>"),
            "tokenizer.ggml.eos_token_id": trained.token_to_id("</s>"),
        },
        {},
    )
    return read_gguf_header(file).metadata


@cache
def trained_here(pre: str) -> Tokenizer:
    cuts, whole_words = AS_TRAINED[pre]
    trained = Tokenizer(models.BPE(ignore_merges=whole_words))
    trained.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    trained.train_from_iterator([*lines()[::7], *ODD * 3], trainer)
    trained.add_tokens(["<|user|>", "   "])
    return trained


@pytest.mark.parametrize("pre", AS_TRAINED)
def test_tokenizers_trained_here(tmp_path: Path, pre: str) -> None:
    """Ten thousand lines: the ids of a tokenizer with this kind's own cut, and those through a GGUF file."""
    trained = trained_here(pre)
    again = core(metadata_of(trained, pre, tmp_path / "a.gguf"))
    texts = [line[:160] for line in lines()]
    expected = ids(trained, texts)
    found = ids(again, texts)
    wrong = [(text, a, b) for text, a, b in zip(texts, expected, found, strict=True) if a != b]
    assert not wrong, wrong[:3]
    mixed = "a<|user|>b   c<s>"
    assert ids(again, [mixed]) == ids(trained, [mixed])


def test_every_kind_that_is_claimed_is_tested() -> None:
    assert set(PRE_TOKENIZERS.values()) == {PRE_TOKENIZERS[name] for name in AS_TRAINED}


def by_pattern(text: str, patterns: Sequence[str]) -> list[str]:
    """Cuts a text by the package `regex`, one pattern after the other."""
    pieces = [text]
    for pattern in patterns:
        cut: list[str] = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                if match.end() > match.start():
                    cut += [piece[at : match.start()], match[0]]
                    at = match.end()
            cut.append(piece[at:])
        pieces = [piece for piece in cut if piece]
    return pieces


@pytest.mark.parametrize("pre", sorted({kind: name for name, kind in PRE_TOKENIZERS.items()}.values()))
def test_cuts_are_those_of_another_library(pre: str) -> None:
    kind = PRE_TOKENIZERS[pre]
    cut = pre_tokenizers.Sequence(isolated(*kind.patterns))
    for text in [*ODD, *lines()[::20]]:
        found = [piece for piece, _ in cut.pre_tokenize_str(text)]
        assert found == by_pattern(text, kind.patterns), text


Vocabulary = dict[str, tuple[int, float]]


def by_scores(text: str, vocab: Vocabulary) -> list[int]:
    """SentencePiece's BPE by its definition: the highest score first, of equals the leftmost."""
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        found = [
            (-vocab[both][1], at) for at in range(len(pieces) - 1) if (both := pieces[at] + pieces[at + 1]) in vocab
        ]
        if not found:
            break
        at = min(found)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        i for p in pieces for i in ([vocab[p][0]] if p in vocab else [vocab[f"<0x{b:02X}>"][0] for b in p.encode()])
    ]


@cache
def llama_spm() -> tuple[Tokenizer, Vocabulary]:
    file = SEEN / "ggml-vocab-llama-spm.gguf"
    if not file.is_file():
        pytest.skip(f"{file} is not on this machine")
    metadata = read_gguf_header(file).metadata
    entries = zip(metadata["tokenizer.ggml.tokens"].texts(), metadata["tokenizer.ggml.scores"].tolist(), strict=True)
    return core(metadata), {text: (i, score) for i, (text, score) in enumerate(entries)}


def test_merges_by_score_are_those_of_a_brute_force() -> None:
    tokenizer, vocab = llama_spm()
    texts = [line[:150] for line in lines()[:1500]]
    assert ids(tokenizer, texts) == [by_scores(text, vocab) for text in texts]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.text("ab -=._\n\té", min_size=1, max_size=3), st.integers(1, 12)), max_size=4))
def test_merges_by_score_of_texts_that_repeat(pieces: list[tuple[str, int]]) -> None:
    tokenizer, vocab = llama_spm()
    text = "".join(piece * times for piece, times in pieces)
    assert ids(tokenizer, [text]) == [by_scores(text, vocab)]


HAS_LLAMA_CPP = pytest.mark.skipif(
    find_spec("llama_cpp") is None, reason="llama-cpp-python (extra bench) is not installed"
)


def by_llama_cpp(file: Path, texts: Sequence[str]) -> list[list[int]]:
    """Ids by llama.cpp. Special tokens in a text are tokens, as in `tokenizers`."""
    import llama_cpp

    theirs = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    return [theirs.tokenize(text.encode(), add_bos=False, special=True) for text in texts]


@HAS_LLAMA_CPP
@pytest.mark.parametrize("name", sorted(p.name for p in SEEN.glob("*.gguf")))
def test_llama_cpp_itself(name: str) -> None:
    """Ten thousand lines of each real vocabulary: the ids of the same file by llama.cpp."""
    expected = by_llama_cpp(SEEN / name, lines())
    found = ids(core(read_gguf_header(SEEN / name).metadata), lines())
    wrong = [each for each in zip(lines(), expected, found, strict=True) if each[1] != each[2]]
    assert not wrong, wrong[:3]


@HAS_LLAMA_CPP
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_llama_cpp_of_tokenizers_trained_here(tmp_path: Path, pre: str) -> None:
    """Ten thousand lines of every name that is claimed, with a vocabulary that was trained with its kind of cut."""
    kind = next(name for name in AS_TRAINED if PRE_TOKENIZERS[name] == PRE_TOKENIZERS[pre])
    metadata = metadata_of(trained_here(kind), pre, tmp_path / "a.gguf")
    texts = [line[:160] for line in lines()]
    expected, found = by_llama_cpp(tmp_path / "a.gguf", texts), ids(core(metadata), texts)
    wrong = [each for each in zip(texts, expected, found, strict=True) if each[1] != each[2]]
    assert not wrong, wrong[:3]
