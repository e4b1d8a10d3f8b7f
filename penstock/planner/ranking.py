"""Which of several simulated plans comes first, and which plans need not be simulated, since they cannot."""

from __future__ import annotations

from penstock.planner.bound import reads_bytes, sequences
from penstock.planner.candidate import Compared
from penstock.spec.ask import Ask
from penstock.spec.plan import Plan

# Two plans are equals if their times differ by less than this factor. To read a tenth less is worth 2 % of time.
_EQUAL, _READS_WEIGH = 1.05, 0.2
# Where all lanes wait a little, plans take more than their bounds. A gain of less is not worth a simulation.
_HARDLY = 1.025


def ranked(compared: list[Compared], ask: Ask) -> list[Compared]:
    """The best first, by `_rank`."""
    equal_s = min(each.score_s(ask) for each in compared) * _EQUAL
    return sorted(compared, key=lambda each: _rank(each.score_s(ask), each.prediction.disk_bytes_per_token, equal_s))


def settles(rival: Compared, least_s: float, plan: Plan, ask: Ask) -> bool:
    """Whether a simulated rival makes it needless to simulate `plan`: of the two the rival ranks first, even if the
    plan takes hardly more than its bound of `least_s` seconds (_HARDLY)."""
    seconds, least_s = rival.score_s(ask), least_s * _HARDLY
    equal_s = min(seconds, least_s) * _EQUAL
    at_best = _rank(least_s, reads_bytes(plan, ask) / sequences(plan, ask), equal_s)
    return _rank(seconds, rival.prediction.disk_bytes_per_token, equal_s) <= at_best


def _rank(seconds: float, read_bytes: float, equal_s: float) -> tuple[bool, float, float]:
    """What plans are ordered by, the best first. Plans of up to `equal_s` seconds are equals, because predictions are
    no sharper. Of equals the one that reads less from disks comes first, because other programs may use the disk too.
    Of two plans that read nearly the same, such as with rings of two sizes, the faster one comes first. `read_bytes`:
    from disks, a token of a sequence."""
    equals = seconds <= equal_s
    return not equals, seconds * read_bytes**_READS_WEIGH if equals else 0.0, seconds
