"""PIPO's plans: attention and FFN as separate whole blocks, all computed on the device, in two pipelines.

Which home the weights have and which pipeline runs is Eq. 1's question (`pipo_memory`). What fits is asked of the plans
themselves, to the byte; the paper's own account stands among the reasons. The overlapped pipeline has a ring for two
blocks, so that the next one comes while this one computes; the memory-saving one a ring for one. KV lives in RAM
(section 3.1.1), on the device only where all weights do and nothing needs to be offloaded (appendix C.7).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from penstock.graph.arenas import ARENA_ALIGN
from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.device_plan import DeviceSkeleton, Split
from penstock.planner.solve.pipo_memory import (
    HOMES,
    PIPELINES,
    Choice,
    Limits,
    block_bytes,
    equation_1,
    limits_of,
    peak_bytes,
    sizes,
)
from penstock.planner.solve.skeleton import PINNED, Resident, chunk_options, kv_format
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.parts import parts
from penstock.spec.plan import DEVICE, Plan
from penstock.units import format_bytes, format_rate, round_up

NAMES = {"overlapped": "PIPO, overlapped", "saving": "PIPO, memory-saving"}
PARTIAL = ", partly on the device"
_SHARES = 256  # a share of weights on the device is a multiple of 1/256
_PLACES = {DEVICE: "in device memory", "host": "in RAM", "disk0": "on the disk"}


@dataclass(frozen=True)
class Work:
    """What is to be planned. `ask` has its context settled."""

    ask: Ask
    spec: ModelSpec
    weights: Format
    machine: MachineSpec

    @property
    def limits(self) -> Limits:
        """The machine's memory, or less where the ask says so; its rates."""
        device, host = self.ask.device_memory_bytes, self.ask.host_memory_bytes
        has_device, has_host = self.machine.tier(DEVICE).bytes, self.machine.tier("host").bytes
        return limits_of(
            self.machine, self.weights, has_device if device is None else min(device, has_device),
            has_host if host is None else host, self.ask.batch,
        )  # fmt: skip

    def fits(self, plan: Plan) -> bool:
        limits, used = self.limits, plan.tier_bytes()
        return used.get(DEVICE, 0) <= limits.device_bytes and used["host"] <= limits.host_bytes


def candidates(ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec) -> Iterator[Candidate]:
    """For each pipeline the nearest home in which all weights fit, and what the device holds beside it (partial
    offloading, appendix C.5). Nothing where there is no device or KV is to be on the disk; where all weights stay on
    the device one plan, since nothing is left to be pipelined."""
    if not any(tier.name == DEVICE for tier in machine.tiers) or ask.device_memory_bytes == 0 or ask.kv_home == "disk":
        return
    work = Work(ask, spec, weights, machine)
    for pipeline in PIPELINES:
        whole = _whole(work, pipeline)
        if whole is not None:
            yield _candidate(work, *whole)
            if whole[0].home == DEVICE:
                return
        partial = _partial(work, pipeline) if ask.resident_bytes is None else None
        if partial is not None:
            yield _candidate(work, *partial)


def plan(
    work: Work, choice: Choice, kv_home: str, chunk_rows: int, order: str | None = None, whole_blocks: bool = True
) -> Plan:
    """Complete; whether it fits is another question. `order`: another than the pipeline's. Without `whole_blocks`,
    units and rings are as small as granules allow. An embedding that is only looked up stays in RAM, or on the disk
    where a limit on what stays is asked for. The stage between disk and device holds what the ring of two blocks does
    twice: with less, the disk waits for its bytes while a large block is lifted."""
    ask, spec, weights = work.ask, work.spec, work.weights
    block, two = block_bytes(spec, weights) if whole_blocks else (0, 0)
    granule = max(part.granule_bytes for part in parts(spec, weights) if part.kind not in PINNED)
    ring = round_up(max(two if choice.pipeline == "overlapped" else block, 2 * granule), ARENA_ALIGN)
    skeleton = DeviceSkeleton(
        ask, spec, weights, work.machine, Split("link", 1.0, len(spec.layers), kv_home, True), chunk_rows,
        ring_bytes=ring, host_ring_bytes=ring, stage_bytes=2 * round_up(max(two, 2 * granule), ARENA_ALIGN),
        order=order or choice.pipeline, unit_bytes=block,
    )  # fmt: skip
    on_device: Resident = {}
    in_memory: Resident = {}
    for part in parts(spec, weights):
        if part.key == "embed" and not spec.tied:
            in_memory[part.key] = part.granules if ask.resident_bytes is None else 0
            continue
        on_device[part.key] = int(part.granules * choice.on_device)
        if choice.home == "host":
            in_memory[part.key] = part.granules - on_device[part.key]
    return skeleton.plan(on_device, in_memory)


