"""Turns text into ids and ids into text, by the model's own tokenizer.json and chat template; also text that streams.

A child process opens both files (`confined`). Here are the requests to it, each with its limits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import BadRequest, BrokenModel
from penstock.serve import template
from penstock.serve.confined import Child, ChildLimits, Confined, Naming
from penstock.serve.text_files import TOKENIZER
from penstock.serve.text_limits import TextLimits
from penstock.serve.tools.writing import Writing, by_name
from penstock.store.packed import check_files, is_packed

# To decode an answer may take as long as a request without a text, and this for each token. A token takes some 10 µs.
_CPU_S_PER_TOKEN = 1e-3
_KEPT_TEXTS, _KEPT_CHARACTERS = 1 << 14, 64  # single tokens' texts: so many of them, of at most so many characters


class Tokenizer:
    """A model's tokenizer. Made by `Tokenizer.open(folder)`.

    `size`: entries, with added tokens; the model's vocabulary may be larger (padded). `bos`: the id that a text begins
    with, if any. `eos_ids`: the ids that end a text. `generation_config`: the content of the model's file, {} without
    one. `writing`: how the chat template has calls of tools written; None where it knows none. `thinks`: whether it
    marks what a model thinks, which `thought_end_ids` end. `marks`: ids of the marks of calls that are special tokens
    here.
    """

    def __init__(
        self, folder: Path, within_bytes: int | None, spare: Child | None = None, naming: Naming = nullcontext
    ) -> None:
        """Raises BrokenModel where a file of the folder is missing, damaged, or takes more than it may."""
        self.folder, self._limits = folder, TextLimits.of(folder, within_bytes)
        # A method of the limits and not of this object: with a reference back to it the child would live until the
        # garbage collector comes.
        self.naming = naming
        self._child = Confined(folder, partial(self._limits.now, "opening it"), spare=spare, naming=naming)
        facts = self._child.open()
        self.size: int = facts["size"]
        self.bos: int | None = facts["bos"]
        self.eos_ids: frozenset[int] = frozenset(facts["eos_ids"])
        self.has_chat_template: bool = facts["has_chat_template"]
        self.generation_config: dict[str, Any] = facts["generation_config"]
        self.writing: Writing | None = by_name(facts["writing"])
        self.thinks: bool = facts["thinks"]
        self.marks: dict[str, int] = facts["marks"]
        self.thought_end_ids: tuple[int, ...] = tuple(facts["thought_end_ids"])
        self._template_file = Path(facts["template_file"])
        self._special, self._bytes = frozenset(facts["special"]), frozenset(facts["bytes"])
        self._texts: dict[int, str] = {}  # id → text, of ids that were asked for
        self._prefetches = True

    @classmethod
    def open(
        cls, folder: Path, within_bytes: int | None = None, verify: bool = True, spare: Child | None = None,
        naming: Naming = nullcontext,
    ) -> Tokenizer:  # fmt: skip
        """Opens the tokenizer of a model's folder. `within_bytes`: the most memory of this process and the tokenizer's
        together (the limit of --host-memory). `verify`: a packed model's files are compared with their checksums.
        `spare`: a child that was started before. `naming`: as for `Confined`. Raises BrokenModel where there is no
        tokenizer.json, and as the constructor does; DamagedModel where a file has changed."""
        if verify and is_packed(Path(folder)):
            check_files(Path(folder))
        if not os.path.lexists(Path(folder) / TOKENIZER):
            raise BrokenModel(f"{folder} has no {TOKENIZER}: save it with the model's tokenizer in that format")
        return cls(Path(folder), within_bytes, spare, naming)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of a text. `add_special`: puts BOS first where tokenizer.json says so.

        As in transformers, `add_bos_token` of tokenizer_config.json does not count beside a tokenizer.json. Raises
        BadRequest where the text cannot be UTF-8, and BrokenModel where encoding takes more than it may.
        """
        try:
            nbytes = len(text.encode())
        except (AttributeError, UnicodeEncodeError):
            raise BadRequest("the prompt is not valid Unicode text (UTF-8)") from None
        ids: list[int] = self._ask("encode", [text, add_special], self._limits.now("encoding a text with it", nbytes))
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids. Ids that the tokenizer does not know are left out. Raises BrokenModel where decoding takes more
        than it may."""
        plain = [int(i) for i in ids]
        text: str = self._ask("decode", [plain, skip_special], self._limits.now("decoding with it", 4 * len(plain)))
        return text

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """The text of each id by itself, special ones too. Raises BrokenModel where decoding takes more than it may."""
        known, wanted = self._texts, {int(i) for i in ids}
        texts_of = {i: text for i in wanted if (text := known.get(i)) is not None}
        if new := sorted(wanted - texts_of.keys()):
            texts: list[str] = self._ask("texts", [new], self._limits.now("decoding with it", 16 * len(new)))
            texts_of.update(zip(new, texts, strict=True))
            if len(known) + len(new) > _KEPT_TEXTS:
                self._texts = known = {}  # another thread may be reading the old one
            known.update((i, texts_of[i]) for i in new[:_KEPT_TEXTS] if len(texts_of[i]) <= _KEPT_CHARACTERS)
        return texts_of

    def prefetch_texts(self, ids: Iterable[int]) -> None:
        """Asks the child for `texts` ahead of time, so that later callers have them at hand. After a failure it asks no
        more: each later caller then asks, and fails, by itself."""
        if self._prefetches:
            try:
                self.texts(ids)
            except Exception:
                self._prefetches = False

    def has_texts(self, ids: Iterable[int]) -> bool:
        """Whether `texts` of these ids would ask nobody."""
        return all(i in self._texts for i in ids)

    def token_bytes(self) -> list[str] | None:
        """The bytes that each id adds to a text, as Latin-1: "" for special ones, None where the tokenizer's tokens
        have no bytes of their own. Raises BrokenModel where that takes more than it may."""
        token_bytes: list[str] | None
        token_bytes = self._ask("token_bytes", [], self._limits.now("the bytes of its tokens", 16 * self.size))
        return token_bytes

    def stream(self, whole: bool = False, skip_special: bool = True) -> TextStream | Whole:
        """Makes text of one answer's ids. `whole`: no text is wanted before the end. `skip_special`: special tokens
        have none. Where they are shown they cut the text, and what follows is decoded apart, of a whole answer too."""
        if whole and skip_special:
            return Whole(self)
        limits = self._limits.now("decoding an answer with it")
        name = None if skip_special else lambda i: self.texts([i])[i]
        return TextStream(self._child, limits, self._special, self._bytes, name)

    def advance(self, streams: Sequence[TextStream | Whole]) -> None:
        """Prepares the `text` of several streams of this tokenizer with one request to the child, instead of one for
        each. Where that fails, nothing is prepared: each stream then asks alone, and the one at fault fails alone."""
        asking = [each for each in streams if isinstance(each, TextStream) and each.asks and not each.alone]
        if len(asking) < 2:
            return
        least_s = min(each.limits.cpu_s - each.limits.spent_s for each in asking)
        limits = replace(asking[0].limits, cpu_s=least_s, spent_s=0.0)
        try:
            answers, _ = self._child.ask("advance_all", [[each.request(False) for each in asking]], limits)
        except Exception:
            for each in asking:
                each.alone = True
            return
        for each, (progress, taken_s) in zip(asking, answers, strict=True):
            each.prepare(progress, taken_s)

    def chat(self, messages: Sequence[template.Message], tools: Any = None) -> str:
        """A conversation as one prompt, up to the point where the assistant speaks. `encode_chat` gives its ids.

        Where the model has no template of its own, the prompt is plain lines of User and Assistant. Raises BadRequest
        where JSON cannot hold messages or tools, or the template refuses them; BrokenModel where the template takes
        more than it may.
        """
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise BadRequest('a message should be an object like {"role": "user", "content": "…"}')
        if not self.has_chat_template:
            return template.render_plain(list(messages))
        try:
            nbytes = len(json.dumps([messages, tools]))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"messages and tools should be JSON: {error}") from None
        limits = self._limits.now("rendering a chat with it", nbytes, self._template_file)
        text: str = self._ask("chat", [list(messages), tools], limits)
        return text

    def encode_chat(self, messages: Sequence[template.Message]) -> list[int]:
        """`chat` as ids. A template writes BOS itself, so none is added to it: two of them cost quality."""
        return self.encode(self.chat(messages), add_special=not self.has_chat_template)

    def check_templates(self) -> None:
        """Parses every chat template, and runs none. Raises BrokenModel with the parser's words."""
        self._ask("check_templates", [], self._limits.now("parsing it", file=self._template_file))

    def close(self) -> None:
        """Ends the child; it would start again with the next request."""
        self._child.close()

    @property
    def peak_bytes(self) -> int:
        """The most bytes of memory that the child had so far."""
        return self._child.peak_bytes

    def _ask(self, action: str, arguments: list[Any], limits: ChildLimits) -> Any:
        return self._child.ask(action, arguments, limits)[0]


