"""Makes the tokenizer's files of a model's folder (tokenizer.json, …) out of a GGUF file's metadata.

So there is one tokenizer: a child opens these files as it opens those of any model. Nothing of the file is run here.
Two kinds of vocabularies are known:

    gpt2    byte-level BPE: merges in their order, and a named way to cut texts into words (`pretokenizers`)
    llama   SentencePiece's BPE: a score for each entry. Of all neighbours that together are an entry, those whose entry
            has the highest score are merged first. Characters without an entry become bytes, <0x00> … <0xFF>.

`tokenizers` has merges by rank and none by score, so for each entry of the second kind every way to make it of two
others becomes a merge, by falling score.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.errors import BrokenModel, UnsupportedModel
from penstock.models.gguf.ollama import GPT_OSS, GPT_OSS_PRE
from penstock.models.hf.config import MAX_VOCAB
from penstock.store.gguf.header import Strings, Value
from penstock.store.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from penstock.store.header import quoted

_PREFIX = "tokenizer.ggml."
MODELS = ("gpt2", "llama")
_MAX_CHARACTERS = 1 << 23  # of all entries together; the largest vocabulary known (262 k) has 2 million
_MAX_ENTRY = 256  # characters of an entry that merges lead to
_MAX_MERGES = 1 << 22  # Llama's 32,000 entries lead to 61,249; substrings of a long string to millions
_SPACE = "▁"  # U+2581, which stands for a space in SentencePiece's vocabularies

# Types of entries, in tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# Tokens that end an answer, by their text: a file names one or two of them by number, and a chat's turns may end with
# another one. The list is llama.cpp's.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "<|return|>",
    "<|call|>", "<|end_of_text|>", "<turn|>",
)  # fmt: skip


class Entries(NamedTuple):
    """A vocabulary: text, type and score of each id. `scores`: empty where the file has none."""

    texts: list[str]
    types: Sequence[int]
    scores: Sequence[float]


def text_files(metadata: dict[str, Value], where: str, name: str = "") -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json, by name; {} where the file has no tokenizer.
    `where`: the file, for errors. `name`: the model's.

    Raises BrokenModel; UnsupportedModel for a kind of vocabulary, or a way to cut texts, that is not known.
    """
    model = _text(metadata, "model", where, "none")
    if model in ("none", "no_vocab"):
        return {}
    if model not in MODELS:
        raise UnsupportedModel(
            f"{where}: {_PREFIX}model {quoted(model)} is not one of {', '.join(MODELS)}; other tokenizers are not read"
            " from GGUF files yet"
        )
    entries = _entries(metadata, where)
    ids = _special_ids(metadata, model, len(entries.texts))
    strips = "phi-3" in name.lower() or "phi3" in name.lower()
    if model == "llama":
        core, adds_bos = _sentence_piece(metadata, entries, where), True
    else:
        core, adds_bos = _byte_level(metadata, entries, where)
    ends = {
        "bos": _flag(metadata, "add_bos_token", where, adds_bos),
        "eos": _flag(metadata, "add_eos_token", where, False),
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(entries, strips),
        **core,
        "post_processor": _post_processor(entries, {end: ids[end] for end in ends if ends[end] and end in ids}),
    }
    config: dict[str, Any] = {f"add_{end}_token": adds for end, adds in ends.items()}
    config |= {f"{which}_token": entries.texts[i] for which, i in ids.items() if which in ("bos", "eos", "unk", "pad")}
    config |= {"clean_up_tokenization_spaces": False, **_templates(metadata, where)}
    generation = {"eos_token_id": _end_ids(entries, ids, metadata.get(f"{_PREFIX}eos_token_ids"))}
    made = {"tokenizer.json": tokenizer, "tokenizer_config.json": config, "generation_config.json": generation}
    return {file: f"{json.dumps(content, ensure_ascii=False)}\n".encode() for file, content in made.items()}


