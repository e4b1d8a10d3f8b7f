"""Checks the files beside a checkpoint's weights before the weights are packed, which may take minutes."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from pathlib import Path

from penstock.errors import BadRequest
from penstock.serve.sampling import with_model_defaults
from penstock.serve.text_files import TOKENIZER
from penstock.serve.tokenizer import Tokenizer
from penstock.store.files import read_json_if_there

_TRIAL = "Once upon a time"


def check_text_files(folder: Path, *, chat: bool, whole: bool = True, within_bytes: int | None = None) -> None:
    """Opens the tokenizer and the sampling defaults of a checkpoint, and encodes a few words. With `chat` parses its
    chat templates too, and renders a conversation of those words: a template or a tokenizer that takes more than it may
    would be refused at the first prompt, after the packing.

    `whole`: whether the tokenizer must be there, since the model is to be run. `within_bytes`: as for `Tokenizer.open`.
    Raises BrokenModel, StorageFailed.
    """
    with_model_defaults(read_json_if_there(folder / "generation_config.json"))
    if whole or os.path.lexists(folder / TOKENIZER):
        with closing(Tokenizer.open(folder, within_bytes)) as tokenizer:
            try_tokenizer(tokenizer, chat=chat)


def try_tokenizer(tokenizer: Tokenizer, *, chat: bool) -> None:
    """As `check_text_files`, with a tokenizer that is open."""
    with_model_defaults(tokenizer.generation_config)
    if chat:
        tokenizer.check_templates()
    # What a template itself refuses may be this conversation alone.
    with suppress(BadRequest):
        if chat:
            tokenizer.encode_chat([{"role": "user", "content": _TRIAL}])
        else:
            tokenizer.encode(_TRIAL)