class TextStream:
    """Turns an answer's ids into text as soon as the text is certain. `"".join` of all pieces equals `decode` of all
    ids.

    `Vocabulary.advance` decides which text is certain. A run of byte tokens waits here until it ends, for the library
    replaces *every* byte of a run that turns out not to be UTF-8.
    """

    def __init__(
        self, child: Confined, limits: ChildLimits, special: Container[int], byte_tokens: Container[int],
        name: Callable[[int], str] | None = None,
    ) -> None:  # fmt: skip
        """`limits`: the limits of decoding the whole answer, to which each token adds. `special`, `byte_tokens`: ids.
        `name`: the text of a special one; None where they have none."""
        self._child, self.limits, self._special, self._bytes = child, limits, special, byte_tokens
        self._name = name
        self._window: list[int] = []
        self._out = 0  # how many tokens of the window are out already; they decode to `_out_text`
        self._out_text = ""
        self.alone = False  # whether it is to ask by itself, since a request together with others failed
        self.asks = False  # whether a token has come that may complete a text, and the child was not asked about it
        self._piece = ""  # that is certain, and was not returned yet

    def take(self, token: int) -> None:
        """Takes the next id. `text` then says what it completes."""
        if token not in self._special:
            self._window.append(token)
            self.asks = token not in self._bytes
        elif self._name is not None:  # what comes behind it is decoded apart
            if self._window:
                self._advance(at_end=True)
            self._piece += self._name(token)
            self._window, self._out, self._out_text = [], 0, ""

    def text(self) -> str:
        """The text that the latest id completes, often all of it, sometimes nothing."""
        if self.asks:
            self._advance(at_end=False)
        piece, self._piece = self._piece, ""
        return piece

    def finish(self) -> str:
        """Ends the stream and returns the text that was held back."""
        self._advance(at_end=True)
        return self.text()

    def request(self, at_end: bool) -> list[Any]:
        """What `Vocabulary.advance` is asked."""
        return [self._window, self._out, self._out_text, at_end]

    def prepare(self, progress: list[Any] | None, taken_s: float) -> None:
        """Takes the answer to `request`, which took so much processor time."""
        cpu_s, spent_s = self.limits.cpu_s + _CPU_S_PER_TOKEN, self.limits.spent_s + taken_s
        self.limits = replace(self.limits, cpu_s=cpu_s, spent_s=spent_s)
        self.asks = False
        if progress is not None:
            piece, (self._window, self._out, self._out_text) = progress
            self._piece += piece

    def _advance(self, at_end: bool) -> None:
        self.prepare(*self._child.ask("advance", self.request(at_end), self.limits))


class Whole:
    """A TextStream whose only piece comes at the end. It makes one request, and not one for each token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []

    def take(self, token: int) -> None:
        self._ids.append(token)

    def text(self) -> str:
        return ""

    def finish(self) -> str:
        """The text of all ids."""
        return self._tokenizer.decode(self._ids)


class StopStrings:
    """Passes text on up to the first stop string. Holds back only text that may be the beginning of one.

    The first stop string is the one that is complete first; of two that end together, the longer. So the result does
    not depend on how the text was cut into pieces. `hit`: the stop string that was found, else None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Takes more text. Returns the text, not returned before, that can no longer be part of a stop string."""
        if self.hit is not None:
            return ""
        text = self._held + text
        hits = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if hits:
            _, start, self.hit = min(hits)
            self._held = ""
            return text[:start]
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        keep = next((k for k in range(min(longest, len(text)), 0, -1) if self._may_begin(text[-k:])), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, suffix: str) -> bool:
        return any(stop.startswith(suffix) for stop in self._stops)
