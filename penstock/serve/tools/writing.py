"""How models write calls of tools and their thoughts, as data: a row for each family of chat templates.

An answer that calls tools is

    text  head  open  call (between call)*  close        call = before NAME middle ARGUMENTS after

where ARGUMENTS are a JSON object. `grammar` holds answers to it and `reading` takes them apart, so neither knows a
family by name. Each row follows the chat template that its model was published with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

THINK, THOUGHT = "<think>", "</think>"  # around what a model thinks, in every family that marks it so


@dataclass(frozen=True)
class Writing:
    """How one family writes calls.

    sign               a chat template that holds this text is of the family
    head               the text that calls begin with; "" where the first character decides between calls and text
    between            the text between two calls; None where an answer has one call at most
    lead               a token that may stand before everything else, and means nothing
    marks              texts that a vocabulary may have as special tokens. Such a token's text is left out of answers
                       unless `skip_special_tokens` is off
    arguments_as_text  the template takes the arguments of earlier calls as text, not as an object
    channels           the answer is written in channels, each with a name (gpt-oss's harmony). The name of a channel
                       then holds the name of the tool
    """

    name: str
    sign: str
    head: str
    open: str
    before: str
    middle: str
    after: str
    between: str | None
    close: str
    lead: str = ""
    marks: tuple[str, ...] = ()
    arguments_as_text: bool = False
    channels: bool = False


# Hermes, Qwen 2.5 and 3. Also what a template without tools is told, in words (`asked.in_words`).
HERMES = Writing(
    "hermes", "<tool_call>",
    head="<tool_call>", open="", before='\n{"name": "', middle='", "arguments": ', after="}\n</tool_call>",
    between="\n<tool_call>", close="", marks=("<tool_call>", "</tool_call>"),
)  # fmt: skip
LLAMA_3 = Writing(
    "llama 3", '"parameters": dictionary of argument name',
    head="", open="", before='{"name": "', middle='", "parameters": ', after="}", between=None, close="",
    lead="<|python_tag|>", marks=("<|python_tag|>",),
)  # fmt: skip
MISTRAL = Writing(
    "mistral", "[TOOL_CALLS]",
    head="[TOOL_CALLS]", open="[", before='{"name": "', middle='", "arguments": ', after="}", between=", ", close="]",
    marks=("[TOOL_CALLS]",),
)  # fmt: skip
DEEPSEEK = Writing(
    "deepseek", "<｜tool▁calls▁begin｜>",
    head="<｜tool▁calls▁begin｜>", open="", before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", middle="\n```json\n",
    after="\n```<｜tool▁call▁end｜>", between="\n", close="<｜tool▁calls▁end｜>", arguments_as_text=True,
    marks=(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    ),
)  # fmt: skip
FIREFUNCTION = Writing(
    "firefunction", "functools[",
    head="functools[", open="", before='{"name": "', middle='", "arguments": ', after="}", between=", ", close="]",
    arguments_as_text=True,
)  # fmt: skip
COMMAND_R = Writing(
    "command r", r"\nAction:\n```json",
    head="Action:\n```json\n", open="[\n    ", before='{\n        "tool_name": "', middle='",\n        "parameters": ',
    after="\n    }", between=",\n    ", close="\n]\n```",
)  # fmt: skip
HARMONY = Writing(
    "harmony", "<|channel|>",
    head="<|channel|>commentary to=functions.", open="", before="", middle=" <|constrain|>json<|message|>", after="",
    between=None, close="", channels=True,
    marks=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
)  # fmt: skip
# The first whose sign is found counts. DeepSeek's templates may quote signs of other families, so theirs comes first.
WRITINGS = (DEEPSEEK, HARMONY, COMMAND_R, MISTRAL, FIREFUNCTION, LLAMA_3, HERMES)


def writing_of(templates: Iterable[str]) -> Writing | None:
    """The writing of the first of these templates that knows tools; None if no template does."""
    for source in templates:
        if "tools" in source or "<|channel|>" in source:
            for writing in WRITINGS:
                if writing.sign in source:
                    return writing
    return None


def thinks(templates: Iterable[str]) -> bool:
    """Whether a model with these templates marks what it thinks."""
    return any(THOUGHT in source for source in templates)


def by_name(name: str | None) -> Writing | None:
    """The writing that has this name."""
    return next((writing for writing in WRITINGS if writing.name == name), None)
