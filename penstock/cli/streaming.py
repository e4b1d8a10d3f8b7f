"""Prints an answer while it comes, and its speed afterwards. `run` and its chat share this."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.live import live
from penstock.cli.output import note, speed_line

if TYPE_CHECKING:
    from penstock.planner.predict import Prediction
    from penstock.serve.engine import Engine
    from penstock.serve.generation import Generation
    from penstock.serve.sampling import SamplingParams

NO_TEMPLATE = "this model has no chat template"
# Control characters are left out of a model's text, which must not move the cursor or rename the window.
_CONTROLS = dict.fromkeys([*(c for c in range(32) if chr(c) not in "\n\t"), *range(127, 160)])


def promise(engine: Engine) -> Prediction:
    """What to hold an answer to: the prediction, or where disk or RAM give something else today, and that differs by
    more than the error band, today's, which is told."""
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


def print_stream(
    engine: Engine, ids: Sequence[int], params: SamplingParams, lead: str = "", heard: list[str] | None = None
) -> Generation:
    """Prints `lead` and the answer to a prompt as it comes, and returns the whole of it. `heard`: gets each piece, for
    whoever breaks it off. Raises as `Engine.stream`."""
    on_terminal = sys.stdout.isatty()

    def chunks() -> int:
        return -(-(len(ids) - engine.holds(ids)) // engine.plan.chunk_rows)

    with live(engine, chunks, streams=True) as shown:
        if lead:
            shown.write(lead)
        for piece in engine.stream(ids, params):
            if heard is not None:
                heard.append(piece)
            shown.write(piece.translate(_CONTROLS) if on_terminal else piece)
    print(flush=True)
    assert engine.last is not None
    return engine.last
