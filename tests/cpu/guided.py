"""Small models with tokenizers of two kinds, whose tokens guides take apart, and schemas that would cost much."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.spec.ask import Ask
from penstock.spec.format import FLOAT32
from penstock.store.synth import synth
from tests.cpu.commands import MACHINE
from tests.cpu.configs import TINY_CONFIGS

CONTEXT = 256
TEXTS = [
    '{"name": "Ann", "age": 41, "tags": ["a b", "Füße", "日本"]}',
    "Once upon a time, in 1984: [true, false, null]",
] * 3


def byte_level() -> Core:
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    )
    core.add_tokens(["<tool>", " of"])
    return core


def sentencepiece() -> Core:
    """As Llama 2's: spaces are ▁, what is unknown falls back to bytes, and the first space of a text is dropped."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [chr(c) for c in range(33, 127)] + ["▁", "▁{", '▁"', '":', "▁a", "na", "me", "▁na", "日", "▁1", "ü"]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    merges = [("▁", "{"), ("▁", '"'), ('"', ":"), ("▁", "a"), ("n", "a"), ("m", "e"), ("▁", "na"), ("▁", "1")]
    core = Core(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return core


CORES = {"byte-level": byte_level, "sentencepiece": sentencepiece}


HOSTILE: dict[str, Any] = {
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}},
    "look-ahead": {"type": "string", "pattern": "^(?=.*a)(?=.*b).*$"},
    "products": {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijkl"]},
    "states": {"type": "string", "pattern": "(.*a){30}.{200}b"},
    "repeats": {"type": "string", "pattern": "((a{1,900}){1,900}){1,900}"},
    "itself": {"$ref": "#"},
    "elsewhere": {"$ref": "http://127.0.0.1/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "unknown words": {"type": "array", "uniqueItems": True},
    "no type": {"type": "widget"},
    "impossible": {"type": "integer", "minimum": 5, "maximum": 2},
    "own grammar": {
        "x-guidance": {"whitespace_flexible": False, "lenient": True},
        "type": "array",
        "uniqueItems": True,
    },
    "doubling": {
        "$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
        | {"a40": {"type": "null"}},
        "$ref": "#/$defs/a0",
    },
    "long": {"type": "string", "minLength": 10**9},
    "numbers": {"type": "integer", "multipleOf": 982_451_653, "minimum": 7, "maximum": 10**300},
}


def made(folder: Path, core: Core | None = None) -> Path:
    """A random model, with the tokenizer if one is given."""
    config = {**json.loads(TINY_CONFIGS["llama"]), "max_position_embeddings": CONTEXT}
    if core is not None:
        config["vocab_size"] = core.get_vocab_size() + 3  # padded
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    packed = synth(folder / "config.json", folder / "model", FLOAT32)
    if core is not None:
        end = core.token_to_id("</s>")
        core.save(str(packed / "tokenizer.json"))
        (packed / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        (packed / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    return packed


def load_unchecked(folder: Path, **ask: Any) -> Any:
    ask = {"context": CONTEXT, "batch": 4, **ask}
    return closing(Engine.load(folder, Ask(**ask), Loading(machine=MACHINE, verify=False)))
