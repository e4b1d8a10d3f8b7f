"""Text to ids and back: the model's own tokenizer.json, its chat template, and text as it streams."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import BadRequest, BrokenModel
from penstock.serve import template

# What a decoder writes for bytes that are not UTF-8, so also for half a character.
_BROKEN = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Made by `Tokenizer.open(folder)`. `generation_config` is the model's file as it stands, {} without one."""

    def __init__(self, core: Any, folder: Path) -> None:
        self._core = core
        config = _read_json(folder / "tokenizer_config.json")
        self._templates = template.read_templates(folder, config)
        self.generation_config = _read_json(folder / "generation_config.json")
        model_config = _read_json(folder / "config.json")
        state = core.decoder.__getstate__() if core.decoder is not None else b""
        self._byte_fallback = b'"ByteFallback"' in state
        self._variables = {
            **_special_tokens(_read_json(folder / "special_tokens_map.json")),
            **_special_tokens(config),
        }
        # What tokenizer_config.json names is special even where tokenizer.json forgot to say so.
        core.add_special_tokens([t for t in self._variables.values() if core.token_to_id(t) is not None])
        self._special = {i for i, token in core.get_added_tokens_decoder().items() if token.special}
        self.bos = self._id_of("bos_token", model_config)
        self.eos_ids = self._find_eos(model_config)

    @classmethod
    def open(cls, folder: Path) -> Tokenizer:
        """Reads a model's folder. Raises BrokenModel where there is no tokenizer.json or it is damaged."""
        # Imported here: 80 ms that `penstock plan` does not need.
        from tokenizers import Tokenizer as Core

        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise BrokenModel(f"{folder} has no tokenizer.json: save it with the model's tokenizer in that format")
        try:
            core = Core.from_file(str(path))
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic inside the library is no Exception
            raise BrokenModel(f"{path} is not a tokenizer: {' '.join(str(error).split())[:200]}") from None
        # Some files ask to cut at 512 tokens or to pad: right for training, silent damage to a prompt.
        core.no_truncation()
        core.no_padding()
        return cls(core, Path(folder))

    @property
    def size(self) -> int:
        """Entries, added tokens included. The model's vocabulary may be larger (padded)."""
        return int(self._core.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of a text; `add_special` puts BOS first where tokenizer.json says so.

        As in transformers, `add_bos_token` of tokenizer_config.json has no say beside a tokenizer.json.
        """
        try:
            return list(self._core.encode(text, add_special_tokens=add_special).ids)
        except (TypeError, UnicodeEncodeError):
            raise BadRequest("the prompt is not valid Unicode text (UTF-8)") from None

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids. Ids that the tokenizer does not know are nothing."""
        known = [i for i in ids if 0 <= i < 2**32]
        return str(self._core.decode(known, skip_special_tokens=skip_special))

    def stream(self) -> Stream:
        """A detokeniser for one answer."""
        return Stream(self)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def chat(self, messages: Sequence[template.Message], tools: Any = None) -> str:
        """A conversation as one prompt, up to where the assistant speaks. Encode it with `encode_chat`.

        Without a template of the model's own it is plain lines of User and Assistant.
        """
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise BadRequest('a message should be an object like {"role": "user", "content": "…"}')
        if not self._templates:
            return template.render_plain(list(messages))
        return template.render(self._templates, self._variables, list(messages), tools)

    def encode_chat(self, messages: Sequence[template.Message], tools: Any = None) -> list[int]:
        """`chat` as ids. A template writes BOS itself, so none is added to it: two of them cost quality."""
        return self.encode(self.chat(messages, tools), add_special=not self._templates)

    def shows(self, token: int) -> bool:
        """Whether an id can add to the text: known, and no control token."""
        return token >= 0 and token not in self._special and self._core.id_to_token(token) is not None

    def is_byte(self, token: int) -> bool:
        """Whether an id is one of `<0x00>` … `<0xFF>`, whose text depends on its neighbours."""
        return self._byte_fallback and _BYTE_TOKEN.fullmatch(self._core.id_to_token(token)) is not None

    def _id_of(self, name: str, model_config: dict[str, Any]) -> int | None:
        """A special token's id, by its name in tokenizer_config.json, else by config.json; fills its variable."""
        if name in self._variables:
            found = self._core.token_to_id(self._variables[name])
            return None if found is None else int(found)
        token = model_config.get(name + "_id")
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            return None
        text = self._core.id_to_token(token)
        if text is not None:
            self._variables[name] = text
        return token

    def _find_eos(self, model_config: dict[str, Any]) -> frozenset[int]:
        eos = self._id_of("eos_token", model_config)
        for config in (self.generation_config, model_config):
            given = config.get("eos_token_id")
            ids = given if isinstance(given, list) else [given]
            if given is not None and ids:
                if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                    raise BrokenModel(f"eos_token_id is {given!r}; it should be a number or a list of numbers")
                return frozenset(ids)
        return frozenset() if eos is None else frozenset([eos])


class Stream:
    """Ids in, text out, as soon as it is certain: `"".join` of all pieces equals `decode` of all ids.

    A decoder treats the first token apart (it drops a leading space) and writes U+FFFD for half a character.
    So each new piece is the difference of two decodes, with and without the new tokens, of a window that starts
    at a token whose text is already out; text that ends in U+FFFD waits. So does a run of byte tokens: the
    library replaces *every* byte of a run that turns out not to be UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._out = 0  # so many tokens of the window are out, and decode to `_out_text`
        self._out_text = ""

    def push(self, token: int) -> str:
        """The text that this id completes, often all of it, sometimes nothing."""
        if not self._tokenizer.shows(token):
            return ""
        self._window.append(token)
        if self._tokenizer.is_byte(token):
            return ""
        text = self._tokenizer.decode(self._window)
        return "" if text.endswith(_BROKEN) else self._advance(text)

    def finish(self) -> str:
        """What was held back. The stream is then at its end."""
        return self._advance(self._tokenizer.decode(self._window))

    def _advance(self, text: str) -> str:
        piece = text[len(self._out_text) :]
        newest = self._window[self._out :]
        newest_text = self._tokenizer.decode(newest)
        # Only a window whose start shows text of its own is past the decoder's care for a first token.
        if newest_text:
            self._window, text = newest, newest_text
        self._out, self._out_text = len(self._window), text
        return piece


class StopStrings:
    """Passes text on up to the first stop string, holding back only what may become one.

    The first is the one that is complete first (of two that end together, the longer), so the result does not
    depend on how the text was cut into pieces. `hit` is the stop string found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far, not given yet, that no stop string can claim any more."""
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.hit = min(found)
            self._held = ""
            return text[:at]
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        keep = next((k for k in range(min(longest, len(text)), 0, -1) if self._may_begin(text[-k:])), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, suffix: str) -> bool:
        return any(stop.startswith(suffix) for stop in self._stops)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … of a tokenizer_config.json, whose values are strings or {"content": …}."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} where there is no such file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModel(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise BrokenModel(f"{path} should hold a JSON object")
    return data
