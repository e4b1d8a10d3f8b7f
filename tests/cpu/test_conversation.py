"""A chat's turns: each computes what is new alone, to the bit as from scratch; what is thought is told apart."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.chat import Chat
from penstock.cli.streaming import Voice
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.serve.tools.reading import Reading
from penstock.spec.ask import Ask
from tests.cpu.commands import MACHINE
from tests.cpu.engines import make_model

TEMPLATE = "{% for m in messages %}{{ '>' if m.role == 'assistant' }}{{ m.content }}|{% endfor %}>"
WRITES_ANEW = TEMPLATE.replace("'>' if", "'?' if")
TURNS = 20
BRIEF = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1)


def model(folder: Path, template: str) -> Path:
    made = make_model(folder, "llama", "float32")
    (made / "chat_template.jinja").write_text(template)
    return made


def opened(folder: Path) -> Any:
    """An engine, closed at the end of a `with`. The template came after packing, so nothing is compared."""
    return closing(Engine.load(folder, Ask(context=256), Loading(machine=MACHINE, verify=False)))


def noted(engine: Engine) -> list[tuple[list[int], Any]]:
    """Gets (the prompt's ids, the answer) of each turn."""
    turns, stream = list[tuple[list[int], Any]](), engine.stream

    def streaming(ids: Any, params: Any) -> Any:
        yield from stream(ids, params)
        turns.append((list(ids), engine.last))

    engine.stream = streaming  # type: ignore[method-assign]
    return turns


def test_twenty_turns_compute_what_is_new_alone(tmp_path: Path) -> None:
    folder = model(tmp_path, TEMPLATE)
    with opened(folder) as engine:
        turns = noted(engine)
        Chat(engine, BRIEF).run(iter([chr(97 + i) for i in range(TURNS)]))
    assert len(turns) == TURNS
    before: list[int] = []
    with opened(folder) as scratch:
        for ids, answer in turns:
            assert ids[: len(before)] == before  # what was generated stays as it was
            # The last token of an answer was chosen, and did not go through the model.
            assert answer.cached_tokens == max(0, len(before) - 1)
            (alone,) = scratch.generate([ids], BRIEF)
            assert (alone.token_ids, alone.logprobs) == (answer.token_ids, answer.logprobs)
            before = [*ids, *answer.token_ids]


def test_what_a_template_writes_anew_is_read_again_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(model(tmp_path, WRITES_ANEW)) as engine:
        turns = noted(engine)
        Chat(engine, BRIEF).run(iter(["one", "two"]))
        again = len(turns[1][0]) - turns[1][1].cached_tokens
    said = f"the chat template writes earlier turns anew: {again} of {len(turns[1][0])} tokens are read"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("thoughts", "shown"), [(True, [("well", "dim"), ("\n\n", ""), ("yes", "")]), (False, [("yes", "")])]
)
def test_thoughts_are_dimmed_or_hidden(
    thoughts: bool, shown: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("penstock.cli.streaming.DIM", "dim")
    written: list[tuple[str, str]] = []
    voice = Voice(lambda text, style: written.append((text, style)), Reading(thinks=True), thoughts)
    for piece in ("<think>we", "ll</th", "ink>\n\n", "yes"):
        voice.take(piece)
    voice.end()
    joined: list[tuple[str, str]] = []
    for text, style in written:
        if joined and joined[-1][1] == style and text != "\n\n" and joined[-1][0] != "\n\n":
            joined[-1] = (joined[-1][0] + text, style)
        else:
            joined.append((text, style))
    assert joined == shown and voice.said == "yes"
