"""Fits straight lines to measurements: seconds = alpha + amount · slope."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]  # (amount, seconds)
Tell = Callable[[str], None]  # gets a line about figures that were measured again, or do not lie on a line

GOOD_R2 = 0.95
_ATTEMPTS = 3
_ALIKE = 1.15  # slopes whose ratio is at most this are alike


@dataclass(frozen=True)
class Fit:
    """A line. `slope_s`: seconds per unit of the amount. `r2`: the share of the variance that the line explains."""

    alpha_s: float
    slope_s: float
    r2: float


def fit(points: Points, most_alpha_s: float = math.inf) -> Fit:
    """The line with the least squares of relative errors: a point of 50 µs counts as much as one of 50 ms. Neither
    alpha nor slope is below 0. `most_alpha_s`: what alpha may be at most. Where all points are of large amounts, alpha
    is a small difference of long times, and noise in these may make it anything."""
    weights = [1.0 / (seconds * seconds) for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (t - mean_t) for w, (x, t) in zip(weights, points, strict=True))
    slope = max(0.0, slope / spread) if spread > 0 else 0.0
    alpha = mean_t - slope * mean_x
    if not 0 <= alpha <= most_alpha_s and any(x for x, _ in points):
        alpha = max(0.0, min(alpha, most_alpha_s))
        slope = sum(w * x * (t - alpha) for w, (x, t) in zip(weights, points, strict=True))
        slope = max(0.0, slope / sum(w * x * x for w, (x, _) in zip(weights, points, strict=True)))
    return Fit(alpha, slope, _r2(points, alpha, slope))


def _r2(points: Points, alpha: float, slope: float) -> float:
    mean = sum(t for _, t in points) / len(points)
    around_mean = sum((t - mean) ** 2 for _, t in points)
    around_line = sum((alpha + slope * x - t) ** 2 for x, t in points)
    return 1.0 if around_mean == 0 else max(-1.0, 1.0 - around_line / around_mean)


def fit_well(
    measure: Callable[[], Points], figure: str, tell: Callable[[str], None], until_s: float = math.inf,
    most_alpha_s: float = math.inf,
) -> Fit:  # fmt: skip
    """A fit with an r² of at least 0.95. Where it is less, measures again and tells so, up to three times in all; then
    the best of the three. `figure`: its name, in the line that is told. `until_s`: a time of `time.perf_counter`, after
    which nothing is measured again. `most_alpha_s`: as for `fit`."""
    best = fit(measure(), most_alpha_s)
    for _ in range(_ATTEMPTS - 1):
        if best.r2 >= GOOD_R2 or time.perf_counter() > until_s:
            return best
        again = fit(measure(), most_alpha_s)
        tell(f"{figure}: measured again, r² {best.r2:.2f}, then {again.r2:.2f}")
        best = max(best, again, key=lambda line: line.r2)
    return best


def steady(one: Fit, other: Fit) -> Fit:
    """One fit out of two of the same thing: their middle where they are alike, else the faster. A disturbance can only
    make a measurement slower."""
    fast, slow = sorted((one, other), key=lambda line: line.slope_s)
    if slow.slope_s > _ALIKE * fast.slope_s:
        return fast
    return Fit((fast.alpha_s + slow.alpha_s) / 2, (fast.slope_s + slow.slope_s) / 2, min(fast.r2, slow.r2))


def middle(fits: Sequence[Fit]) -> Fit:
    """One fit out of several of the same thing, measured at different moments: the one of the median slope, or the
    faster of two. For speeds that swing both ways, up and down."""
    return sorted(fits, key=lambda line: line.slope_s)[(len(fits) - 1) // 2]


def straight(fits: Sequence[Fit]) -> list[Fit]:
    """Of several fits of the same thing those with an r² of at least 0.95; all of them where there is none."""
    return [line for line in fits if line.r2 >= GOOD_R2] or list(fits)
