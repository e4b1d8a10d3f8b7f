"""The answer to one prompt as it grows: each token is chosen from logits, made into text, and held to the limits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest
from penstock.serve.generation import Generation
from penstock.serve.guides import Guide
from penstock.serve.log_probabilities import likely
from penstock.serve.sampling import Sampler, SamplingParams
from penstock.serve.scores import Scores
from penstock.serve.tokenizer import StopStrings, Tokenizer
from penstock.serve.tools.budget import Budget


class Reply:
    """A prompt, int32 [T], and its answer so far.

    `batch`: the prompts that are answered together, for the report. `context`: positions that the plan has for the
    sequence. `streams`: whether text is wanted as soon as it is certain, and not only at the end. `guide`: holds the
    answer to a JSON schema. `limit`: the most tokens that the answer may have. The last one needs no room, for it is
    not fed back. `text`: makes text of the answer's ids.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: NDArray[np.int32], params: SamplingParams, *, batch: int, context: int,
        streams: bool, guide: Guide | None = None,
    ) -> None:  # fmt: skip
        self.prompt, self.answer = prompt, Generation(len(prompt), batch, context)
        self._sampler = Sampler(params, prompt.tolist())
        self._eos = frozenset() if params.ignore_eos else tokenizer.eos_ids
        # To make text of each token takes 70 µs, and a batch has many tokens. So text is made at the end where nobody
        # wants it before.
        self._budget = None
        if params.thinking_tokens is not None and tokenizer.thinks:
            self._budget = Budget(params.thinking_tokens, tokenizer.thought_end_ids, params.thinking_begun)
        whole = not streams and not params.stops and self._budget is None
        self.text = tokenizer.stream(whole, params.skip_special_tokens)
        self._stops = StopStrings(params.stops)
        room = context - len(prompt) + 1
        self.limit = min(params.max_tokens, room)
        self._context_is_least = room < params.max_tokens
        self._guide = guide
        self._forced = False  # whether the token chosen last was put in by the budget
        if params.prompt_logprobs is not None:
            self.answer.prompt_scores = Scores(prompt, params.prompt_logprobs)

    @property
    def finished(self) -> bool:
        return bool(self.answer.finish_reason)

    @property
    def position(self) -> int:
        """Of the token that is fed back next: the answer's last one."""
        return len(self.prompt) + len(self.answer.token_ids) - 1

    @property
    def wants_more(self) -> bool:
        """Whether the length allows tokens after the next one."""
        return len(self.answer.token_ids) + 1 < self.limit

    def rows(self, start: int, count: int) -> NDArray[np.int32]:
        """Ids of the positions from `start` on, int32 [count], of the prompt and of the answer so far."""
        after = start - len(self.prompt)
        if after + count <= 0:
            return self.prompt[start : start + count]
        said = np.array(self.answer.token_ids[max(0, after) : after + count], np.int32)
        return np.concatenate([self.prompt[start:], said])

    def hear(self, start: int, logits: NDArray[np.float32]) -> None:
        """Takes logits float32 [n, V] of the prompt's positions from `start` on, where the prompt is scored. Raises
        BrokenModel for logits that are not finite."""
        assert self.answer.prompt_scores is not None
        self.answer.prompt_scores.take(start, logits)

    def choose(self, logits: NDArray[np.float32], best: tuple[float, int]) -> None:
        """Samples a token from logits float32 [V]; `best`: the largest logit and its id. `say` must follow. End-of-text
        tokens are not part of the text. An answer of no tokens ends here, and one whose schema allows nothing more.
        Raises BrokenModel for logits that are not finite, BadRequest where the schema cannot be followed."""
        answer = self.answer
        if not self.limit:
            answer.finish_reason = "length"
            return
        allowed = self._guide.allowed() if self._guide is not None else None
        if allowed is not None and allowed.only_end:
            if not allowed.end:
                raise BadRequest("the JSON schema or grammar asks for what no token of this model has")
            answer.finish_reason = "stop"
            return
        forced = self._budget.forced() if self._budget is not None else None
        self._forced = forced is not None and (allowed is None or bool(allowed.tokens[forced]))
        if forced is not None and self._forced:
            token = self._sampler.force(forced)
        else:
            token = self._sampler.next(logits, best, None if allowed is None else allowed.choice)
        answer.token_ids.append(token)
        if (count := self._sampler.params.logprobs) is not None:
            answer.logprobs.append(likely(logits, token, count))
        if token in self._eos:
            answer.finish_reason = "stop"
            return
        self.text.take(token)

    def say(self) -> str:
        """The text that the token chosen last makes certain; of an answer that ends, all that is left. Raises
        BrokenModel where that takes more than it may."""
        answer, stops = self.answer, self._stops
        text = self.text.text()
        if self._budget is not None:
            self._budget.take(self._forced, text)
        piece = stops.push(text)
        if not answer.finish_reason:
            if stops.hit is not None:
                answer.finish_reason, answer.stopped_by = "stop", stops.hit
            elif len(answer.token_ids) >= self.limit:
                answer.finish_reason = "length"
                answer.context_full = self._context_is_least
            elif self._guide is not None:
                self._guide.push(answer.token_ids[-1])
        if answer.finish_reason and stops.hit is None and self.limit:
            piece += stops.push(self.text.finish()) + stops.finish()
        answer.text += piece
        return piece

    def accept(self, logits: NDArray[np.float32], best: tuple[float, int]) -> str:
        """`choose`, then `say`. `logits`: float32 [V]."""
        self.choose(logits, best)
        return self.say()
