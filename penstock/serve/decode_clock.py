"""Times the passes of a service that only decode."""

from __future__ import annotations

import time

from penstock.serve.session import Session
from penstock.serve.steps import Step


class DecodeClock:
    """Sums over the passes that have no rows of prompts: their `seconds`, their `tokens`, how many `passes` they are,
    and the `disk_bytes` that they took from slower tiers. Call `start` when the first pass begins, and `hear` with each
    pass when it has ended."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._end_s = time.perf_counter()
        self.seconds, self.tokens, self.passes, self.disk_bytes = 0.0, 0, 0, 0

    def start(self) -> None:
        self._end_s = time.perf_counter()

    def hear(self, step: Step) -> None:
        """Adds a pass. One with rows of prompts counts for nothing: its tokens are no decoding."""
        start_s, self._end_s = self._end_s, time.perf_counter()
        rows = step.every_row
        if any(each.reads for each in rows):
            return
        self.seconds += self._end_s - start_s
        self.tokens += len(rows)
        self.passes += 1
        self.disk_bytes += self._session.consumed_bytes
