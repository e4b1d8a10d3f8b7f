"""Seeds of what turns text to tokens: tokenizer.json and the small configs beside it."""

from __future__ import annotations

import json
from typing import Any

from tests.fuzz_files.world import TEMPLATE, Files, World

_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
_EMPTY: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
}  # fmt: skip
_LETTERS = [*"abcdefghijklmnopqrstuvwxyz .,;-'IT", "the", "he", "▁", "▁the", "in"]


def tokenizers(world: World) -> Files:
    byte_level: dict[str, Any] = json.loads(world.tokenizer["tokenizer.json"])
    model = byte_level["model"]
    merges = [["t", "h"], ["th", "e"], ["e", "r"]]
    merged = {**model["vocab"], "th": 258, "the": 259, "er": 260}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    letters = {letter: i + 3 for i, letter in enumerate(_LETTERS)}
    fallback = {f"<0x{i:02X}>": i for i in range(256)} | {"<unk>": 256, "<s>": 257, "▁": 258, "▁t": 259, "h": 260}
    special = [_added(256, "<|bos|>"), _added(257, "<|eos|>")]
    post = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [256], "tokens": ["<|bos|>"]}},
    }  # fmt: skip
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], *([w, -i / 9] for i, w in enumerate(letters))]}
    word_piece = {
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
        "vocab": {"[UNK]": 0, **letters, **{f"##{letter}": i + 90 for i, letter in enumerate("abcdefghilnorst")}},
    }  # fmt: skip
    word_level = {"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<unk>": 0, "hello": 1, "It": 2, "was": 3}}

    def changed(**parts: Any) -> dict[str, Any]:
        return {**byte_level, **parts}

    def model_with(**parts: Any) -> dict[str, Any]:
        return changed(model={**model, **parts})

    def replacing(pattern: dict[str, str], content: str, times: int = 1) -> dict[str, Any]:
        steps = [{"type": "Replace", "pattern": pattern, "content": content}] * times
        return changed(normalizer={"type": "Sequence", "normalizers": steps})

    nested: dict[str, Any] = {"type": "NFC"}
    for _ in range(60):
        nested = {"type": "Sequence", "normalizers": [nested]}
    found: dict[str, Any] = {
        "good-bytes": byte_level,
        "good-merges": model_with(vocab=merged, merges=merges),
        "good-merges-old": model_with(vocab=merged, merges=[" ".join(pair) for pair in merges]),
        "good-llama2": {
            **_EMPTY, "added_tokens": [_added(256, "<unk>"), _added(257, "<s>")],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {**model, "byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>", "vocab": fallback,
                      "merges": [["▁", "t"]] if "t" in fallback else []},
        },
        "good-unigram": {**_EMPTY, "pre_tokenizer": metaspace, "decoder": metaspace, "model": unigram},
        "good-wordpiece": {
            **_EMPTY, "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
            "strip_accents": None, "lowercase": True}, "pre_tokenizer": {"type": "BertPreTokenizer"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}, "model": word_piece,
        },
        "good-wordlevel": {**_EMPTY, "pre_tokenizer": {"type": "Whitespace"}, "model": word_level},
        "good-post": changed(post_processor=post),
        "good-forms": changed(normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"},
            {"type": "StripAccents"}, {"type": "Strip", "strip_left": True, "strip_right": True}]}),
        "good-cuts": changed(
            truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
            padding={"strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "!"},
        ),
        "good-split": changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}| ?\p{L}+|\s+"}, "behavior": "Isolated",
             "invert": False}, {"type": "Digits", "individual_digits": True},
            {"type": "Punctuation", "behavior": "Isolated"},
            byte_level["pre_tokenizer"]]}),
        "odd-added": changed(added_tokens=[*special, _added(258, ""), _added(259, " "), _added(260, "a" * 3000)]),
        "odd-added-far": changed(added_tokens=[*special, _added(2**31, "<far>")]),
        "odd-multiplies": replacing({"String": "e"}, "e" * 1000, 3),
        "odd-multiplies-more": replacing({"Regex": "."}, "x" * 900, 4),
        "odd-prepends": changed(normalizer={"type": "Prepend", "prepend": "x" * 8000}),
        "odd-backtracks": replacing({"Regex": "(t*)*(h*)*(e*)*$"}, ""),
        "odd-backtracks-split": changed(pre_tokenizer={"type": "Split", "pattern": {"Regex": "([a-z ]+)+[0-9]"},
            "behavior": "Isolated", "invert": False}),
        "odd-regex-long": replacing({"Regex": "(a{1,1000}){1,1000}"}, "b"),
        "odd-nested": changed(normalizer=nested),
        "odd-decoder": changed(decoder={"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "."},
            "content": "z" * 1500}] * 3}),
        "odd-charsmap": changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "////////AAAA"}),
        "odd-vocab-gaps": model_with(vocab={**model["vocab"], "zz": 2**32 - 1}),
        "odd-vocab-same-id": model_with(vocab=dict.fromkeys(model["vocab"], 7)),
        "odd-post-far": changed(post_processor={**post, "special_tokens": {"<|bos|>": {"id": "<|bos|>",
            "ids": [2**32 - 1] * 9, "tokens": ["<|bos|>"] * 9}}}),
        "odd-post-many": changed(post_processor={**post, "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100}),
        "odd-unigram-scores": {**_EMPTY, "model": {**unigram, "vocab": [["<unk>", -1e308], ["h", 1e308], ["e", 0]]}},
        "odd-unigram-no-unk": {**_EMPTY, "model": {**unigram, "unk_id": None, "vocab": [["q", -1.0]]}},
        "odd-pads": changed(padding={"strategy": {"Fixed": 2**31}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}),
        "odd-wordpiece-prefix": {**_EMPTY, "model": {**word_piece, "continuing_subword_prefix": ""}},
        "odd-dropout": model_with(dropout=0.5, vocab=merged, merges=merges),
        "bad-unigram-unk": {**_EMPTY, "model": {**unigram, "unk_id": 99999}},
        "bad-merges": model_with(merges=[["q", "qq"]]),
        "bad-type": model_with(type="BPQ"),
        "bad-vocab-negative": model_with(vocab={"a": -1}),
        "bad-vocab-real": model_with(vocab={"a": 1.5}),
        "bad-no-model": {key: value for key, value in byte_level.items() if key != "model"},
        "bad-regex": replacing({"Regex": "(((((("}, ""),
        "bad-version": changed(version="9.9"),
    }  # fmt: skip
    return {f"{name}.json": json.dumps(content).encode() for name, content in found.items()}


def tokenizer_configs(world: World) -> Files:
    base = json.loads(world.tokenizer["tokenizer_config.json"])
    template = base["chat_template"]
    found: dict[str, Any] = {
        "good-as-it-is": base,
        "good-objects": {**base, "eos_token": {"content": "<|eos|>", "special": True, **_FLAGS}},
        "good-named": {**base, "chat_template": [{"name": "default", "template": template},
                                                 {"name": "tool_use", "template": "tools"}]},
        "good-none": {"model_max_length": 1e30},
        "good-empty": {},
        "odd-eos-list": {**base, "eos_token": ["<|eos|>"]},
        "odd-template-number": {**base, "chat_template": 7},
        "odd-template-object": {**base, "chat_template": {"default": TEMPLATE}},
        "odd-template-list": {**base, "chat_template": [{"name": "default"}, 3, {"template": "{{ x }}"}]},
        "odd-template-hostile": {**base, "chat_template": "{{ 'x' * 10**10 }}"},
        "odd-tokens": {**base, **{f"t{i}_token": "a" for i in range(200)}},
        "odd-special-letters": {**base, "pad_token": "a", "unk_token": "e"},
        "bad-list": [],
    }  # fmt: skip
    return {f"{name}.json": json.dumps(content).encode() for name, content in found.items()}


def generation_configs() -> Files:
    found: dict[str, Any] = {
        "good-greedy": {"bos_token_id": 256, "eos_token_id": 257},
        "good-drawn": {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "eos_token_id": [257, 256]},
        "good-penalty": {"repetition_penalty": 1.1, "min_p": 0.05, "do_sample": True, "max_new_tokens": 20},
        "good-empty": {},
        "good-nulls": {"temperature": None, "top_p": None, "top_k": None, "eos_token_id": None},
        "odd-eos-empty": {"eos_token_id": []},
        "odd-eos-far": {"eos_token_id": 2**70},
        "odd-eos-negative": {"eos_token_id": [-1, 257]},
        "odd-temperature-tiny": {"do_sample": True, "temperature": 1e-300},
        "odd-top-k-far": {"do_sample": True, "top_k": 2**40},
        "bad-eos-text": {"eos_token_id": "257"},
        "bad-eos-flag": {"eos_token_id": True},
        "bad-top-p": {"do_sample": True, "top_p": 7},
        "bad-temperature": {"do_sample": True, "temperature": -1},
        "bad-penalty": {"do_sample": True, "repetition_penalty": 0},
        "bad-list": [1],
    }
    found_bytes = {f"{name}.json": json.dumps(content).encode() for name, content in found.items()}
    return {**found_bytes, "bad-nan.json": b'{"do_sample": true, "temperature": NaN}'}


def special_tokens_maps() -> Files:
    found: dict[str, Any] = {
        "good-plain": {"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
        "good-objects": {"bos_token": {"content": "<|bos|>", **_FLAGS}, "additional_special_tokens": ["<|bos|>"]},
        "good-unknown": {"pad_token": "<|nowhere|>"},
        "odd-empty-token": {"eos_token": "", "pad_token": {"content": ""}},
        "odd-types": {"eos_token": 7, "bos_token": None, "pad_token": {"content": 3}},
        "bad-text": "tokens",
        "bad-half-a-character": {"bos_token": "\ud800"},
    }
    return {f"{name}.json": json.dumps(content).encode() for name, content in found.items()}


def _added(i: int, content: str) -> dict[str, Any]:
    return {"id": i, "content": content, **_FLAGS}
