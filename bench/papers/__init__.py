"""What the four papers publish, as data: `FIGURES`, `TABLE_I` of ScheInfer, and where they contradict themselves."""

from __future__ import annotations

from bench.papers import flexgen, pipo, powerinfer, scheinfer
from bench.papers.contradictions import CONTRADICTIONS, Contradiction
from bench.papers.published import METRICS, SEVERAL, UNSUPPORTED, UNSUPPORTED_MACHINES, Published
from bench.papers.scheinfer import TABLE_I, Fit

FIGURES: tuple[Published, ...] = (*pipo.FIGURES, *flexgen.FIGURES, *scheinfer.FIGURES, *powerinfer.FIGURES)

__all__ = [
    "CONTRADICTIONS",
    "FIGURES",
    "METRICS",
    "SEVERAL",
    "TABLE_I",
    "UNSUPPORTED",
    "UNSUPPORTED_MACHINES",
    "Contradiction",
    "Fit",
    "Published",
]
