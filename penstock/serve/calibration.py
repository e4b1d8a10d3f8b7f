"""Corrects a machine's figures by past runs, for `penstock bench --calibrate` and `--undo`.

A run tells something of only one figure, the dominant one: that which most of its predicted time came from. It counts
only where that was at least half of the time. The figure is multiplied by the median, over such runs, of

    ratio = measured seconds / predicted seconds

where the figure was as measured. A prediction that took it as runs of its last days showed it (`serve/lately`) counts
as if it had not.

If the figure alone were to blame for the whole difference, the factor would be 1 + (ratio - 1) / share. On a mixed
history that overshot (docs/LOG.md): the RAM is mostly the cause of slow runs, and other ops suffer from it too.

All corrections start from the probe's own figures, which are kept in a file beside, and are bounded. Only runs count
that were predicted with the figures in force. So to calibrate again without new runs changes nothing, and no error adds
to an earlier one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from penstock.serve.history import Phase, Run, cached
from penstock.spec.machine import TERMS, Figure, MachineSpec, Rate

LEAST_STEPS, LEAST_S = 16, 1.0  # the least decode passes, and seconds of them, of a run that counts
_LEAST_SHARE = 0.5  # a dominant figure makes up at least so much of the predicted time
_ENOUGH = 3  # runs with the same dominant figure
_MOST_FACTOR = 2.0  # over the probe's own figure, both ways; beyond it the probe itself was disturbed
_LEAST_FACTOR = 1.02  # smaller corrections are not made
_MOST_SHOWN = 100.0  # larger log ratios, which a damaged file may hold, are shown as this


@dataclass(frozen=True)
class Change:
    """A correction of a figure. `before`, `now`: its factor over the probe's own figure. `log_ratio`: the median of
    ln(measured / predicted seconds) over the `runs` runs that it dominated."""

    figure: Figure
    before: float
    now: float
    log_ratio: float
    runs: int

    def __str__(self) -> str:
        ratio = math.exp(min(self.log_ratio, _MOST_SHOWN))
        said = f"{self.runs} runs that it dominated took {ratio:.3g} times as long as predicted"
        bounded = ", the most that a calibration does" if _at_bound(self.now) else ""
        return f"{self.figure} × {self.now:.2f} of what the probe measured (was × {self.before:.2f}{bounded}): {said}"


def counts(run: Run) -> bool:
    """Whether a run is long enough to tell anything of the machine's figures, and computed as these foretell: attention
    to the best positions alone is numpy's, and is foretold as the native kernels'."""
    return run.decode_steps >= LEAST_STEPS and run.decode_s >= LEAST_S and "top-k:" not in run.sparsity


def calibrated(machine: MachineSpec, probed: MachineSpec, seen: Iterable[Run]) -> tuple[MachineSpec, list[Change]]:
    """The machine with its figures corrected, and the corrections. `probed`: the machine with the probe's own figures.
    `seen`: runs that were predicted with the figures of `machine`."""
    phases_of: dict[Figure, list[Phase]] = {}
    for run in filter(counts, seen):
        for phase in run.phases:
            if phase.dominant.share >= _LEAST_SHARE and run.passes(phase) * phase.measured_s >= LEAST_S:
                phases_of.setdefault(phase.dominant.figure, []).append(phase)
    base, now = _values(probed), _values(machine)
    changes = []
    for figure, phases in phases_of.items():
        if not base.get(figure) or not now.get(figure):
            continue
        phases = [phase for phase in phases if not cached(phase, now[figure])]
        if len(phases) < _ENOUGH:
            continue
        before, log_ratio = now[figure] / base[figure], statistics.median(phase.figure_log_ratio for phase in phases)
        most_log = math.log(_MOST_FACTOR)
        after = math.exp(min(most_log, max(-most_log, math.log(before) + log_ratio)))
        if abs(math.log(after / before)) >= math.log(_LEAST_FACTOR):
            changes.append(Change(figure, before, after, log_ratio, len(phases)))
    values = {change.figure: base[change.figure] * change.now for change in changes}
    return _with(machine, values, probed.source), changes


def _values(machine: MachineSpec) -> dict[Figure, float]:
    return {rate.figure(term): getattr(rate, term) for rate in machine.rates for term in TERMS}


def _with(machine: MachineSpec, values: dict[Figure, float], source: str) -> MachineSpec:
    if not values:
        return machine

    def corrected(rate: Rate) -> Rate:
        corrections: dict[str, Any] = {t: values[rate.figure(t)] for t in TERMS if rate.figure(t) in values}
        return replace(rate, **corrections)

    source = f"{source}; calibrated {date.today().isoformat()}"
    return replace(machine, rates=tuple(map(corrected, machine.rates)), source=source)


def undone(machine: MachineSpec, probed: MachineSpec) -> list[str]:
    """A line for each figure that a calibration had changed. `machine`: as calibrated; `probed`: with the probe's own
    figures."""
    was, now = _values(machine), _values(probed)
    differ = [figure for figure, value in was.items() if now.get(figure) and now[figure] != value]
    return [f"{figure} back from × {was[figure] / now[figure]:.2f}" for figure in differ]


def _at_bound(factor: float) -> bool:
    return math.isclose(factor, _MOST_FACTOR) or math.isclose(factor, 1 / _MOST_FACTOR)
