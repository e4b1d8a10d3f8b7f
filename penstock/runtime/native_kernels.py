"""The native kernels that a session computes with: an instruction set, its threads, and why that one."""

from __future__ import annotations

from typing import NamedTuple

from penstock import _native
from penstock.kernels import cpu


class Native(NamedTuple):
    """The kernels of one instruction set, on their threads.

    `exact`: activations are not rounded to int8. `reason`: why this instruction set, for the user."""

    compute: _native.Compute
    exact: bool
    reason: str


def native(isa: str | None, threads: int, exact: bool) -> Native:
    """The kernels of this instruction set; None: of the best one of this processor. Raises ValueError for one that
    this processor has not."""
    chosen, reason = cpu.chosen_isa(isa)
    return Native(_native.Compute(chosen, threads), exact, reason)
