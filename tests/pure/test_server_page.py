"""The page of what a client may send names every field that is taken, and no other as taken."""

from __future__ import annotations

import re

from penstock.serve.api.wire import ChatRequest, CompletionRequest
from tests.cpu.commands import ROOT

FIELDS = {*ChatRequest.model_fields, *CompletionRequest.model_fields}


def test_every_field_has_its_row() -> None:
    page = (ROOT / "docs" / "SERVER.md").read_text().partition("## Responses")[0]
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    named = {name: here.strip() for first, here, *_ in rows for name in re.findall(r"`(\w+)`", first)}
    assert named.keys() >= FIELDS
    elsewhere = {"prompt_logprobs"}  # asked for by other names here
    assert named.keys() - FIELDS == elsewhere