def _byte_level(metadata: dict[str, Value], entries: Entries, where: str) -> tuple[dict[str, Any], bool]:
    """The parts of tokenizer.json that differ, and whether texts begin with BOS where the file does not say."""
    name = _text(metadata, "pre", where, "default")
    if metadata.get("general.architecture") == GPT_OSS:
        name = GPT_OSS_PRE
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModel(f"{where}: {_PREFIX}pre {quoted(name)} is not one of {known}")
    kind = PRE_TOKENIZERS[name]
    vocab = {text: i for i, text in enumerate(entries.texts)}
    merges = []
    for merge in _strings(metadata, "merges", where):
        first, _, second = merge[1:].partition(" ")  # an entry may begin with a space
        first = merge[:1] + first
        # The library refuses other merges. They make a token that is no entry, so nothing is lost without them.
        if first in vocab and second in vocab and first + second in vocab:
            merges.append((first, second))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    core = {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_splits(kind), byte_level]},
        "decoder": byte_level,
        "model": _bpe(vocab, merges, ignore_merges=kind.whole_words),
    }
    return core, kind.add_bos


def _splits(kind: PreTokenizer) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in kind.patterns
    ]


def _sentence_piece(metadata: dict[str, Value], entries: Entries, where: str) -> dict[str, Any]:
    """The parts of tokenizer.json that differ."""
    if len(entries.scores) == 0:
        raise BrokenModel(f"{where} has no {_PREFIX}scores, which a vocabulary of the kind llama needs")
    prefix = _flag(metadata, "add_space_prefix", where, True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    unknown = next((entries.texts[i] for i, kind in enumerate(entries.types) if kind == _UNKNOWN), None)
    vocab = {text: i for i, text in enumerate(entries.texts)}
    merges = _merges_by_score(vocab, entries, where)
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": _SPACE}] if prefix else []), spaces],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back if prefix else back[:-1]},
        "model": _bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges_by_score(vocab: dict[str, int], entries: Entries, where: str) -> list[tuple[str, str]]:
    """All ways to make an entry of two others, by the falling score of the entry they make. Equal scores: by id, and of
    one entry by the length of the first half, since of equals the leftmost is merged first. Raises BrokenModel where
    they are too many."""
    made = sorted(
        (i for i, kind in enumerate(entries.types) if kind in (_NORMAL, _USER, _UNUSED)),
        key=lambda i: (-entries.scores[i], i),
    )
    merges = []
    for i in made:
        text = entries.texts[i]
        if len(text) <= _MAX_ENTRY:
            halves = ((text[:at], text[at:]) for at in range(1, len(text)))
            merges += [each for each in halves if each[0] in vocab and each[1] in vocab]
            if len(merges) > _MAX_MERGES:
                raise BrokenModel(f"{where} has a vocabulary with over {_MAX_MERGES} ways to make one entry of two")
    return merges


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        **more, "vocab": vocab, "merges": merges,
    }  # fmt: skip


def _added(entries: Entries, strips: bool) -> list[dict[str, Any]]:
    """Tokens that are found in a text before it is cut: control tokens, the unknown token, and users' own. `strips`:
    whether white space behind control tokens is dropped, as Phi-3 has it (the file does not say)."""
    return [
        {
            "id": i, "content": text, "single_word": False, "lstrip": False,
            "rstrip": strips and text not in ("<unk>", "<s>", "<|endoftext|>"),
            "normalized": False, "special": kind != _USER,
        }
        for i, (text, kind) in enumerate(zip(entries.texts, entries.types, strict=True))
        if kind in (_CONTROL, _USER, _UNKNOWN)
    ]  # fmt: skip


def _post_processor(entries: Entries, ends: dict[str, int]) -> dict[str, Any] | None:
    """Adds BOS before a text and EOS behind it, as far as `ends` has them."""
    if not ends:
        return None
    texts = {end: entries.texts[i] for end, i in ends.items()}

    def around(*sequences: str) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        for nth, sequence in enumerate(sequences):
            pieces += [{"SpecialToken": {"id": texts["bos"], "type_id": nth}}] if "bos" in texts else []
            pieces.append({"Sequence": {"id": sequence, "type_id": nth}})
            pieces += [{"SpecialToken": {"id": texts["eos"], "type_id": nth}}] if "eos" in texts else []
        return pieces

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A", "B"),
        "special_tokens": {
            texts[end]: {"id": texts[end], "ids": [i], "tokens": [texts[end]]} for end, i in ends.items()
        },
    }


