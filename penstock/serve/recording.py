"""Records the answers of routers while an engine works, for `penstock run --record`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.graph.ops import Route
from penstock.graph.tasks import Call
from penstock.spec.answers import BEGINS, Recorder
from penstock.store.files import Kind

if TYPE_CHECKING:
    from penstock.serve.engine import Engine

ANSWERS = Kind("what routers said", BEGINS.encode())


@contextmanager
def recording(engine: Engine) -> Iterator[Recorder]:
    """Records answers until the end of the block. Of a plan with caches these are the answers that its tasks depend on,
    which costs nothing. Of any other plan they are all answers, and passes are slower."""
    recorder = Recorder(engine.packed.spec, engine.packed.folder.name)

    def hear(call: Call, said: list[list[int]]) -> None:
        assert isinstance(call.operands, Route)
        (recorder.guess if call.operands.guesses else recorder.hear)(call.operands.layer, said)

    session = engine.session
    with session.hearing.answers(hear) if engine.plan.caches else session.hearing.routers(hear):
        yield recorder
