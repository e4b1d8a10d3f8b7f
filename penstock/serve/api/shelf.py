"""The models that a server has. One of them is loaded, within the one memory limit, and answers its requests together.

A request for another model waits until nobody uses the one that is loaded. Then that one is closed and the other is
loaded. So is a model anew whose copy a pass found damaged: loading packs it again. Requests wait in one line: as soon
as a request for another model is in it, later ones for the loaded model wait behind that. So no request waits for ever.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from anyio import to_thread
from starlette.exceptions import HTTPException

from penstock.errors import InternalError, PenstockError
from penstock.planner.pace import Pace
from penstock.serve.scheduler import Ending, QueueFull
from penstock.serve.service import Service

_LOOK_S = 0.05
_LOAD_ENDS_S = 5.0  # a load may take so long to break off when the server ends


@dataclass(frozen=True)
class Loaded:
    """A model that is loaded. `schemas`: answers may be held to JSON schemas. `close`: gives its memory back.
    `reasons`: of choices besides the plan and the pace."""

    name: str
    service: Service
    pace: Pace
    schemas: bool
    close: Callable[[], None]
    reasons: tuple[str, ...] = ()


class Hold:
    """A request's hold on the loaded model: it stays loaded until `end`, which may be called twice."""

    def __init__(self, loaded: Loaded, shelf: Shelf) -> None:
        self.loaded, self._shelf = loaded, shelf
        self._ended = False

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._shelf._given_back()


class Shelf:
    """All models of a server. All methods but `settle` are for the event loop's thread.

    first  the model that is loaded already
    load   by the name of each model, the first one too: loads it
    queue  the most requests that may wait for a model that is not loaded
    ends   is called when the server ends. A load that is under way should end soon after that, with any error
    """

    def __init__(
        self, first: Loaded, load: Mapping[str, Callable[[], Loaded]], queue: int,
        ends: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.names = (first.name, *(name for name in load if name != first.name))
        self.now: Loaded | None = first
        self.ending = False
        self._load_by_name, self._queue, self._ends = load, queue, ends
        self._line: deque[tuple[str, asyncio.Future[Hold]]] = deque()
        self._users = 0
        self._loading: asyncio.Task[None] | None = None
        self._loader: threading.Thread | None = None  # of the latest load
        self._why = ""

    async def hold(self, name: str) -> Hold:
        """Waits until this model is loaded. Raises QueueFull, Ending after `refuse`, and what loading it raises."""
        if self.ending:
            raise Ending(self._why)
        if len(self._line) >= self._queue + 1:
            raise QueueFull(f"{len(self._line)} requests wait for other models already: try again later")
        waiting: asyncio.Future[Hold] = asyncio.get_running_loop().create_future()
        self._line.append((name, waiting))
        self._advance()
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                waiting.result().end()
            self._advance()  # those behind it may go on
            raise

    def require_now(self) -> Loaded:
        """The model that is loaded. Raises HTTPException while another one is being loaded."""
        if self.now is None:
            raise HTTPException(503, "a model is being loaded: try again later")
        return self.now

    def refuse(self, why: str) -> None:
        """From now on no request is taken, and none that waits for another model is."""
        self.ending, self._why = True, why
        if self.now is not None:
            self.now.service.refuse(why)
        self._ends()
        while self._loading is not None and self._line:  # packing a model may take many minutes
            _, waiting = self._line.popleft()
            if not waiting.done():
                waiting.set_exception(Ending(why))
        self._advance()

    def abandon(self) -> None:
        """Cancels all requests that are here."""
        if self.now is not None:
            self.now.service.abandon()

    def settle(self, within_s: float) -> bool:
        """Waits, in another thread, until no model is being loaded and the loaded one has no request left. Waits at
        most so many seconds, for a load _LOAD_ENDS_S, and returns whether that came about."""
        begun_s = time.monotonic()
        while self._loading is not None or (self.now is not None and not self.now.service.idle(_LOOK_S)):
            if time.monotonic() - begun_s > (within_s if self._loading is None else min(within_s, _LOAD_ENDS_S)):
                return False
            time.sleep(_LOOK_S)
        return True

    @property
    def loads(self) -> bool:
        """Whether a thread loads a model, which goes on when the event loop has ended."""
        return self._loader is not None and self._loader.is_alive()

    def close(self) -> None:
        """Closes the loaded model, when the event loop has ended."""
        if self.now is not None:
            self.now.close()
            self.now = None

    def _given_back(self) -> None:
        self._users -= 1
        self._advance()

    def _advance(self) -> None:
        """Lets the first requests of the line go on if their model is loaded, or loads the model that the very first
        one wants."""
        while self._line and self._loading is None:
            name, waiting = self._line[0]
            if waiting.done():  # its client has gone
                self._line.popleft()
            elif self.now is not None and self.now.name == name and not self.now.service.failures.damaged:
                self._line.popleft()
                self._users += 1
                waiting.set_result(Hold(self.now, self))
            elif self.ending:
                self._line.popleft()
                waiting.set_exception(Ending(self._why))
            elif self._users:
                return
            else:
                self._loading = asyncio.ensure_future(self._load(name))

    def _in_a_thread(self, load: Callable[[], Loaded]) -> asyncio.Future[Loaded]:
        """A load's result. Its thread is one that the event loop does not wait for at its end: planning and measuring
        a machine tell nobody how far they are, so that nothing breaks them off."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Loaded] = loop.create_future()

        def told(outcome: Loaded | BaseException) -> None:
            if loaded.cancelled():
                return
            if isinstance(outcome, Loaded):
                loaded.set_result(outcome)
            else:
                loaded.set_exception(outcome)

        def work() -> None:
            try:
                outcome: Loaded | BaseException = load()
            except BaseException as error:
                outcome = error
            with suppress(RuntimeError):  # the loop has ended: nobody wants the model any more
                loop.call_soon_threadsafe(told, outcome)

        self._loader = threading.Thread(target=work, name="penstock-load", daemon=True)
        self._loader.start()
        return loaded

    async def _load(self, name: str) -> None:
        """Closes the loaded model and loads this one. If that fails, all requests that wait for it get the error."""
        before, self.now = self.now, None
        try:
            if before is not None:
                await to_thread.run_sync(before.close)
            self.now = await self._in_a_thread(self._load_by_name[name])
        except Exception as error:  # nobody may wait for ever
            told = error if isinstance(error, PenstockError) else InternalError(f"{type(error).__name__}: {error}")
            for other, waiting in [each for each in self._line if each[0] == name]:
                self._line.remove((other, waiting))
                if not waiting.done():
                    waiting.set_exception(told)
        finally:
            self._loading = None
            if self.now is not None and self.ending:
                self.now.service.refuse(self._why)
            self._advance()
