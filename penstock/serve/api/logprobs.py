"""Log probabilities of tokens as OpenAI's API writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.serve.sampling import Likely
from penstock.serve.tokenizer import Tokenizer


def of_chat(tokenizer: Tokenizer, tokens: Sequence[Likely]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token], skip_special=False)
        # A part of a character has no text of its own, and a decoder does not tell its bytes.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    return {
        "content": [
            {**entry(each.token, each.logprob), "top_logprobs": [entry(*other) for other in each.best]}
            for each in tokens
        ]
    }


def of_text(tokenizer: Tokenizer, tokens: Sequence[Likely], offset: int = 0) -> dict[str, Any]:
    """`logprobs` of a text completion's choice. `offset`: characters of the answer before these tokens."""
    texts = [tokenizer.decode([each.token], skip_special=False) for each in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)

    def best(each: Likely) -> dict[str, float]:
        # Parts of characters may share one text, as do some tokens: the likeliest has it, so it comes last.
        return {tokenizer.decode([token], skip_special=False): logprob for token, logprob in reversed(each.best)}

    return {
        "tokens": texts,
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [best(each) for each in tokens],
        "text_offset": offsets,
    }
