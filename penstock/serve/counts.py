"""Counts what a service does, for its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.serve.scheduler import Scheduler
from penstock.serve.steps import Step


@dataclass(frozen=True)
class Counts:
    """What a service has done and has to do. Seconds are of passes."""

    running: int
    waiting: int
    answered: int
    failed: int
    cancelled: int
    prompt_tokens: int  # that went through the model
    cached_tokens: int  # of prompts, whose keys and values were there
    output_tokens: int
    passes: int
    passes_s: float
    pages: int = 0  # of the KV pools
    pages_had: int = 0  # by requests: 0 where none is here
    pages_kept: int = 0  # that nobody has, with what prompts may begin with
    given_back: int = 0  # times that a request had to give its pages back before its answer was whole


@dataclass
class TokenCounts:
    """Tokens of prompts, of prompts whose keys and values were there already, and of answers."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


@dataclass
class Tally:
    """The part of `Counts` that only grows. `tokens.prompt`: those that went through the model."""

    tokens: TokenCounts = field(default_factory=TokenCounts)
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    passes: int = 0
    passes_s: float = 0.0

    def take(self, step: Step, silent: int, cached_tokens: int, taken_s: float) -> None:
        """A pass that took `taken_s`. `silent`: so many of its requests say nothing, though the scheduler counts a
        token. `cached_tokens`: of the requests that began with it."""
        rows = step.every_row
        self.tokens.prompt += sum(each.tokens for each in rows if each.reads)
        self.tokens.output += sum(each.says for each in rows) - silent
        self.tokens.cached += cached_tokens
        self.passes += 1
        self.passes_s += taken_s

    def with_work(self, scheduler: Scheduler) -> Counts:
        """All counts, with what the scheduler has to do."""
        pages = scheduler.pages
        return Counts(
            scheduler.running, scheduler.waiting, self.answered, self.failed, self.cancelled, self.tokens.prompt,
            self.tokens.cached, self.tokens.output, self.passes, self.passes_s, pages.count, pages.had, pages.kept,
            scheduler.given_back,
        )  # fmt: skip
