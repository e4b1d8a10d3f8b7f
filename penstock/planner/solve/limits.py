"""What a plan may take of each memory, and whether it does."""

from __future__ import annotations

from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.plan import DEVICE, Plan


def device_limit_bytes(ask: Ask, machine: MachineSpec) -> int:
    """Of device memory: what is there, or less where the user says so. 0 without a device."""
    there = next((tier.bytes for tier in machine.tiers if tier.name == DEVICE), 0)
    return there if ask.device_memory_bytes is None else min(there, ask.device_memory_bytes)


def host_limit_bytes(ask: Ask, machine: MachineSpec) -> int:
    """Of RAM: the user's word; without one the machine's figure, which is what is free, with a margin."""
    return machine.tier("host").bytes if ask.host_memory_bytes is None else ask.host_memory_bytes


def fits(plan: Plan, ask: Ask, machine: MachineSpec) -> bool:
    """Whether the plan stays within both."""
    used = plan.tier_bytes()
    return used.get(DEVICE, 0) <= device_limit_bytes(ask, machine) and used["host"] <= host_limit_bytes(ask, machine)
