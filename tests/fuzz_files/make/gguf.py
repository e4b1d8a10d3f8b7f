"""Seeds of GGUF files: small models in several formats, and headers that lie."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.fuzz_files.gguf_tree import ARRAY, STRING, Array, Entry, Tensor, Tree, dump
from tests.fuzz_files.world import TEMPLATE, Files

_WIDTH, _HEADS, _HEAD_DIM, _FFN, _VOCAB = 32, 2, 16, 32, 40
_F32, _F16, _Q4_0, _Q8_0, _MXFP4 = 0, 1, 2, 8, 39
_BLOCK_BYTES = {_F32: (1, 4), _F16: (1, 2), _Q4_0: (32, 18), _Q8_0: (32, 34), _MXFP4: (32, 17)}  # numbers, bytes
_U32, _F32_VALUE, _BOOL, _I32 = 4, 6, 7, 5


def files() -> Files:
    good = {"llama-q4_0": _model(_Q4_0), "llama-q8_0": _model(_Q8_0), "llama-mxfp4": _model(_MXFP4)}
    good |= {"spm-q4_0": _model(_Q4_0, spm=True), "experts-q4_0": _model(_Q4_0, experts=2)}
    good["mixed"] = _model(_Q4_0, other=_Q8_0)
    named = {f"good-{name}.gguf": dump(tree) for name, tree in good.items()}
    named |= {f"bad-{name}.gguf": content for name, content in _bad(good["llama-q4_0"]).items()}
    # llama.cpp does without special tokens that are no entries, and so does penstock.
    far = good["llama-q4_0"].with_value("tokenizer.ggml.eos_token_id", _U32, 2**32 - 1)
    named["good-eos-far.gguf"] = dump(far)
    return named


def _model(kind: int, other: int | None = None, spm: bool = False, experts: int = 0) -> Tree:
    """A llama of one layer. `other`: the format of some matrices. `spm`: with SentencePiece's vocabulary."""
    rng = random.Random(f"{kind} {other} {spm} {experts}")
    own: dict[str, tuple[int, Any]] = {
        "block_count": (_U32, 1), "context_length": (_U32, 512), "embedding_length": (_U32, _WIDTH),
        "feed_forward_length": (_U32, _FFN), "attention.head_count": (_U32, _HEADS),
        "attention.head_count_kv": (_U32, 1), "attention.layer_norm_rms_epsilon": (_F32_VALUE, 1e-5),
        "rope.freq_base": (_F32_VALUE, 10_000.0), "vocab_size": (_U32, _VOCAB),
    }  # fmt: skip
    if experts:
        own |= {"expert_count": (_U32, experts), "expert_used_count": (_U32, 1)}
    entries = [Entry(b"general.architecture", STRING, b"llama"), Entry(b"general.name", STRING, b"tiny")]
    entries += [Entry(f"llama.{key}".encode(), *value) for key, value in own.items()]
    entries += _spm() if spm else _bpe()
    heads, keys = _HEADS * _HEAD_DIM, _HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (_WIDTH, _VOCAB), "output_norm": (_WIDTH,), "blk.0.attn_norm": (_WIDTH,),
        "blk.0.attn_q": (_WIDTH, heads), "blk.0.attn_k": (_WIDTH, keys), "blk.0.attn_v": (_WIDTH, keys),
        "blk.0.attn_output": (heads, _WIDTH), "blk.0.ffn_norm": (_WIDTH,),
    }  # fmt: skip
    if experts:
        shapes["blk.0.ffn_gate_inp"] = (_WIDTH, experts)
        shapes |= {f"blk.0.ffn_{which}_exps": (_WIDTH, _FFN, experts) for which in ("gate", "up")}
        shapes["blk.0.ffn_down_exps"] = (_FFN, _WIDTH, experts)
    else:
        shapes |= {"blk.0.ffn_gate": (_WIDTH, _FFN), "blk.0.ffn_up": (_WIDTH, _FFN), "blk.0.ffn_down": (_FFN, _WIDTH)}
    data, tensors = bytearray(), []
    for name, dims in shapes.items():
        plain = len(dims) == 1 or "gate_inp" in name
        of = _F32 if plain else other if other is not None and "ffn" in name else kind
        tensors.append(Tensor(f"{name}.weight".encode(), dims, of, len(data)))
        data += _blocks(rng, dims, of)
        data += bytes(-len(data) % 32)
    return Tree(tuple(entries), tuple(tensors), bytes(data))


