"""Prompts of a chat, turn by turn, in which the ids of answers stay as they were generated.

A text has many cuts into tokens, and a tokenizer need not cut an answer as the model wrote it. Where it cut otherwise,
keys and values from there on would be computed again. So a prompt that goes on from the last one is that one's ids, the
answer's ids, and only what is new is cut. Where a template writes earlier turns otherwise than they were (it leaves out
what was thought, or spaces), the whole is cut anew. What is the same as before is still not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.serve.api.chats import ChatPrompt, chat_of
from penstock.serve.tokenizer import Tokenizer


class Conversation:
    """The last prompt of a chat with its answer. `rewritten`: whether the template wrote that answer otherwise in the
    latest prompt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text, self._ids = "", list[int]()
        self.rewritten = False

    def prompt(self, messages: Sequence[dict[str, Any]]) -> ChatPrompt:
        """The prompt of these messages. Raises as `chat_of`."""
        chat, known = chat_of(self._tokenizer, messages, None), self._text
        follows = bool(known) and chat.text.startswith(known)
        self.rewritten = bool(known) and not follows
        if follows:
            ids = [*self._ids, *self._tokenizer.encode(chat.text[len(known) :], add_special=False)]
            texts = (self._tokenizer.decode(each, skip_special=False) for each in (ids, chat.ids))
            if next(texts) == next(texts):  # some tokenizers put a space before a text of its own
                chat = replace(chat, ids=ids)
        return chat

    def answered(self, chat: ChatPrompt, text: str, token_ids: Sequence[int]) -> None:
        """Notes the answer to the last prompt: its ids, and their text. Ids that end a text are left out."""
        ends = self._tokenizer.eos_ids
        said = [i for n, i in enumerate(token_ids) if not (i in ends and n == len(token_ids) - 1)]
        self._text, self._ids = chat.text + text, [*chat.ids, *said]

    def forget(self) -> None:
        """Forgets the last prompt, so that the next one is cut as a whole."""
        self._text, self._ids = "", []
