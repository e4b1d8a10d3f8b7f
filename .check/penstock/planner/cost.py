"""The one cost formula: only `seconds` turns bytes and flops into time."""

from __future__ import annotations

from penstock.graph.tasks import Task
from penstock.spec.machine import MachineSpec, Rate


class Cost:
    """A machine's rates, looked up once per (lane, op, format)."""

    def __init__(self, machine: MachineSpec) -> None:
        self.machine = machine
        self._rates: dict[tuple[str, str, str], Rate] = {}

    def seconds(self, task: Task) -> float:
        """Calls run one after another: the sum of alpha + max(bytes · s_per_byte, flops · s_per_flop), each
        (ScheInfer Eq. 3, with PIPO's two regimes). On two lanes the slower leg counts."""
        return max(sum(self._call_s(lane, *call[5:8], call.op) for call in task.calls) for lane in task.lanes)

    def _call_s(self, lane: str, fmt: str, nbytes: int, flops: int, op: str) -> float:
        key = (lane, op, fmt)
        rate = self._rates.get(key)
        if rate is None:
            rate = self._rates[key] = self.machine.rate(lane, op, fmt)
        return rate.alpha_s + max(nbytes * rate.s_per_byte, flops * rate.s_per_flop)
