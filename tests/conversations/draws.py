"""Draws cases of `tests.conversations`: a chat template, how the server runs, and what it is asked."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.cpu.engines import ROOT

CONTEXT = 512  # of the model
ASKED = 10  # requests of a case
PUBLISHED = ROOT.parent / "shared" / "data" / "templates"
_TOLD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
_PLAIN = _TOLD + "{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATES = {"plain": _PLAIN, "thinking": _PLAIN + "<think>\n", "thinks": "{# <think> </think> #}" + _PLAIN}
_HOW: tuple[tuple[str, ...], ...] = ((), (), ("--resident", "0"), ("--kv-home", "disk"), ("--kv-tokens", "512"))
_WORDS = (
    "hello", "the king", "😀", "👩\u200d👩\u200d👧", "naïve", "\n\n", " ", "日本語", "\u200b", "e\u0301", "{",
    '"', "\\",
    "\t", "\x00", "\ufeff", "\u2028", "my lord", "<|im_end|>", "</s>", "<think>", "</think>", "[INST]", "<tool_call>",
)  # fmt: skip
_STOPS = (["\n"], ["the", " I", "l no"], ["e", "zz"], ["I'll n"], ["😀"])
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é😀"]}}, "required": ["a", "b"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"enum": ["one", "two", "three"]},
)
_CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "name": "get_weather",
        "description": "w",
        "parameters": {
            **_CLOSED,
            "properties": {"city": {"enum": ["Paris", "é😀", 'a"b\\n']}, "n": {"type": "integer"}},
            "required": ["city"],
        },
    },
    {"name": "f", "description": "", "parameters": {**_CLOSED, "properties": {}}},
    {
        "name": "g-h_2",
        "description": "x",
        "parameters": {
            **_CLOSED,
            "properties": {
                "a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
                "b": {"type": "string", "maxLength": 3},
            },
            "required": ["a"],
        },
    },
)


@dataclass(frozen=True)
class Case:
    """A server: the name of its template, and its flags."""

    number: int
    template: str
    flags: tuple[str, ...]

    def __str__(self) -> str:
        return f"case {self.number}: {self.template} {' '.join(self.flags)}"


@dataclass(frozen=True)
class Asked:
    """A request in no dialect yet. `must`: the answer has to call a tool. `options`: of OpenAI's chats alone."""

    messages: list[dict[str, str]]
    max_tokens: int
    tools: tuple[dict[str, Any], ...]
    must: bool
    schema: dict[str, Any] | None
    options: dict[str, Any]


def draw(number: int) -> Case:
    rng = random.Random(number)
    published = sorted(file.name for file in PUBLISHED.glob("*.jinja"))
    template = rng.choice([*TEMPLATES, *published])
    return Case(number, template, (*rng.choice(_HOW), "--batch", str(rng.choice((1, 2, 3)))))


def template_text(name: str) -> str:
    return TEMPLATES[name] if name in TEMPLATES else (PUBLISHED / name).read_text()


def asked(rng: random.Random) -> Asked:
    messages = [{"role": "system", "content": _text(rng)}] if rng.random() < 0.2 else []
    for _ in range(rng.randint(0, 2)):
        messages += [{"role": "user", "content": _text(rng)}, {"role": "assistant", "content": _text(rng)}]
    messages.append({"role": "user", "content": _text(rng)})
    tools = tuple(rng.sample(TOOLS, rng.randint(1, 3))) if rng.random() < 0.5 else ()
    schema = rng.choice(_SCHEMAS) if not tools and rng.random() < 0.25 else None
    return Asked(messages, rng.choice((1, 3, 10, 40, 120)), tools, rng.random() < 0.6, schema, _options(rng))


def _options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": 0.0}
    if rng.random() < 0.4:
        options |= {"temperature": rng.choice((0.7, 1.0, 1.5)), "seed": rng.randint(0, 1000)}
    for name, values, share in (
        ("stop", _STOPS, 0.3),
        ("presence_penalty", (1.5,), 0.2),
        ("skip_special_tokens", (False,), 0.2),
        ("top_k", (1, 40), 0.2),
        ("logprobs", (True,), 0.3),
        ("reasoning_budget", (0, 2, 5), 0.2),
        ("parallel_tool_calls", (False,), 0.2),
    ):
        if rng.random() < share:
            options[name] = rng.choice(values)
    return options


def _text(rng: random.Random) -> str:
    words = [rng.choice(_WORDS) for _ in range(rng.randint(0, 5))]
    return rng.choice(("", " ")).join(words) or "a"
