"""The share of what disk and RAM allow that a run's decoding reached, by their speeds in the run's own minute.

A decode pass takes at least as long as the disk needs for the bytes that it streams, or the RAM for the weights that it
reads, whichever is longer. How fast the disk is shows twice: while the weights that stay were loaded, right before, and
when the answer is there, in what streams being read once more. The RAM then reads what stays in it. The faster figure
counts. Where even a stretch of the run itself was faster, that stretch is the bound: a share above 1 would only say
that the bound was none.
"""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.runtime.device import uses_device
from penstock.serve.bench import weight_bytes
from penstock.serve.generation import Generation
from penstock.serve.session import Session
from penstock.units import MIB

_LEAST_LOADED_BYTES, _LEAST_LOADED_S = 64 * MIB, 0.05  # that tell how fast the disk is, one or the other
_REREAD_S = 0.06  # of the disk
_STRETCH, _LEAST_STRETCHES = 8, 4  # passes of one, and how many of those a run must have


def share_of_bound(session: Session, generation: Generation) -> float | None:
    """The share of the bound that the run reached which this session just did, from 0 to 1. None where that cannot be
    told: no token was decoded, a device computed, or nothing said how fast the disk is. Rings lose what they hold."""
    steps, loaded = generation.decode_steps, session.loading
    if not steps or uses_device(session.plan):
        return None
    try:
        streamed, resident = session.reread(_REREAD_S)
    except PenstockError:  # a disk that fails now takes nothing away from the answer, which is there
        return None
    disk_bytes_per_s = streamed.bytes_per_s
    if loaded.bytes >= _LEAST_LOADED_BYTES or loaded.seconds >= _LEAST_LOADED_S:
        disk_bytes_per_s = max(disk_bytes_per_s, loaded.bytes_per_s)
    disk_bytes = generation.decode_disk_bytes / steps
    if disk_bytes and not disk_bytes_per_s:
        return None
    disk_s = disk_bytes / disk_bytes_per_s if disk_bytes else 0.0
    ram_s = weight_bytes(session.plan) / resident.bytes_per_s if resident.bytes else 0.0
    return share(max(disk_s, ram_s), generation.decode_s / steps, generation.inter_token_s)


def share(least_s: float, pass_s: float, passes_s: list[float]) -> float | None:
    """least_s / pass_s, from 0 to 1. `least_s`: the seconds that a pass takes at least, by the speeds of disk and RAM.
    `pass_s`: the seconds that a pass took on average. `passes_s`: of each pass. Where the fastest stretch of
    `_STRETCH` passes took less than `least_s` a pass, it takes its place. None where `pass_s` itself is less."""
    if not least_s > 0 or not pass_s > 0:
        return None
    stretches = [sum(passes_s[i : i + _STRETCH]) / _STRETCH for i in range(0, len(passes_s) - _STRETCH + 1, _STRETCH)]
    if len(stretches) >= _LEAST_STRETCHES:
        least_s = min(least_s, min(stretches))
    return least_s / pass_s if least_s <= pass_s else None
