"""Opens a model's tokenizer and chat template in the calling process. Only `confined_child` does so.

Both are files that somebody put beside weights, and may take any amount of processor time and memory. All other code
uses `Tokenizer`, which asks that child.
"""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Core

from penstock.errors import BrokenModel
from penstock.serve import template
from penstock.serve.added_tokens import settle
from penstock.serve.text_files import (
    MAX_SETTINGS_BYTES,
    MAX_TOKENIZER_BYTES,
    SETTINGS,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from penstock.serve.token_bytes import BROKEN, token_bytes
from penstock.serve.tools.budget import THOUGHT_ENDS
from penstock.serve.tools.writing import HERMES, THINK, THOUGHT, thinks, writing_of
from penstock.store.files import read_bytes, read_json

# A decoder writes this for bytes that are not UTF-8, so also for half a character.
# The state of a stream: the ids of its window, how many of them are out already, and the text of these. `TextStream`
# keeps it, for the child remembers nothing from one request to the next.
StreamState = tuple[list[int], int, str]


class Vocabulary:
    """A model's tokenizer and chat templates. Made by `Vocabulary.open(folder)`. Raises BrokenModel for settings that
    are wrong."""

    def __init__(self, core: Core, folder: Path, reads: Callable[[Path], None] = lambda _: None) -> None:
        """`core`: a Tokenizer of the `tokenizers` library. `reads` is called with each file before it is opened."""
        self._core = core
        config, special_map, self._generation_config, model_config = (
            _settings(folder / name, reads) for name in SETTINGS
        )
        self._templates = template.read_templates(folder, config, reads)
        # A template for tools, where there is one, knows how they are called.
        self._writing = writing_of(self._templates[name] for name in sorted(self._templates, reverse=True))
        own = folder / TEMPLATE
        self._template_file = own if own.is_file() else folder / TOKENIZER_CONFIG
        inner = config.get("extra_special_tokens")
        self._variables = {
            **_special_tokens(special_map),
            **_special_tokens(inner if isinstance(inner, dict) else {}),
            **_special_tokens(config),
        }
        settle(core, config, special_map, self._variables.values())
        self._special = {i for i, token in core.get_added_tokens_decoder().items() if token.special}
        self._bos = self._id_of("bos_token", model_config)
        self._eos_ids = self._find_eos(model_config)

    @classmethod
    def open(cls, folder: Path, reads: Callable[[Path], None] = lambda _: None) -> Vocabulary:
        """Opens the files of a model's folder. Raises BrokenModel where a file is missing or damaged."""
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
        # Some files ask to cut texts at 512 tokens, or to pad them. That is right for training, and silent damage to a
        # prompt.
        core.no_truncation()
        core.no_padding()
        return cls(core, folder, reads)

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that `Tokenizer` wants to know of these files, as JSON."""
        return {
            "size": int(self._core.get_vocab_size(with_added_tokens=True)),
            "bos": self._bos,
            "eos_ids": sorted(self._eos_ids),
            "special": sorted(self._special),
            "bytes": self._byte_tokens(),
            "has_chat_template": bool(self._templates),
            "template_file": str(self._template_file),
            "generation_config": self._generation_config,
            "writing": None if self._writing is None else self._writing.name,
            "thinks": (marked := thinks(self._templates.values())),
            "thought_end_ids": self.encode(THOUGHT_ENDS, add_special=False) if marked else [],
            "marks": self._marks(),
        }

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Ids of a text."""
        # The library's `encode` gives the same ids in twice the time and memory: it keeps each token's offsets in the
        # text.
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoding.ids)

    def decode(self, ids: Iterable[int], skip_special: bool) -> str:
        """Text of ids. Ids that the tokenizer does not know are left out."""
        possible = [i for i in ids if 0 <= i < 2**32]  # the library takes no others
        return str(self._core.decode(possible, skip_special_tokens=skip_special))

    def texts(self, ids: list[int]) -> list[str]:
        """The text of each id by itself, special ones too."""
        return [self.decode([i], skip_special=False) for i in ids]

    def token_bytes(self) -> list[str] | None:
        """The bytes of each id as Latin-1, "" for special ones (`token_bytes.token_bytes`)."""
        pieces = token_bytes(self._core, self._special, self._byte_tokens())
        return None if pieces is None else [each.decode("latin-1") for each in pieces]

    def advance(self, window: list[int], out: int, out_text: str, at_end: bool) -> tuple[str, StreamState] | None:
        """The text that the last id of a stream's window completes, and the stream's new state. None where the text
        has to wait for more tokens. `window`, `out`, `out_text`: the stream's state, with the new id in the window.

        A decoder treats the first token apart (it drops a leading space), and writes U+FFFD for half a character. So
        the window starts at a token whose text is out already, and a new piece is the text of the whole window less the
        text that is out. Text that ends in U+FFFD waits, unless the stream is at its end.
        """
        if window and not (0 <= window[-1] < 2**32 and self._core.id_to_token(window[-1]) is not None):
            return "", (window[:-1], out, out_text)
        text = self.decode(window, skip_special=True)
        if text.endswith(BROKEN) and not at_end:
            return None
        piece = text[len(out_text) :]
        newest = window[out:]
        newest_text = self.decode(newest, skip_special=True)
        # The window may start at the newest tokens only if these have text of their own: the decoder's treatment of a
        # first token then falls on text that is out.
        if newest_text:
            window, text = newest, newest_text
        return piece, (window, len(window), text)

    def advance_all(
        self, streams: list[tuple[list[int], int, str, bool]]
    ) -> list[tuple[tuple[str, StreamState] | None, float]]:
        """`advance` of several streams, each with the seconds of processor time that it took."""
        timed = []
        for each in streams:
            start_s = time.process_time()
            progress = self.advance(*each)
            timed.append((progress, time.process_time() - start_s))
        return timed

    def chat(self, messages: list[template.Message], tools: Any) -> str:
        """A conversation as one prompt, by the model's own template. Raises BadRequest with the template's message."""
        return template.render(self._templates, self._variables, messages, tools)

    def check_templates(self) -> None:
        """Parses every template. Raises BrokenModel with the parser's message."""
        template.check_templates(self._templates)

    def _byte_tokens(self) -> list[int]:
        """Ids of `<0x00>` … `<0xFF>` in a tokenizer where the text of these tokens depends on their neighbours; else
        none."""
        state = self._core.decoder.__getstate__() if self._core.decoder is not None else b""
        if b'"ByteFallback"' not in state:
            return []
        names = {form.format(byte) for byte in range(256) for form in ("<0x{:02X}>", "<0x{:02x}>")}
        return [i for i in map(self._core.token_to_id, sorted(names)) if i is not None]

    def _marks(self) -> dict[str, int]:
        """Ids of the marks around calls of tools, and around thoughts, that are special tokens here."""
        marks = (*(self._writing or HERMES).marks, THINK, THOUGHT)
        ids = {mark: self._core.token_to_id(mark) for mark in marks}
        return {mark: i for mark, i in ids.items() if i in self._special}

    def _id_of(self, name: str, model_config: dict[str, Any]) -> int | None:
        """A special token's id, by its text in tokenizer_config.json, else by config.json. In the second case its text
        becomes a variable of the templates."""
        if name in self._variables:
            known = self._core.token_to_id(self._variables[name])
            return None if known is None else int(known)
        token = model_config.get(name + "_id")
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**32:
            return None
        text = self._core.id_to_token(token)
        if text is not None:
            self._variables[name] = text
        return token

    def _find_eos(self, model_config: dict[str, Any]) -> frozenset[int]:
        """The ids that end a text: by generation_config.json, else config.json, else tokenizer_config.json. Raises
        BrokenModel where they are no numbers."""
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
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
