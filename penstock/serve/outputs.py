"""What Python programs give to `LLM` and get from it: prompts, conversations, answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.serve.generation import Generation
from penstock.serve.log_probabilities import Likely

Prompt = str | Sequence[int]
# Ids beside texts are refused when it runs. As a union of two sequences mypy would not take a literal [ids, "text"].
Prompts = str | Sequence[int | Prompt]
Messages = Sequence[Mapping[str, Any]]
Conversations = Messages | Sequence[Messages]


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `finish_reason`: stop or length. `logprobs`: of each token, where they were asked for. `ttft_s`:
    seconds from the request to the first token. `inter_token_s`: seconds between its tokens."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[Likely]
    ttft_s: float
    inter_token_s: list[float]

    @property
    def decode_tokens_per_s(self) -> float:
        """Of this answer alone, after its first token; 0 where there is only one."""
        seconds = sum(self.inter_token_s)
        return len(self.inter_token_s) / seconds if seconds else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """What came of a prompt. `prompt`: its text; None where it was given as ids or as messages. `outputs`: its `n`
    answers. `cached_tokens`: tokens of the prompt that had been read for an earlier answer. The properties are those
    of the first answer."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int

    @classmethod
    def of(cls, prompt: str | None, ids: Sequence[int], answers: Sequence[Generation]) -> RequestOutput:
        outputs = [
            CompletionOutput(i, a.text, a.token_ids, a.finish_reason, a.logprobs, a.ttft_s, a.inter_token_s)
            for i, a in enumerate(answers)
        ]
        return cls(prompt, list(ids), outputs, answers[0].cached_tokens)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def ttft_s(self) -> float:
        return self.outputs[0].ttft_s

    @property
    def decode_tokens_per_s(self) -> float:
        return self.outputs[0].decode_tokens_per_s


def prompt_list(prompts: object) -> list[str | list[int]]:
    """The prompts of `LLM.generate` as a list: one text, one list of ids, or a list of either. Raises TypeError for
    anything else: of a dict the keys would be read, and None would fail deep inside."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        kind = type(prompts).__name__
        raise TypeError(f"prompts should be a string, a list of token ids, or a list of either, not {kind}")
    given: list[Any] = list(prompts)  # type: ignore[call-overload]
    if given and all(map(_is_id, given)):
        return [given]
    for i, prompt in enumerate(given):
        if not isinstance(prompt, str) and not (_is_list(prompt) and all(map(_is_id, prompt))):
            kind = type(prompt).__name__
            raise TypeError(f"prompts[{i}] should be a string or a list of token ids, not {kind}")
    return [prompt if isinstance(prompt, str) else list(prompt) for prompt in given]


def conversations(messages: object) -> list[list[dict[str, Any]]]:
    """One conversation, or a list of some, as a list of them. Raises TypeError for anything else."""
    if _is_list(messages):
        given: list[Any] = list(messages)  # type: ignore[call-overload]
        asked = [given] if all(isinstance(each, Mapping) for each in given) else given
        if given and all(_is_list(each) and each and all(map(_is_message, each)) for each in asked):
            return [[dict(message) for message in each] for each in asked]
    raise TypeError('messages should be a list of {"role": "user", "content": "…"}, or a list of such lists')


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)
