"""The plugin for the `llm` command line at our server: prompts, conversations, schemas, errors, and no server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.commands import ROOT
from tests.cpu.servers import Server, serving
from tests.cpu.test_tools import BUNDLED, LEGS

llm = pytest.importorskip("llm")


@pytest.fixture(scope="module")
def server(cache: Path) -> Iterator[Server]:
    with serving(BUNDLED, cache, "--batch", 2, "--name", "tale", "--context", 512) as found:
        yield found


@pytest.fixture
def model(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The one model that the plugin finds."""
    monkeypatch.setenv("PENSTOCK_URL", f"http://127.0.0.1:{server.port}/")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))  # its keys and logs
    monkeypatch.syspath_prepend(ROOT / "contrib" / "llm-penstock")
    import llm_penstock

    found: list[Any] = []
    llm_penstock.register_models(found.append)
    (one,) = found
    assert one.model_id == "penstock/tale" and str(one) == "penstock: penstock/tale"
    return one


def test_prompts_and_conversations(model: Any, server: Server) -> None:
    asked = {"temperature": 0, "max_tokens": 12}
    message = [{"role": "user", "content": "Once upon a time"}]
    said = server.client().chat.completions.create(model="tale", messages=message, **asked).choices[0].message.content  # type: ignore[call-overload]
    for stream in (True, False):
        answer = model.prompt("Once upon a time", stream=stream, **asked)
        assert answer.text() == said and answer.usage().output == 12
    talk = model.conversation()
    talk.prompt("Once upon a time", **asked).text()
    second = talk.prompt("And then?", **asked)
    second.text()
    assert second.usage().input > answer.usage().input + 12
    held = model.prompt("A dog?", schema=LEGS, stream=False, max_tokens=90)
    assert 0 <= json.loads(held.text())["legs"] <= 9


def test_what_goes_wrong_is_one_line(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(llm.ModelError, match="context room for 512"):
        model.prompt("word " * 3000).text()
    monkeypatch.setenv("PENSTOCK_URL", "http://127.0.0.1:9")
    with pytest.raises(llm.ModelError, match="no penstock server answers"):
        model.prompt("a").text()
    found: list[Any] = []
    sys.modules["llm_penstock"].register_models(found.append)
    assert found == []
