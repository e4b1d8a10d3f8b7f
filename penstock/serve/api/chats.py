"""A chat that a client asks to continue, whatever its dialect: the prompt, and how its answer is held and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from penstock.errors import BadRequest
from penstock.serve.sampling import SamplingParams
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.tools.asked import Tools, for_template
from penstock.serve.tools.grammar import grammar
from penstock.serve.tools.reading import Reading
from penstock.serve.tools.writing import HERMES, THINK, THOUGHT, Writing


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation, and what its answer may look like.

    ids       the prompt's tokens
    tools     the tools that the answer may call
    marks     the marks of `writing` that are special tokens → their ids
    writing   how the answer calls tools, or names its channels; None if it does neither
    thinks    the model marks its thoughts
    thinking  the prompt has opened the thoughts, so the answer begins within them
    text      the prompt as text
    """

    ids: list[int]
    tools: Tools | None = None
    marks: Mapping[str, int] = field(default_factory=dict)
    writing: Writing | None = None
    thinks: bool = False
    thinking: bool = False
    text: str = ""

    def ruled(self, params: SamplingParams) -> SamplingParams:
        """`params` with a grammar that holds the answer's calls to the tools. Raises BadRequest if the client asks for
        another form of the answer too."""
        params = self._budgeted(params)
        if self.tools is not None:
            if params.rule is not None:
                raise BadRequest("response_format and grammar do not go with tools")
            assert self.writing is not None, "tools are called in some writing"
            held = grammar(self.writing, self.tools, self.marks, self.thinks, self.thinking)
            return replace(params, grammar=held, skip_special_tokens=False)
        marked = self.writing is not None or (self.thinks and THOUGHT in self.marks)
        return replace(params, skip_special_tokens=False) if marked else params

    def _budgeted(self, params: SamplingParams) -> SamplingParams:
        """An answer in a form that the client asked for does not think, so it needs no budget."""
        thinks = self.thinks and params.rule is None
        if params.thinking_tokens is None or not thinks:
            return replace(params, thinking_tokens=None)
        return replace(params, thinking_begun=self.thinking)

    def readings(self, params: SamplingParams) -> Callable[[], Reading]:
        """What makes a reading of each answer, and does not keep the prompt. An answer in a form that the client asked
        for has neither thoughts nor calls."""
        free = params.rule is None or self.tools is not None
        return partial(Reading, self.writing if free else None, free and self.thinks, free and self.thinking)

    def reading(self, params: SamplingParams) -> Reading:
        """A reading of one answer."""
        return self.readings(params)()


def chat_of(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], tools: Tools | None) -> ChatPrompt:
    """Renders a conversation (`Tokenizer.chat`), in which tools may be called. The tokenizer's process takes some time
    for it. Raises BadRequest as that does, and for calls in the conversation that are malformed."""
    told, given = for_template(messages, tokenizer.writing, tools)
    text = _rendered(tokenizer, told, given)
    ids = tokenizer.encode(text, add_special=not tokenizer.has_chat_template)
    writing = tokenizer.writing if tokenizer.writing is not None and tokenizer.writing.channels else None
    if tools is not None:
        writing = tokenizer.writing or HERMES
    channels = writing is not None and writing.channels
    thinking = tokenizer.thinks and text.rstrip().endswith(THINK)
    return ChatPrompt(ids, tools, tokenizer.marks, writing, tokenizer.thinks and not channels, thinking, text)


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """The conversation by the model's template. Some templates fail without a list of tools, and some with a system
    prompt: these get an empty list, and the system prompt before the first message of the user. Raises BadRequest."""
    others = [(messages, tools)]
    if tools is None:
        others.append((messages, []))
    if len(messages) > 1 and messages[0]["role"] == "system" and messages[1]["role"] == "user":
        system, first, *rest = messages
        folded = {**first, "content": f"{system['content']}\n\n{first['content']}"}
        others.append(([folded, *rest], tools))
    refused: BadRequest | None = None
    for told, given in others:
        try:
            return tokenizer.chat(told, given)
        except BadRequest as error:
            refused = refused or error
    assert refused is not None, "the conversation as it is was tried"
    raise refused
