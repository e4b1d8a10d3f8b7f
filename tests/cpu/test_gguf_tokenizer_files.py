"""Tokenizers of GGUF files on their way into the child, and files whose tokenizers are damaged."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from penstock.errors import BrokenModel, UnsupportedModel
from penstock.serve.tokenizer import Tokenizer as Confined
from penstock.store.gguf import tokenizer
from penstock.store.gguf.header import Value, read_gguf_header
from penstock.store.gguf.tokenizer import text_files
from tests.cpu import gguf_files
from tests.cpu.gguf_files import SEEN


def small(**changes: Any) -> dict[str, Value]:
    """Metadata of a little byte-level vocabulary, as a header has it."""
    from penstock.store.gguf.header import Strings

    def strings(texts: list[str]) -> Strings:
        return Strings(b"".join(map(gguf_files.string, texts)), len(texts), "test: string")

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "<s>", "</s>", "<|im_end|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": array("i", [1] * 258 + [3] * 3), 
        "tokenizer.ggml.merges": ["a b", "ab c", "x y", "q"],
        "tokenizer.ggml.bos_token_id": 258, "tokenizer.ggml.eos_token_id": 259,
        **{f"tokenizer.ggml.{key}" if "." not in key else key: value for key, value in changes.items()},
    }  # fmt: skip
    return {k: strings(v) if isinstance(v, list) else v for k, v in metadata.items() if v is not None}


def opened(folder: Path, metadata: dict[str, Value]) -> Confined:
    for name, content in {**text_files(metadata, "test"), "config.json": b"{}"}.items():
        (folder / name).write_bytes(content)
    return Confined.open(folder)


def test_special_tokens_and_templates_reach_the_child(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}<|im_end|>{{ m.content }}{% endfor %}"
    metadata = small(add_bos_token=True, **{"tokenizer.chat_template": template})
    tokenizer = opened(tmp_path, metadata)
    try:
        assert tokenizer.encode("abc") == [258, 257] and tokenizer.encode("abc", add_special=False) == [257]
        assert tokenizer.bos == 258 and tokenizer.eos_ids == {259, 260}
        assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]) == [258, 260, 256]
        assert tokenizer.decode([258, 257, 259]) == "abc"
    finally:
        tokenizer.close()


def test_several_templates(tmp_path: Path) -> None:
    metadata = small(**{"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"})
    tokenizer = opened(tmp_path, metadata)
    try:
        assert tokenizer.chat([{"role": "user", "content": "x"}]) == "plain"
        assert tokenizer.chat([{"role": "user", "content": "x"}], tools=[{"name": "t"}]) == "tools"
    finally:
        tokenizer.close()


def test_sentence_piece_decodes_what_it_encodes(tmp_path: Path) -> None:
    file = SEEN / "ggml-vocab-phi-3.gguf"
    if not file.is_file():
        pytest.skip(f"{file} is not on this machine")
    header = read_gguf_header(file)
    for name, content in text_files(header.metadata, str(file), header.metadata["general.name"]).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Confined.open(tmp_path)
    try:
        for text in ["Hello world", "  two\n\n spaces", "häh 🚀", "0x1F"]:
            assert tokenizer.decode(tokenizer.encode(text)) == text
        prompt = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
        texts = [tokenizer.texts([i])[i] for i in prompt]
        # White space behind control tokens is dropped, as the model was trained.
        assert texts[:3] == ["<s>", "<|user|>", "Hi"] and texts[-1] == "<|assistant|>"
        assert tokenizer.eos_ids == {32000, 32007}
    finally:
        tokenizer.close()


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another kind": ({"model": "t5"}, UnsupportedModel, "tokenizer.ggml.model 't5' is not one of gpt2, llama"),
    "another cut": ({"pre": "martian"}, UnsupportedModel, "tokenizer.ggml.pre 'martian' is not one of bloom, "),
    "no tokens": ({"tokens": None}, BrokenModel, "tokenizer.ggml.tokens is missing"),
    "an empty vocabulary": ({"tokens": [], "token_type": None}, BrokenModel, "has 0 entries"),
    "tokens a number": ({"tokens": 7}, BrokenModel, "should be a list of strings"),
    "no merges": ({"merges": None}, BrokenModel, "tokenizer.ggml.merges is missing"),
    "a token twice": ({"tokens": ["a", "b", "a"], "token_type": None}, BrokenModel, "has 'a' twice"),
    "few types": ({"tokens": ["a", "b"]}, BrokenModel, "token_type should be 2 numbers"),
    "types a text": ({"token_type": "normal"}, BrokenModel, "token_type should be 261 numbers"),
    "no scores": ({"model": "llama"}, BrokenModel, "has no tokenizer.ggml.scores"),
    "a flag that is none": ({"add_bos_token": 3}, BrokenModel, "add_bos_token should be true or false"),
    "a template that is a number": ({"tokenizer.chat_template": 3}, BrokenModel, "should be a string"),
    "a name that is a number": ({"model": 3}, BrokenModel, "tokenizer.ggml.model should be a string"),
    "a vocabulary of novels": (
        {"tokens": ["a" * (1 << 23), "b"], "token_type": None}, BrokenModel, "has 8388609 characters",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_metadata_is_one_line(name: str) -> None:
    changes, kind, says = BAD[name]
    with pytest.raises(kind) as raised:
        text_files(small(**changes), "a.gguf")
    message = str(raised.value)
    assert says in message and "\n" not in message and message.startswith("a.gguf")


def test_merges_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """All substrings of a long string would make a tokenizer of many times its size."""
    texts = [("ab" * 20 + "c" * i)[lo:] for i in range(3) for lo in range(30)]
    vocab = {text: i for i, text in enumerate(dict.fromkeys([*"abc", *texts]))}
    entries = tokenizer.Entries(list(vocab), [1] * len(vocab), [0.0] * len(vocab))
    assert len(tokenizer._merges_by_score(vocab, entries, "here")) > 10
    monkeypatch.setattr(tokenizer, "_MAX_MERGES", 10)
    with pytest.raises(BrokenModel, match="over 10 ways"):
        tokenizer._merges_by_score(vocab, entries, "here")


def test_scores_that_are_no_numbers() -> None:
    scores = array("f", [float("nan")] * 261)
    with pytest.raises(BrokenModel, match="scores has NaN"):
        text_files(small(model="llama", scores=scores), "a.gguf")


def test_no_tokenizer_at_all() -> None:
    assert text_files({}, "a.gguf") == {} and text_files({"tokenizer.ggml.model": "no_vocab"}, "a.gguf") == {}


def test_gpt_oss_ends_its_thoughts_with_another_token_than_its_answers() -> None:
    """<|end|> ends an answer of Phi-3, but of gpt-oss one of its messages."""
    for ends, expected in ((["<|end|>", "<|endoftext|>"], [0, 1]), (["<|end|>", "<|return|>", "<|call|>"], [1, 2])):
        tokens = [*ends, *"abc"]
        metadata = small(tokens=tokens, token_type=array("i", [3] * len(ends) + [1] * 3), merges=[], eos_token_id=1)
        assert json.loads(text_files(metadata, "a.gguf")["generation_config.json"])["eos_token_id"] == expected


def test_ids_beyond_the_vocabulary_are_none(tmp_path: Path) -> None:
    files = text_files(small(bos_token_id=2**32 - 1, eos_token_id=999, add_bos_token=True), "a.gguf")
    config = json.loads(files["tokenizer_config.json"])
    assert "bos_token" not in config and "eos_token" not in config
    assert json.loads(files["tokenizer.json"])["post_processor"] is None