def _blocks(rng: random.Random, dims: tuple[int, ...], kind: int) -> bytes:
    """Random numbers with small scales; norms of ones."""
    count = 1
    for dim in dims:
        count *= dim
    numbers, nbytes = _BLOCK_BYTES[kind]
    if kind == _F32:
        return b"\x00\x00\x80\x3f" * count
    scale = b"\x79" if kind == _MXFP4 else b"\x00\x24"  # 2^-6; 2^-6 as a float16
    return b"".join(scale + rng.randbytes(nbytes - len(scale)) for _ in range(count // numbers))


def _bpe() -> list[Entry]:
    """A space and the small letters, and merges of some."""
    texts = ["Ġ", *(chr(97 + i) for i in range(26)), ".", ",", "ab", "cd", "abcd", "he", "ll", "<|x|>", "<|y|>"]
    texts += ["<|user|>", "<|assistant|>", "<|bos|>", "<|eos|>"]
    kinds = Array(_I32, (1,) * 34 + (3,) * 6)
    return [
        _text("model", "gpt2"), _text("pre", "gpt-2"), _texts("tokens", texts),
        Entry(b"tokenizer.ggml.token_type", ARRAY, kinds), _texts("merges", ["a b", "c d", "ab cd", "h e", "l l"]),
        *_ends(38, 39),
    ]  # fmt: skip


def _spm() -> list[Entry]:
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(6)), "▁", *(chr(97 + i) for i in range(26))]
    texts += ["ab", "▁a", "he", "ll"]
    kinds = Array(_I32, (2, 3, 3, *(6,) * 6, *(1,) * 31))
    scores = Array(_F32_VALUE, tuple(0.0 if i < 9 else float(9 - i) for i in range(_VOCAB)))
    return [
        _text("model", "llama"), _texts("tokens", texts), Entry(b"tokenizer.ggml.token_type", ARRAY, kinds),
        Entry(b"tokenizer.ggml.scores", ARRAY, scores), *_ends(1, 2),
    ]  # fmt: skip


def _ends(bos: int, eos: int) -> list[Entry]:
    return [
        Entry(b"tokenizer.ggml.bos_token_id", _U32, bos), Entry(b"tokenizer.ggml.eos_token_id", _U32, eos),
        Entry(b"tokenizer.ggml.add_bos_token", _BOOL, 1), Entry(b"tokenizer.chat_template", STRING, TEMPLATE.encode()),
    ]  # fmt: skip


def _text(key: str, text: str) -> Entry:
    return Entry(f"tokenizer.ggml.{key}".encode(), STRING, text.encode())


def _texts(key: str, texts: list[str]) -> Entry:
    return Entry(f"tokenizer.ggml.{key}".encode(), ARRAY, Array(STRING, tuple(text.encode() for text in texts)))


