"""`tests.conversations` itself: a case runs, and it sees what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conversations import __main__ as conversations
from tests.conversations.draws import Case


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(conversations, "ASKED", 3)
    monkeypatch.setattr(conversations, "DIALECTS", conversations.DIALECTS[:1])
    return Case(4, "plain", ())


def test_streams_say_what_whole_answers_say(case: Case, tmp_path: Path) -> None:
    assert not conversations.differences(case, tmp_path)


def test_what_differs_is_told(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = conversations.objects
    monkeypatch.setattr(conversations, "objects", lambda text: read(text)[1:])  # without what comes first
    found = conversations.differences(case, tmp_path)
    assert found and all("streamed" in line for line in found)
