"""Sizes that follow from an ask alone: chunks of prompts, pages of KV."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.spec.ask import Ask
from penstock.spec.format import PAGE_TOKENS
from penstock.units import round_up

# The most rows of a usual chunk of a prompt. Weights are read once a chunk. With more rows, computing takes longer than
# reading anyway.
CHUNK_ROWS = 512
MIN_CHUNK_ROWS = 16


def prompt_and_half_way(ask: Ask, context: int) -> tuple[int, int]:
    """(tokens of a prompt, position of the decode pass that predictions are of, half-way through the output). A prompt
    leaves room for one token of its answer."""
    prompt = max(1, min(ask.prompt_tokens, context - 1))
    return prompt, min(prompt + ask.output_tokens // 2, context - 1)


def page_tokens(context: int) -> int:
    """Tokens of a KV page. Short pages waste less memory on a short context, and long pages are read faster: attention
    over pages of 64 takes 1.1 times as long as over pages of 256 (docs/LOG.md)."""
    return 4 * PAGE_TOKENS if context >= 1024 else PAGE_TOKENS


def shared_tokens(ask: Ask, page_tokens: int) -> int:
    """Tokens that pools have room for: those asked for, in whole pages of each sequence, from one whole context to as
    many as there are sequences."""
    assert ask.context is not None, "settle_context came first"
    context = round_up(ask.context, page_tokens)
    if ask.kv_tokens is None:
        return ask.batch * context
    each = round_up(-(-ask.kv_tokens // ask.batch), page_tokens)
    return min(ask.batch * context, max(context, ask.batch * each))


def chunk_options(ask: Ask) -> list[int]:
    """Rows of a prompt's chunk to try, most first. Each chunk reads all weights that stream, so for long prompts chunks
    of more than CHUNK_ROWS are tried too."""
    most = max(MIN_CHUNK_ROWS, min(CHUNK_ROWS, ask.context or CHUNK_ROWS))
    longer = [rows for rows in (2048, 1024) if rows <= min(ask.prompt_tokens, ask.context or 0) and rows > most]
    return [*longer, most, *(rows for rows in (128, 32, MIN_CHUNK_ROWS) if rows < most)]


def usual_chunks(ask: Ask) -> Iterator[int]:
    """`chunk_options` of at most CHUNK_ROWS. Longer chunks only save reading from a disk."""
    return (rows for rows in chunk_options(ask) if rows <= CHUNK_ROWS)
