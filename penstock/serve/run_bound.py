"""Computes the share of the physical bound that a run's decoding reached, by the speeds of its own minute.

A decode pass takes at least

    max(bytes streamed / the disk's speed, bytes of weights / the RAM's speed)

The disk's speed shows twice: while the weights that stay are loaded, right before the run, and after the answer, when
the weights that stream are read once more. The faster of the two counts. The RAM's speed is measured after the answer,
by reading the weights that stay. Where a stretch of the run itself was faster than the bound, that stretch is the
bound: a share above 1 would only show that the bound was wrong.
"""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.runtime.device import uses_device
from penstock.serve.bench import weight_bytes
from penstock.serve.generation import Generation
from penstock.serve.session import Session
from penstock.units import MIB

_LEAST_LOADED_BYTES, _LEAST_LOADED_S = 64 * MIB, 0.05  # loading tells the disk's speed if it had either
_REREAD_S = 0.06  # of reading the disk once more
_STRETCH, _LEAST_STRETCHES = 8, 4  # passes of a stretch, and the least stretches of a run that count


def share_of_bound(session: Session, generation: Generation) -> float | None:
    """The share of the bound, from 0 to 1, that the session's last run reached. `generation`: of that run. None where
    no token was decoded, a device computed, or the disk's speed is not known. Rings lose what they hold."""
    steps, loaded = generation.decode_steps, session.loading
    if not steps or uses_device(session.plan):
        return None
    try:
        streamed, resident = session.reread(_REREAD_S)
    except PenstockError:  # the answer is there, even if the disk fails now
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
    """least_s / pass_s, from 0 to 1. `least_s`: the least seconds of a pass, by the speeds of disk and RAM. `pass_s`:
    the seconds that a pass took on average. `passes_s`: those of each pass. If passes of the fastest stretch of
    `_STRETCH` took less than `least_s`, theirs is used instead. None where `pass_s` itself is below the bound."""
    if not least_s > 0 or not pass_s > 0:
        return None
    stretches = [sum(passes_s[i : i + _STRETCH]) / _STRETCH for i in range(0, len(passes_s) - _STRETCH + 1, _STRETCH)]
    if len(stretches) >= _LEAST_STRETCHES:
        least_s = min(least_s, min(stretches))
    return least_s / pass_s if least_s <= pass_s else None
