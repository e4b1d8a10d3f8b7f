"""A model's tokenizer and chat template, opened in the process that calls.

Only `confined_child` does so: both are files that somebody put beside weights, and what they take of processor and
memory is theirs to decide. Everybody else has `Tokenizer`, which asks that child.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Core

from penstock.errors import BrokenModel
from penstock.serve import template
from penstock.serve.text_files import (
    MAX_SETTINGS_BYTES,
    MAX_TOKENIZER_BYTES,
    SETTINGS,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from penstock.store.files import read_bytes, read_json

# What a decoder writes for bytes that are not UTF-8, so also for half a character.
_BROKEN = "\ufffd"
# Where a stream stands: the ids of its window, how many of them are out, and the text of these. Whoever streams keeps
# it: the child remembers nothing from one request to the next.
StreamState = tuple[list[int], int, str]


class Vocabulary:
    """Made by `Vocabulary.open(folder)`. `facts` is all that others want to know of it, as JSON."""

    def __init__(self, core: Core, folder: Path, reads: Callable[[Path], None] = lambda _: None) -> None:
        """`core`: a Tokenizer of the `tokenizers` library. `reads` hears of each file before it is opened."""
        self._core = core
        config, special_map, self._generation_config, model_config = (
            _settings(folder / name, reads) for name in SETTINGS
        )
        self._templates = template.read_templates(folder, config, reads)
        own = folder / TEMPLATE
        self._template_file = own if own.is_file() else folder / TOKENIZER_CONFIG
        self._variables = {**_special_tokens(special_map), **_special_tokens(config)}
        # What tokenizer_config.json names is special even where tokenizer.json forgot to say so.
        core.add_special_tokens([t for t in self._variables.values() if core.token_to_id(t) is not None])
        self._special = {i for i, token in core.get_added_tokens_decoder().items() if token.special}
        self._bos = self._id_of("bos_token", model_config)
        self._eos_ids = self._find_eos(model_config)

    @classmethod
    def open(cls, folder: Path, reads: Callable[[Path], None] = lambda _: None) -> Vocabulary:
        """Reads a model's folder. Raises BrokenModel where a file is missing or damaged."""
        path = folder / TOKENIZER
        reads(path)
        content = read_bytes(path, MAX_TOKENIZER_BYTES).removeprefix(codecs.BOM_UTF8)
        try:
            core = Core.from_buffer(content)
        except MemoryError:
            raise
        except Exception as error:
            raise BrokenModel(f"{path} is not a tokenizer: {' '.join(str(error).split())[:200]}") from None
        del content
        # Some files ask to cut at 512 tokens or to pad: right for training, silent damage to a prompt.
        core.no_truncation()
        core.no_padding()
        return cls(core, folder, reads)

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "size": int(self._core.get_vocab_size(with_added_tokens=True)),
            "bos": self._bos,
            "eos_ids": sorted(self._eos_ids),
            "special": sorted(self._special),
            "bytes": self._byte_tokens(),
            "has_chat_template": bool(self._templates),
            "template_file": str(self._template_file),
            "generation_config": self._generation_config,
        }

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Ids of a text."""
        # Without the offsets of each token in the text, which `encode` keeps: half the time and memory, the same ids.
        (found,) = self._core.encode_batch_fast([text], add_special_tokens=add_special)
        return list(found.ids)

    def decode(self, ids: Iterable[int], skip_special: bool) -> str:
        """Text of ids. Ids that the tokenizer does not know are nothing."""
        possible = [i for i in ids if 0 <= i < 2**32]  # what the library can be asked for
        return str(self._core.decode(possible, skip_special_tokens=skip_special))

    def advance(self, window: list[int], out: int, out_text: str, at_end: bool) -> tuple[str, StreamState] | None:
        """The text that the last id of a stream's window completes, and where the stream is then; None: it waits.

        A decoder treats the first token apart (it drops a leading space) and writes U+FFFD for half a character.
        So each new piece is the difference of two decodes, with and without the new tokens, of a window that starts
        at a token whose text is already out; text that ends in U+FFFD waits, unless the stream is at its end.
        """
        if window and not (0 <= window[-1] < 2**32 and self._core.id_to_token(window[-1]) is not None):
            return "", (window[:-1], out, out_text)
        text = self.decode(window, skip_special=True)
        if text.endswith(_BROKEN) and not at_end:
            return None
        piece = text[len(out_text) :]
        newest = window[out:]
        newest_text = self.decode(newest, skip_special=True)
        # Only a window whose start shows text of its own is past the decoder's care for a first token.
        if newest_text:
            window, text = newest, newest_text
        return piece, (window, len(window), text)

    def chat(self, messages: list[template.Message], tools: Any) -> str:
        """A conversation as one prompt, by the model's own template. Raises BadRequest with the template's words."""
        return template.render(self._templates, self._variables, messages, tools)

    def check_templates(self) -> None:
        """Parses every template. Raises BrokenModel with the parser's words."""
        template.check_templates(self._templates)

    def _byte_tokens(self) -> list[int]:
        """Ids of `<0x00>` … `<0xFF>`, where their text depends on their neighbours."""
        state = self._core.decoder.__getstate__() if self._core.decoder is not None else b""
        if b'"ByteFallback"' not in state:
            return []
        names = {form.format(byte) for byte in range(256) for form in ("<0x{:02X}>", "<0x{:02x}>")}
        return [i for i in map(self._core.token_to_id, sorted(names)) if i is not None]

    def _id_of(self, name: str, model_config: dict[str, Any]) -> int | None:
        """A special token's id, by its name in tokenizer_config.json, else by config.json; fills its variable."""
        if name in self._variables:
            found = self._core.token_to_id(self._variables[name])
            return None if found is None else int(found)
        token = model_config.get(name + "_id")
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**32:
            return None
        text = self._core.id_to_token(token)
        if text is not None:
            self._variables[name] = text
        return token

    def _find_eos(self, model_config: dict[str, Any]) -> frozenset[int]:
        eos = self._id_of("eos_token", model_config)
        for config in (self._generation_config, model_config):
            given = config.get("eos_token_id")
            ids = given if isinstance(given, list) else [given]
            if given is not None and ids:
                if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                    raise BrokenModel(f"eos_token_id is {given!r:.100}; it should be a number or a list of numbers")
                return frozenset(ids)
        return frozenset() if eos is None else frozenset([eos])


def _settings(path: Path, reads: Callable[[Path], None]) -> dict[str, Any]:
    """A JSON object, {} where there is no such file."""
    reads(path)
    return read_json(path, MAX_SETTINGS_BYTES) if os.path.lexists(path) else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … of a tokenizer_config.json, whose values are strings or {"content": …}."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found
