"""How OpenAI's API writes answers down: choices, chunks of them, log probabilities, and what was used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.serve.api import logprobs
from penstock.serve.generation import Generation
from penstock.serve.sampling import Likely, ids_of
from penstock.serve.scores import Scores
from penstock.serve.tokenizer import Tokenizer


@dataclass(frozen=True)
class Shape:
    """How answers are written. `kind`: chat.completion or text_completion. `head`: the fields of every object.
    `tokenizer`: for the texts of single tokens, where log probabilities are wanted. `echoed`: of each answer the prompt
    that is written before it; () where none is."""

    kind: str
    head: dict[str, Any]
    tokenizer: Tokenizer
    echoed: tuple[str, ...] = ()

    @property
    def chats(self) -> bool:
        return self.kind == "chat.completion"

    def has_texts(self, tokens: Sequence[Likely]) -> bool:
        """Whether the texts of these tokens are at hand."""
        return not tokens or self.tokenizer.has_texts(ids_of(tokens))

    def choice(self, index: int, answer: Generation) -> dict[str, Any]:
        """A whole answer. Where log probabilities were asked for it takes 70 µs for each token in them."""
        prompt = self.echo(index)
        said = (
            {"message": {"role": "assistant", "content": answer.text}} if self.chats else {"text": prompt + answer.text}
        )
        about = self._logprobs(answer.logprobs, 0, answer.prompt_scores, prompt)
        return {"index": index, **said, "logprobs": about, "finish_reason": answer.finish_reason}

    def echo(self, index: int) -> str:
        """The prompt that is written before an answer."""
        return self.echoed[index] if self.echoed else ""

    def chunk(
        self, index: int, text: str, tokens: Sequence[Likely] = (), offset: int = 0, *,
        finish_reason: str | None = None, first: bool = False, prompt_scores: Scores | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """A piece of an answer. `tokens`: that it is made of, where log probabilities were asked for. `offset`:
        characters before it. `prompt_scores`: the prompt is a part of it."""
        if self.chats:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            said: dict[str, Any] = {"delta": {**delta, "content": text} if text or first else delta}
        else:
            said = {"text": text}
        about = self._logprobs(tokens, offset, prompt_scores, self.echo(index))
        return {"index": index, **said, "logprobs": about, "finish_reason": finish_reason}

    def _logprobs(
        self, tokens: Sequence[Likely], offset: int, prompt_scores: Scores | None, prompt: str
    ) -> dict[str, Any] | None:
        if not tokens and prompt_scores is None:
            return None
        if self.chats:
            return logprobs.of_chat(self.tokenizer, tokens)
        if prompt_scores is None:
            return logprobs.of_text(self.tokenizer, tokens, offset)
        return logprobs.of_echo(self.tokenizer, prompt_scores, prompt, tokens)


def head_of(prefix: str, number: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{number}", "created": int(time.time()), "model": model}


def usage_of(prompt_tokens: int, answers: Sequence[Generation], n: int) -> dict[str, Any]:
    """The tokens of whole answers, of which each prompt has `n`, one after the other. A prompt counts once, and what
    was there of it already is what its first answer found."""
    said = sum(answer.output_tokens for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": said,
        "total_tokens": prompt_tokens + said,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in answers[::n])},
    }
