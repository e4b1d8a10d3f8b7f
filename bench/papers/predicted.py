"""What the planner predicts for a published figure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Predicted:
    """`value`: in the row's metric and unit. `bound`: the best that physics allows in that metric on that machine
    (None: no bound applies), e.g. link bytes/s peak / bytes a token must cross. `note`: what was assumed; why it is far
    off, if it is (one sentence)."""

    value: float
    bound: float | None
    note: str = ""
