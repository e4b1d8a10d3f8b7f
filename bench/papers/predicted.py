"""What the planner says where a paper has a figure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Predicted:
    value: float            # in the row's metric and unit
    bound: float | None     # the best that physics allows in that metric on that machine (None: no bound applies), e.g. link bytes/s peak / bytes a token must cross
    note: str = ""          # what was assumed; why it is far off, if it is (one sentence)
