"""How byte-level BPE vocabularies cut a text into words, by the names that GGUF files have for it.

`tokenizer.ggml.pre` names the cut. A text is cut by one pattern after the other: each leaves its matches, and what lies
between them, as pieces that the next one cuts. Patterns are those of the models' own tokenizers, in the syntax of the
library `tokenizers` (Oniguruma). Sources: tokenizer.json of a model of each kind, and llama.cpp's list of names
(src/llama-vocab.cpp), which also says which of them begin texts with BOS.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
_QWEN2 = rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
)  # fmt: skip
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORTENED}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SHORTENED}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
)
_HAN = "[一-龥ࠀ-一가-퟿]+"
# Letters of scripts with capitals, as DeepSeek's first tokenizer lists them. Escaped: letters that Unicode's normal
# form replaces.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns`: in the order in which they cut. `whole_words`: a word that is an entry of the vocabulary is taken as
    it is, whatever merges would make of it. `add_bos`: texts begin with BOS, where the file does not say."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_KINDS = {
    PreTokenizer((_GPT2,)): "gpt-2 phi-2 mpt olmo jais gigachat roberta-bpe",
    PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True): "llama-bpe llama3 llama-v3 falcon3",
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    PreTokenizer((_QWEN2,)): "qwen2 stablelm2 megrez deepseek-r1-qwen",
    PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True): "tekken",
    PreTokenizer((_GPT4O,)): "gpt-4o llama4",
    PreTokenizer((r"\p{N}", _GPT2)): "starcoder refact command-r smollm codeshell exaone minerva-7b",
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): "falcon",
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")): "deepseek-coder",
    PreTokenizer(
        (r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN, r"\p{N}+")
    ): "deepseek-llm",
    PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_END}",
        )
    ): "deepseek-v3",
    PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",)): "bloom poro-chat gpt3-finnish",
    PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")): "viking",
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): "default",
}  # fmt: skip

PRE_TOKENIZERS = MappingProxyType({name: kind for kind, names in _KINDS.items() for name in names.split()})
