"""Measures for how long the threads of this process computed, whatever else ran on their cores.

Beside two busy processes, a product of 512 rows on two cores took 1.5 to 2 times as long by the clock as on free cores,
and products of 16 rows took 1 to 10 times as long. The processor time of the threads was the same as on free cores,
within 5 % (docs/LOG.md).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

Taken = tuple[float, float]  # seconds of a call by the clock, and seconds that its busiest thread was on a core

# If a call took at most so many times as long by the clock as on its busiest core, it had its cores for itself.
_FREE = 1.1
_ENOUGH_FREE = 0.2  # if so large a share of calls had their cores for themselves, the others are left out
# A clock of the kernel that counts the time that a thread computes, without the time that it waits
# (linux/posix-timers.h).
_OF_A_THREAD, _ON_A_CORE = 4, 2


class ThreadClocks:
    """The processor time of each thread that this process has when this is made. If the system does not tell it, no
    call counts as disturbed."""

    def __init__(self) -> None:
        try:
            self._clocks = [(~int(tid) << 3) | _OF_A_THREAD | _ON_A_CORE for tid in os.listdir("/proc/self/task")]
            self.now_s()
        except OSError:
            self._clocks = []

    def now_s(self) -> list[float]:
        """Seconds so far, of each thread."""
        return [time.clock_gettime(clock) for clock in self._clocks]

    def busiest_s(self, since_s: Sequence[float]) -> float:
        """Seconds that the busiest thread was on a core since `now_s` gave this; infinity if nobody knows."""
        spent = (now - then for now, then in zip(self.now_s(), since_s, strict=True))
        return max(spent, default=float("inf"))


def is_free(taken: Taken) -> bool:
    """Whether nobody else had one of the cores while a call ran."""
    by_clock_s, own_s = taken
    return by_clock_s <= _FREE * own_s


def undisturbed(calls: Sequence[Taken]) -> list[float]:
    """The seconds that each of some like calls takes on free cores. For calls that had their cores for themselves,
    these are seconds by the clock, and other calls are left out. If there are too few of such calls, it is the
    processor time of all calls. That is a little too long: threads that wait for one that has lost its core spin for
    0.4 ms."""
    free = [taken for taken in calls if is_free(taken)]
    if len(free) >= max(1.0, _ENOUGH_FREE * len(calls)):
        return [by_clock_s for by_clock_s, _ in free]
    return [min(taken) for taken in calls]
