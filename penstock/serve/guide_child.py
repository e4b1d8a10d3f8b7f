"""The child process that says which tokens may come next in answers that follow a rule. `guides` starts it.

Rules are JSON schemas and grammars, and come from clients. To compile a rule may take any time and memory, and so may
each step of an answer, because patterns become automata. So llguidance, which does both, is loaded here alone, and each
request has limits as in `confined_child`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import BadRequest
from penstock.serve.confined_child import answer_requests
from penstock.serve.schemas import STYLE

# llguidance's own limits, which break off in milliseconds what the process's limits would end in a second: fuel of a
# regex (50,000 a millisecond), states of its automaton (1 to 2 KB each), symbols of a grammar.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# The text of a JSON string, up to ten letters: which entries of the vocabulary are such a text is found once, and not
# for each mask of a string. With 128k entries a mask of a schema of strings takes 0.24 ms of processor time on average,
# and 0.40 without. A second slice, up to thirty letters, gains 0.05 ms more, and takes 11 MiB.
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}']
FEW = 64  # ids that are told one by one
_NOT_ZERO = re.compile(rb"[^\0]")
_COMPILED = 8  # rules that are kept, so that the answers to one request share one

# The ids that may come next, in one of three forms: a few ids; the number of a mask that was sent before; or a new
# number and its mask in base64. A schema has few masks of many ids: within a string, by how long it may still become.
Mask = list[int] | int | tuple[int, str]
NUMBERED = 32  # masks that both sides keep; the one that was asked for longest ago leaves


class Matchers:
    """Knows the answers that follow a rule, by number. `tokens`: the bytes of each id as Latin-1, "" where it may never
    come."""

    def __init__(self, tokens: list[str]) -> None:
        import llguidance

        self._llguidance = llguidance
        # One id more stands for all ids that end a text.
        vocabulary = _Tokens([token.encode("latin-1") for token in tokens])
        self._tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=len(tokens), slices=_SLICES)  # type: ignore[arg-type]
        vocabulary.tokens, vocabulary.greedy = [], self._tokenizer.greedy_tokenize
        self._limits = llguidance.LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._open: dict[int, Any] = {}
        self._numbered: OrderedDict[bytes, int] = OrderedDict()  # the bits of masks that the other side has
        self.facts = {"tokens": len(tokens)}

    @classmethod
    def open(cls, arguments: list[Any], reads: Callable[[Path], None]) -> Matchers:
        """`arguments`: the tokens."""
        return cls(arguments[0])

    def check(self, kind: str, text: str) -> None:
        """Compiles a rule (`schemas.Rule`). Raises BadRequest."""
        if (kind, text) not in self._compiled:
            try:
                grammar = self._grammar(kind, text)
            except (ValueError, RecursionError) as error:
                raise BadRequest(" ".join(str(error).split())[:300]) from None
            matcher = self._llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            _require_good(matcher)
            self._compiled[kind, text] = matcher
        self._compiled.move_to_end((kind, text))
        while len(self._compiled) > _COMPILED:
            self._compiled.popitem(last=False)

    def _grammar(self, kind: str, text: str) -> str:
        """A rule as llguidance reads it. Raises ValueError."""
        matcher = self._llguidance.LLMatcher
        if kind == "schema":
            return str(matcher.grammar_from_json_schema(text, overrides=STYLE))  # type: ignore[arg-type]
        if kind == "gbnf":
            from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

            try:
                text = gbnf_to_lark(text)
            except GbnfToLarkError as error:
                raise ValueError(str(error)) from None
        return str(matcher.grammar_from_lark(text))

    def begin(self, number: int, kind: str, text: str, tokens: list[int]) -> Mask:
        """Begins an answer that has some tokens already, and returns the mask of the next one. Raises BadRequest."""
        self.check(kind, text)
        matcher = self._open[number] = self._compiled[kind, text].deep_copy()
        matcher.consume_tokens(tokens)
        return self._mask(matcher)

    def step(self, number: int, token: int) -> Mask:
        """Notes one more token of an answer, and returns the mask of the next one. Raises BadRequest."""
        matcher = self._open[number]
        matcher.consume_token(token)
        return self._mask(matcher)

    def drop(self, number: int) -> None:
        """Forgets an answer that has ended."""
        self._open.pop(number, None)

    def _mask(self, matcher: Any) -> Mask:
        """What may come. Bits: one for each id and one for the end, the lowest of a byte first. Names and marks of JSON
        leave one id or a few, whose bits of 128k entries would take 21 KB each time."""
        _require_good(matcher)
        bits = matcher.compute_bitmask()
        _require_good(matcher)
        if (number := self._numbered.get(bits)) is not None:
            self._numbered.move_to_end(bits)
            return number
        if int.from_bytes(bits, "little").bit_count() > FEW:
            number = len(self._numbered) if len(self._numbered) < NUMBERED else self._numbered.popitem(last=False)[1]
            self._numbered[bits] = number
            return number, base64.b64encode(bits).decode()
        nonzero = ((each.start(), each[0][0]) for each in _NOT_ZERO.finditer(bits))
        return [8 * at + bit for at, byte in nonzero for bit in range(8) if byte >> bit & 1]


class _Tokens:
    """A vocabulary as llguidance reads it, once. Where a schema leaves no choice, it asks for the tokens of a text: it
    gets the longest ones that fit, by its own `greedy_tokenize`."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes]) -> None:
        self.eos_token_id = len(tokens)
        self.special_token_ids = [len(tokens)]
        self.tokens = [*tokens, b"<end>"]
        self.greedy: Callable[[str], list[int]] | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        assert self.greedy is not None, "nobody asks while the vocabulary is read"
        return self.greedy(text if isinstance(text, str) else text.decode())


def _require_good(matcher: Any) -> None:
    if matcher.is_error():
        lines = matcher.get_error().replace("<non-verbose/>", "").split("\n")
        raise BadRequest(" ".join(" ".join(lines).split())[:300] or "it allows nothing more")


def main() -> None:
    # One mask at a time needs no pool of threads, and each thread would take 64 MiB of the limit.
    os.putenv("RAYON_NUM_THREADS", "1")
    answer_requests(Matchers.open, ("check", "begin", "step", "drop"))


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError, json.JSONDecodeError):  # the parent ended while we answered
        main()
