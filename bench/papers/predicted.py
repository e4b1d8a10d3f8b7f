"""What a paper's row is predicted to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Predicted:
    """`value`: in the row's metric and unit. `bound`: the best that physics allows in that metric on that machine, such
    as the link's bytes/s by the bytes that a token must cross it; None: no bound applies. `note`: what was assumed, and
    why it is far off, if it is, in one sentence."""

    value: float
    bound: float | None
    note: str = ""
