"""Records the answers of routers, or which neurons count, while an engine works, for `penstock run --record`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest
from penstock.graph.ops import Route
from penstock.graph.tasks import Call
from penstock.spec.answers import BEGINS, Recorder
from penstock.spec.model import ModelSpec
from penstock.store.files import Kind

if TYPE_CHECKING:
    from penstock.serve.engine import Engine

ANSWERS = Kind("a run's answers", BEGINS.encode())


def require_answers(spec: ModelSpec, where: str) -> None:
    """Raises BadRequest for a model that has no answers to record. `where`: names it."""
    if not (spec.is_routed or spec.fires):
        raise BadRequest(f"--record keeps what routers say, or which neurons of a ReLU fire; {where} has neither")


@contextmanager
def recording(engine: Engine) -> Iterator[Recorder]:
    """Records answers until the end of the block. Of a plan with caches for experts these are the answers that its
    tasks depend on, which costs nothing. Of any other plan they are all answers, and passes are slower: of a model with
    ReLU all neurons that fire, also those whose weights stay, or with predictors all that these call active. Raises
    BadRequest where a device says them."""
    spec, foretold, session = engine.packed.spec, engine.plan.sparsity == "predict", engine.session
    recorder = Recorder(spec, engine.packed.folder.name, foretold)

    def hear(call: Call, said: list[list[int]]) -> None:
        assert isinstance(call.operands, Route)
        (recorder.guess if call.operands.guesses else recorder.hear)(call.operands.layer, said)

    def hear_live(layer: int, live: NDArray[np.uint8]) -> None:
        recorder.live(layer, [row.tobytes() for row in np.packbits(live != 0, axis=1, bitorder="little")])

    if spec.fires and foretold:
        listening = session.hearing.foretold(hear_live)
    elif spec.fires:
        listening = session.hearing.neurons(lambda layer, _, fired: hear_live(layer, fired))
    else:
        listening = session.hearing.answers(hear) if engine.plan.caches else session.hearing.routers(hear)
    with listening:
        yield recorder
