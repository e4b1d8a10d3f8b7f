"""How answers stream, in what the dialects have in common: server-sent events, and an answer's parts piece by piece."""

from __future__ import annotations

import json
from typing import Any

from penstock.serve.generation import Generation
from penstock.serve.told import AnswerPiece
from penstock.serve.tools.reading import AnswerPart, Reading

# A comment, which clients skip. It keeps a connection open on which nothing came for long (`answers.ALIVE_S`).
STILL_HERE = b": still waiting, or reading the prompt\n\n"


def named_event(kind: str, **fields: Any) -> bytes:
    """A server-sent event that has a name, which its object repeats as `type`."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, ensure_ascii=False)}\n\n".encode()


def parts_of(reading: Reading, piece: AnswerPiece | Generation) -> list[AnswerPart]:
    """What a piece of an answer makes certain. The piece at the end is the whole answer, whose text was read before."""
    return reading.finish() if isinstance(piece, Generation) else reading.push(piece.text)
