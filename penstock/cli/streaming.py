"""Prints an answer while it comes, and its speed afterwards. `run` and its chat share this."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from penstock.cli.live import DIM, live
from penstock.cli.output import note, speed_line

if TYPE_CHECKING:
    from penstock.planner.predict import Prediction
    from penstock.serve.engine import Engine
    from penstock.serve.generation import Generation
    from penstock.serve.sampling import SamplingParams
    from penstock.serve.tools.reading import Reading

NO_TEMPLATE = "this model has no chat template"
# Control characters are left out of a model's text, which must not move the cursor or rename the window.
_CONTROLS = dict.fromkeys([*(c for c in range(32) if chr(c) not in "\n\t"), *range(127, 160)])


def promise(engine: Engine) -> Prediction:
    """The promise that an answer is held to. It is the prediction. If disk or RAM give something else today, and that
    differs by more than the error band, it is today's, and the user is told."""
    renewed = engine.renew()
    if renewed is None:
        return engine.prediction
    told = renewed.line(engine.prediction, engine.band())
    if told is None:
        return engine.prediction
    note(told)
    return renewed.prediction


def tell_speed(engine: Engine, generation: Generation, prediction: Prediction) -> None:
    """Prints measured speed beside predicted, and says so where the context cut the answer."""
    if generation.context_full:
        most = engine.plan.target.spec.max_positions
        room = generation.context < most
        more = f"--context N makes room for more, up to {most}" if room else "it is the model's longest"
        note(f"the answer ends here because the context of {generation.context} tokens is full: {more}")
    note(speed_line(generation, prediction))


class Voice:
    """Prints the parts of one answer. Thoughts are dimmed, or not shown at all. `said`: the text so far."""

    def __init__(self, write: Callable[[str, str], None], reading: Reading | None, thoughts: bool) -> None:
        self._write, self._reading, self._thoughts = write, reading, thoughts
        self._on_terminal, self._thinking = sys.stdout.isatty(), False
        self.said = ""

    def take(self, piece: str) -> None:
        """Prints what a piece of the answer makes certain."""
        if self._reading is None:
            self._say(piece)
        else:
            self._parts(self._reading.push(piece))

    def end(self) -> None:
        """Prints what was held back."""
        if self._reading is not None:
            self._parts(self._reading.finish())

    def _parts(self, parts: Iterable[object]) -> None:
        from penstock.serve.tools.reading import Said, Thought

        for part in parts:
            if isinstance(part, Thought) and self._thoughts:
                self._thinking = True
                self._print(part.text, DIM if self._on_terminal else "")
            elif isinstance(part, Said):
                if self._thinking:
                    self._print("\n\n", "")
                self._thinking = False
                self._say(part.text)

    def _say(self, text: str) -> None:
        self.said += text
        self._print(text, "")

    def _print(self, text: str, style: str) -> None:
        self._write(text.translate(_CONTROLS) if self._on_terminal else text, style)


def print_stream(
    engine: Engine, ids: Sequence[int], params: SamplingParams, lead: str = "", reading: Reading | None = None,
    thoughts: bool = True, heard: list[str] | None = None,
) -> Generation:  # fmt: skip
    """Prints `lead` and the answer to a prompt as it comes, and returns the whole of it. `reading`: takes apart what is
    thought and said; `thoughts`: whether what is thought is shown. `heard`: gets what was said, also where it is broken
    off. Raises as `Engine.stream`."""

    def ahead() -> tuple[int, float]:
        tokens = len(ids) - engine.holds(ids)
        return tokens, tokens * engine.prediction.ttft_s / max(1, engine.ask.prompt_tokens)

    with live(engine, ahead, streams=True) as shown:
        if lead:
            shown.write(lead)
        voice = Voice(shown.write, reading, thoughts)
        try:
            for piece in engine.stream(ids, params):
                voice.take(piece)
            voice.end()
        finally:
            if heard is not None:
                heard.append(voice.said)
    print(flush=True)
    assert engine.last is not None
    return engine.last
