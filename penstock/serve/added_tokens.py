"""Brings the added tokens of a tokenizer.json to what the files beside it say of them, as transformers does.

    added_tokens_decoder        of tokenizer_config.json: tokens by id, with their flags. It wins over tokenizer.json,
                                and may have tokens that are not there
    bos_token, eos_token, …     are special
    extra_special_tokens        too: by names, or a list of those that are no added tokens yet, which is also called
                                additional_special_tokens

Tokens that these files name and the vocabulary lacks are left out, but for those that `added_tokens_decoder` puts right
behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def settle(core: Core, config: Mapping[str, Any], special_map: Mapping[str, Any], named: Iterable[str]) -> None:
    """`config`: of tokenizer_config.json. `special_map`: of special_tokens_map.json. `named`: the texts of special
    tokens that have names."""
    texts = list(named)
    listed = _listed(config.get("added_tokens_decoder"))
    known = {str(token.content): token for token in core.get_added_tokens_decoder().values()}
    changed: list[AddedToken] = []
    size = core.get_vocab_size(with_added_tokens=True)
    for i, token in sorted(listed.items()):
        if token.content in texts and not token.special:
            token = _with(token, special=True)
        if core.token_to_id(token.content) is None:
            if i != size:
                continue
            size += 1
        if repr(token) != repr(known.get(token.content)):
            changed.append(token)
    core.add_tokens(changed)
    flags = known | {str(token.content): token for token in listed.values()}
    special = [_with(flags[text], special=True) if text in flags else _plain(text) for text in texts]
    special += [_plain(text) for text in _extra(config, special_map if not listed else {}) if text not in flags]
    core.add_special_tokens([token for token in special if core.token_to_id(token.content) is not None])


def _listed(given: Any) -> dict[int, AddedToken]:
    """Tokens by id; what is no token is left out."""
    found: dict[int, AddedToken] = {}
    for key, entry in given.items() if isinstance(given, dict) else ():
        text = entry.get("content") if isinstance(entry, dict) else None
        if isinstance(text, str) and text and key.isascii() and key.isdigit() and len(key) < 10:
            flags = {name: entry[name] for name in _FLAGS if isinstance(entry.get(name), bool)}
            found[int(key)] = AddedToken(text, **flags)
    return found


def _extra(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> list[str]:
    """The texts of special tokens without a name."""
    for holder in (config, special_map):
        for key in ("extra_special_tokens", "additional_special_tokens"):
            entries = holder.get(key)
            if isinstance(entries, list) and entries:
                texts = [each.get("content") if isinstance(each, dict) else each for each in entries]
                return [text for text in texts if isinstance(text, str) and text]
    return []


def _plain(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def _with(token: AddedToken, special: bool) -> AddedToken:
    """The token with another flag."""
    return AddedToken(
        token.content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
        normalized=token.normalized, special=special,
    )  # fmt: skip