def _homes(work: Work) -> tuple[str, ...]:
    """The nearest first. RAM only where the link is faster than the disk (Eq. 1); the disk alone where a limit on what
    stays in memory is asked for."""
    if work.ask.resident_bytes is not None:
        return ("disk0",)
    limits = work.limits
    return HOMES if limits.disk_s_per_byte > limits.link_s_per_byte else (DEVICE, "disk0")


def _whole(work: Work, pipeline: str) -> tuple[Choice, Plan] | None:
    """The first home that fits, with the longest chunks of prompts that do."""
    for home in _homes(work):
        choice = Choice(home, pipeline, float(home == DEVICE))
        found = _fitting(work, choice, (DEVICE, "host") if home == DEVICE else ("host",))
        if found is not None:
            return choice, found
    return None


def _partial(work: Work, pipeline: str) -> tuple[Choice, Plan] | None:
    """As much as fits on the device, in even shares of every part, beside the longest chunks that fit with none; the
    rest in the nearest home that takes it."""
    most = work.limits.device_bytes
    for home in (home for home in _homes(work) if home != DEVICE):

        @cache
        def of(shares: int, rows: int, home: str = home) -> Plan:
            return plan(work, Choice(home, pipeline, shares / _SHARES), "host", rows)

        def used(shares: int, rows: int) -> int:
            return of(shares, rows).tier_bytes()[DEVICE]

        rows = next((rows for rows in chunk_options(work.ask) if used(0, rows) <= most), None)
        if rows is None:
            continue
        # Bytes grow evenly with the share, but for huge pages and scratch: the line is near, the neighbours decide.
        half = _SHARES // 2
        a_share = max(1.0, (used(half, rows) - used(0, rows)) / half)
        shares = min(_SHARES - 1, max(0, int((most - used(0, rows)) / a_share)))
        while shares and used(shares, rows) > most:
            shares -= 1
        while shares < _SHARES - 1 and used(shares + 1, rows) <= most:
            shares += 1
        if shares and work.fits(of(shares, rows)):
            return Choice(home, pipeline, shares / _SHARES), of(shares, rows)
    return None


def _fitting(work: Work, choice: Choice, kv_homes: tuple[str, ...]) -> Plan | None:
    """The plan with the longest chunks that fits. Whole blocks; the memory-saving pipeline goes below them where they
    leave no room, and nothing else stays."""
    cuts = (True, False) if choice.pipeline == "saving" else (True,)
    for kv_home in kv_homes:
        for whole_blocks in cuts:
            for chunk_rows in chunk_options(work.ask):
                found = plan(work, choice, kv_home, chunk_rows, whole_blocks=whole_blocks)
                if work.fits(found):
                    return found
    return None


def _candidate(work: Work, choice: Choice, found: Plan) -> Candidate:
    partly = PARTIAL if choice.home != DEVICE and choice.on_device else ""
    return Candidate(NAMES[choice.pipeline] + partly, found, _reasons(work, choice, found))


def _reasons(work: Work, choice: Choice, found: Plan) -> tuple[str, ...]:
    """What Eq. 1 says with its own account of bytes, and what the plan does."""
    ask, limits = work.ask, work.limits
    tokens = ask.prompt_tokens + ask.output_tokens
    s = sizes(work.spec, work.weights, kv_format(ask, work.spec))
    published = equation_1(s, ask.batch, tokens, limits)
    need, kv = peak_bytes(s, ask.batch, tokens, "overlapped"), s.kv_total_bytes(ask.batch, tokens)
    account = (
        f"PIPO Eq. 1: W {format_bytes(s.weights_bytes)} and M {format_bytes(need)} against "
        f"{format_bytes(limits.device_bytes)} of the device, W and C {format_bytes(kv)} against "
        f"{format_bytes(limits.host_bytes)} of RAM, link {format_rate(1 / limits.link_s_per_byte)}, disk "
        f"{format_rate(1 / limits.disk_s_per_byte)}: weights {_PLACES[published.home]}, {NAMES[published.pipeline][6:]}"
    )
    ring = found.ring_bytes.get(DEVICE)
    if ring is None:
        lines = [account, f"all weights {_PLACES[choice.home]}"]
    elif choice.on_device:
        lines = [account, f"{choice.on_device:.0%} of the weights in device memory, the rest {_PLACES[choice.home]}"]
    else:
        lines = [account, f"all weights {_PLACES[choice.home]}: each token lifts all of them"]
    if ring is not None:
        how = "two blocks: one comes while the other computes" if choice.pipeline == "overlapped" else "one block"
        lines.append(f"a ring of {format_bytes(ring)}, for {how}")
    home = found.kv[0].home
    lines.append(
        f"KV in {found.kv[0].format.name} {_PLACES[home]}" + (", an attention ahead" if home == "host" else "")
    )
    return tuple(lines)
