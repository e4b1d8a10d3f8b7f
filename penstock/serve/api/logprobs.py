"""Log probabilities of tokens as OpenAI's API writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.serve.log_probabilities import Likely, ids_of
from penstock.serve.scores import Scores
from penstock.serve.tokenizer import Tokenizer


def of_chat(tokenizer: Tokenizer, tokens: Sequence[Likely]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    texts = tokenizer.texts(ids_of(tokens))

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = texts[token]
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
    return _of_text(tokenizer.texts(ids_of(tokens)), tokens, offset)


def of_echo(tokenizer: Tokenizer, scores: Scores, prompt: str, tokens: Sequence[Likely]) -> dict[str, Any]:
    """`logprobs` of a choice that begins with its prompt, whose first token has none. `prompt`: as it is written."""
    first, scored = int(scores.prompt[0]), scores.tokens()
    texts = tokenizer.texts([first, *ids_of(scored), *ids_of(tokens)])
    read, said = _of_text(texts, scored, 0), _of_text(texts, tokens, len(prompt))
    # A BOS that the tokenizer puts first is a token and no part of the text.
    surplus = len(texts[first]) + sum(map(len, read["tokens"])) - len(prompt)
    end = len(texts[first]) - surplus
    offsets = [min(max(0, end + offset), len(prompt)) for offset in read["text_offset"]]
    return {
        "tokens": [texts[first], *read["tokens"], *said["tokens"]],
        "token_logprobs": [None, *read["token_logprobs"], *said["token_logprobs"]],
        "top_logprobs": [None, *read["top_logprobs"], *said["top_logprobs"]],
        "text_offset": [0, *offsets, *said["text_offset"]],
    }


def _of_text(texts: dict[int, str], tokens: Sequence[Likely], offset: int) -> dict[str, list[Any]]:
    offsets = []
    for each in tokens:
        offsets.append(offset)
        offset += len(texts[each.token])
    return {
        "tokens": [texts[each.token] for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        # Parts of characters may share one text, as do some tokens: the likeliest has it, so it comes last.
        "top_logprobs": [{texts[token]: logprob for token, logprob in reversed(each.best)} for each in tokens],
        "text_offset": offsets,
    }
