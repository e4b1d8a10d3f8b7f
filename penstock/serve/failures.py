"""What passes failed of: who runs a server is told, and it is known whether the model must be loaded again."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.errors import DamagedModel, PenstockError

_AGAIN_S, _MOST_TEXTS = 60.0, 16  # the same line is told again after so long; so many are remembered


class Failures:
    """The errors of one model's passes. `tell`: gets a line for each, the same line once a minute at most. No line has
    anything of a prompt.

    `damaged`: whether a pass met damaged weights of a copy that is packed again when it is next loaded."""

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self._tell = tell
        self._told_s: dict[str, float] = {}
        self.damaged = False

    def note(self, error: Exception, packs_again: bool) -> None:
        """Notes the error of a pass. `packs_again`: a damaged copy of this model is packed again."""
        self.damaged |= packs_again and isinstance(error, DamagedModel)
        text = error.message if isinstance(error, PenstockError) else f"{type(error).__name__} in a pass"
        now_s = time.monotonic()
        if self._tell is not None and now_s - self._told_s.get(text, -_AGAIN_S) >= _AGAIN_S:
            if len(self._told_s) == _MOST_TEXTS:
                del self._told_s[next(iter(self._told_s))]
            self._told_s[text] = now_s
            self._tell(text)