def _bad(good: Tree) -> Files:
    """Headers and data that lie. Numbers of `dump`: 0 the version, 1 tensors, 2 entries, 3 the first key's length, 4
    its type, 5 its string's length."""
    whole = dump(good)
    deep = Array(4, ())
    for _ in range(100):
        deep = Array(ARRAY, (deep,))
    wide = Array(ARRAY, (Array(ARRAY, (Array(0, ()),) * 4),) * 60)
    tensor = good.with_tensor
    trees = {
        "alignment-0": good.with_value("general.alignment", _U32, 0),
        "alignment-3": good.with_value("general.alignment", _U32, 3),
        "alignment-2-31": good.with_value("general.alignment", _U32, 1 << 31),
        "alignment-text": good.with_value("general.alignment", STRING, b"32"),
        "nested-deep": good.with_value("x", ARRAY, deep),
        "nested-deep-architecture": good.with_value("general.architecture", ARRAY, deep),
        "nested-wide-blocks": good.with_value("llama.block_count", ARRAY, wide),
        "key-twice": replace(good, entries=(*good.entries, good.entries[0])),
        "tensor-twice": replace(good, tensors=(*good.tensors, good.tensors[0])),
        "no-architecture": good.without("general.architecture"),
        "architecture-number": good.with_value("general.architecture", _U32, 5),
        "architecture-unknown": good.with_value("general.architecture", STRING, b"mamba\n\x1b[2J"),
        "blocks-2-31": good.with_value("llama.block_count", _U32, 1 << 31),
        "blocks-0": good.with_value("llama.block_count", _U32, 0),
        "heads-0": good.with_value("llama.attention.head_count", _U32, 0),
        "eps-nan": good.with_value("llama.attention.layer_norm_rms_epsilon", _F32_VALUE, float("nan")),
        "split-of-2": good.with_value("split.count", 2, 2),
        "tokens-few": good.with_value("tokenizer.ggml.tokens", ARRAY, Array(STRING, (b"a",))),
        "tokens-no-text": good.with_value("tokenizer.ggml.tokens", ARRAY, Array(STRING, (b"\xff",) * _VOCAB)),
        "tokens-numbers": good.with_value("tokenizer.ggml.tokens", ARRAY, Array(_U32, (1,) * _VOCAB)),
        "tokenizer-unknown": good.with_value("tokenizer.ggml.model", STRING, b"rwkv"),
        "template-endless": good.with_value(
            "tokenizer.chat_template", STRING, b"{% for i in range(10**9) %}x{% endfor %}"
        ),
        "no-tensors": replace(good, tensors=()),
        "no-norm": replace(good, tensors=tuple(t for t in good.tensors if t.name != b"output_norm.weight")),
        "dims-none": tensor("token_embd.weight", dims=()),
        "dims-5": tensor("token_embd.weight", dims=(_WIDTH, _VOCAB, 1, 1, 1)),
        "dims-0": tensor("token_embd.weight", dims=(0, _VOCAB)),
        "dims-2-63": tensor("token_embd.weight", dims=(1 << 63, 1 << 63)),
        "dims-overflow": tensor("token_embd.weight", dims=(1 << 32, 1 << 32)),
        "embedding-1-d": tensor("token_embd.weight", dims=(_WIDTH * _VOCAB,)),
        "blocks-of-33": tensor("blk.0.ffn_up.weight", dims=(33, _FFN)),
        "more-rows": tensor("blk.0.ffn_up.weight", dims=(_WIDTH, _FFN + 1)),
        "type-99": tensor("blk.0.ffn_up.weight", kind=99),
        "type-removed": tensor("blk.0.ffn_up.weight", kind=4),
        "type-ints": tensor("blk.0.ffn_up.weight", kind=26),
        "offset-odd": tensor("blk.0.ffn_up.weight", offset=33),
        "offset-far": tensor("blk.0.ffn_up.weight", offset=1 << 40),
        "offset-2-63": tensor("blk.0.ffn_up.weight", offset=(1 << 64) - 32),
        "overlap": tensor("blk.0.ffn_up.weight", offset=0),
        "version-1": replace(good, version=1), "version-4": replace(good, version=4),
        "big-endian": replace(good, version=3 << 24), "magic": replace(good, magic=b"GGML"),
        "truncated-data": replace(good, data=good.data[:-40]), "no-data": replace(good, data=b""),
        "unknown-tensor": replace(
            good, tensors=(*good.tensors, Tensor(b"blk.0.ffn_gate_inp.weight", (0,), _F32, 0))
        ),
    }  # fmt: skip
    found = {name: dump(tree) for name, tree in trees.items()}
    for name, at, value in (
        ("tensors-2-63", 1, 1 << 63), ("tensors-many", 1, 200_000), ("entries-2-63", 2, 1 << 63),
        ("entries-many", 2, 4000), ("key-2-63", 3, 1 << 63), ("key-long", 3, 60_000), ("type-of-value-99", 4, 99),
        ("string-2-63", 5, 1 << 63), ("string-2-64", 5, (1 << 64) - 1), ("string-long", 5, 1 << 24),
    ):  # fmt: skip
        found[name] = dump(good, {at: value})
    found |= {"empty": b"", "magic-alone": b"GGUF", "cut-header": whole[:2000], "text": b"no GGUF file at all\n" * 9}
    found["array-2-63"] = dump(replace(good, entries=(good.entries[0], _texts("tokens", ["a"]))), {9: 1 << 63})
    found["array-2-61"] = dump(replace(good, entries=(good.entries[0], _texts("tokens", ["a"]))), {9: (1 << 61) + 1})
    return found
