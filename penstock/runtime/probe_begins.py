"""How a machine's figures are read that were kept before attention over many rows was known to begin as soon as
attention of one row.

The probe's line for many rows (`probe_ops.attention_rates`) goes through calls that take milliseconds. On a shared
machine their noise alone made the begin of a call 0.1 to 4.4 ms, where a whole call of one row takes 10 µs
(docs/LOG.md). A server's pass with a few rows of a prompt then seemed to take that long in each layer.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from penstock.runtime.fit import fit
from penstock.runtime.probe_ops import HEAD_DIM, KV_FORMATS, MANY_ROWS_TIMED, ONE_ROW_TIMED, attention_sizes
from penstock.spec.format import parse_format
from penstock.spec.machine import MachineSpec, Rate

_SLACK = 2.0  # the line of one row may lie below the shortest call that was measured


def with_short_begins(machine: MachineSpec) -> MachineSpec:
    """The machine, in which a call of attention over many rows takes no longer to begin than the shortest call of one
    row that the probe times takes in all. A rate that says otherwise becomes the line through what it says of the calls
    that the probe times, with a begin of that length. Rates of formats that the probe does not time stay."""
    ones = {(rate.lane, rate.format): rate for rate in machine.rates if rate.op == "attend" and rate.rows == 1}

    def read(rate: Rate) -> Rate:
        one = ones.get((rate.lane, rate.format))
        if one is None or rate.op != "attend" or rate.rows or rate.format not in KV_FORMATS:
            return rate
        most_s = one.alpha_s + _shortest_bytes(rate.format) * one.s_per_byte
        if rate.alpha_s <= _SLACK * most_s:
            return rate
        line = fit([(x, rate.alpha_s + x * rate.s_per_flop) for x in _many_rows_flops()], most_s)
        return replace(rate, alpha_s=line.alpha_s, s_per_flop=line.slope_s)

    return replace(machine, rates=tuple(map(read, machine.rates)))


def _shortest_bytes(kv: str) -> int:
    """Of the calls of one row that the probe times: K and V that one head has up to the first position."""
    return min(start + 1 for _, start in ONE_ROW_TIMED) * 2 * parse_format(kv).kv_bytes(HEAD_DIM)


@functools.cache
def _many_rows_flops() -> tuple[int, ...]:
    """Of the calls over many rows that the probe times, over KV in any format."""
    return tuple(flops for _, flops in attention_sizes("float16", MANY_ROWS_TIMED))