def _templates(metadata: dict[str, Value], where: str) -> dict[str, Any]:
    """The chat templates, as tokenizer_config.json has them."""
    key = "tokenizer.chat_template"
    named = {
        name.removeprefix(f"{key}."): value
        for name, value in metadata.items()
        if name.startswith(f"{key}.") and isinstance(value, str)
    }
    default = metadata.get(key)
    if default is not None and not isinstance(default, str):
        raise BrokenModel(f"{where}: {key} should be a string")
    if not named:
        return {} if default is None else {"chat_template": default}
    both = {**({} if default is None else {"default": default}), **named}
    return {"chat_template": [{"name": name, "template": text} for name, text in both.items()]}


def _end_ids(entries: Entries, ids: dict[str, int], listed: Value) -> list[int]:
    """Ids that end an answer. gpt-oss ends its thoughts with <|end|>, and its answers with another token. `listed`:
    ids that Ollama's files name beside that of EOS, if any. Raises BrokenModel for more of them than texts."""
    named = [i for which, i in ids.items() if which in ("eos", "eot", "eom")]
    if isinstance(listed, array):
        if len(listed) > len(entries.texts):
            raise BrokenModel(f"{_PREFIX}eos_token_ids lists {len(listed)} ids of {len(entries.texts)} tokens")
        named += [i for i in listed if isinstance(i, int) and 0 <= i < len(entries.texts)]
    known, texts = set(_ENDS), set(entries.texts)
    if {"<|return|>", "<|call|>"} <= texts:
        known.discard("<|end|>")
        named = [i for i in named if entries.texts[i] != "<|end|>"]
    by_text = [i for i, text in enumerate(entries.texts) if text in known]
    return sorted({*named, *by_text})


def _special_ids(metadata: dict[str, Value], model: str, size: int) -> dict[str, int]:
    """Which → id of the special tokens. Ids beyond the vocabulary count as none."""
    ids = {"bos": 1, "eos": 2, "unk": 0} if model == "llama" else {}
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
    for which, key in keys.items():
        value = metadata.get(f"{_PREFIX}{key}_token_id")
        if isinstance(value, int) and not isinstance(value, bool):
            ids[which] = value
    return {which: i for which, i in ids.items() if 0 <= i < size}


def _entries(metadata: dict[str, Value], where: str) -> Entries:
    texts = _strings(metadata, "tokens", where)
    if not 1 <= len(texts) <= MAX_VOCAB:
        raise BrokenModel(f"{where}: {_PREFIX}tokens has {len(texts)} entries; 1 to {MAX_VOCAB} make sense")
    characters = sum(map(len, texts))
    if characters > _MAX_CHARACTERS:
        raise BrokenModel(f"{where}: {_PREFIX}tokens has {characters} characters; at most {_MAX_CHARACTERS} make sense")
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    if len(set(texts)) < len(texts):
        seen: set[str] = set()
        twice = next(text for text in texts if text in seen or seen.add(text))  # type: ignore[func-returns-value]
        raise BrokenModel(f"{where}: {_PREFIX}tokens has {quoted(twice)} twice")
    types = _numbers(metadata, "token_type", where, len(texts)) or [_NORMAL] * len(texts)
    return Entries(texts, types, _numbers(metadata, "scores", where, len(texts)))


def _numbers(metadata: dict[str, Value], key: str, where: str, count: int) -> list[Any]:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return []
    if not isinstance(value, array) or len(value) != count:
        raise BrokenModel(f"{where}: {_PREFIX}{key} should be {count} numbers, as many as there are tokens")
    numbers: list[Any] = value.tolist()
    if any(number != number for number in numbers):
        raise BrokenModel(f"{where}: {_PREFIX}{key} has NaN")
    return numbers


def _strings(metadata: dict[str, Value], key: str, where: str) -> list[str]:
    value = metadata.get(_PREFIX + key)
    if not isinstance(value, Strings):
        raise BrokenModel(f"{where}: {_PREFIX}{key} {'is missing' if value is None else 'should be a list of strings'}")
    return value.texts()


def _text(metadata: dict[str, Value], key: str, where: str, default: str) -> str:
    value = metadata.get(_PREFIX + key, default)
    if not isinstance(value, str):
        raise BrokenModel(f"{where}: {_PREFIX}{key} should be a string")
    return value


def _flag(metadata: dict[str, Value], key: str, where: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + key, default)
    if not isinstance(value, bool):
        raise BrokenModel(f"{where}: {_PREFIX}{key} should be true or false")
    return value
