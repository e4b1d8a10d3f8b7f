"""Made-up runs, for tests of what follows from them."""

from __future__ import annotations

from penstock.planner.dominant import Dominant
from penstock.serve.history import Phase, Run, figures_id
from penstock.spec.machine import Figure
from tests.pure.machine import MACHINE

BYTES = Figure("host", "*", "*", 0, "s_per_byte")
ALPHA = Figure("host", "*", "*", 0, "alpha_s")
DISK = Figure("disk0", "*", "*", 0, "s_per_byte")


def phase(predicted_s: float, ratio: float = 1.0, bound_by: str = "host", figure: Figure = BYTES,
          share: float = 1.0) -> Phase:  # fmt: skip
    """Whose measured seconds are `ratio` times the predicted ones."""
    return Phase(predicted_s, predicted_s * ratio, bound_by, Dominant(figure, share))


def a_run(step: Phase, first: Phase | None = None, weights: str = "bfloat16", steps: int = 64) -> Run:
    first = phase(4 * step.predicted_s) if first is None else first
    return Run(figures_id(MACHINE), "0" * 16, weights, 1, 64, steps + 1, steps, steps * step.measured_s, first, step)


def tiny_run(ratio: float, steps: int = 10_000) -> Run:
    """Of a model of 260 k parameters: calls beginning, hardly any bytes."""
    return a_run(phase(2e-4, ratio, figure=ALPHA, share=0.6), phase(1e-3, ratio, figure=ALPHA), "float32", steps)


def large_run(ratio: float, steps: int = 64) -> Run:
    """Of a model of 1 G parameters, 2.5 GB: bytes out of RAM."""
    return a_run(phase(0.07, ratio, share=0.9), phase(0.2, ratio, share=0.7), steps=steps)
