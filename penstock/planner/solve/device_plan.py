"""A plan beside a device, but which bytes stay where: what `device.candidates` varies.

Granules of a part lie in the order GG | CG | CC | DC | DG, so what an executor computes is one or two runs of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock.planner.solve.layer_costs import LINK
from penstock.planner.solve.skeleton import PINNED, UNIT_BYTES, Resident, assembled, even_units, kv_format
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.parts import Part, head_key, parts
from penstock.spec.plan import DEVICE, KvHome, Plan, Predictor, Unit
from penstock.units import MIB, format_bytes, round_up

# Of a lift's copying time, what its fixed cost may be. Half of it would ask for units of 60 MiB where a lift costs
# 60 µs and the link does 25 GB/s: four of them in the ring are what a 6 GB card would rather keep.
FIXED_SHARE = 0.05


@dataclass(frozen=True)
class Split:
    """Who computes what is not at home on the device: `name`. `lifted`: of the FFN granules outside its memory, the
    share that it computes all the same, each token over the link; the CPU computes the others. `attention_layers`: the
    first so many are the device's, with their KV at home in `kv_home`; the others' attention and KV are the CPU's.
    `prompts`: whether the device also computes the CPU's granules where a prompt is read (CG', ScheInfer §IV-B).
    `lifted_by_layer`: instead of `lifted`, where layers differ."""

    name: str
    lifted: float
    attention_layers: int
    kv_home: str
    prompts: bool
    lifted_by_layer: tuple[float, ...] = ()


@dataclass(frozen=True)
class DeviceSkeleton:
    """`ring_bytes`: of the device, and of the host; `stage_bytes`: between disk and device. `order`: of `plan.ORDERS`.
    `unit_bytes`: of a block that crosses the link in one unit, at most; 0: by what lifts cost, and the ring.
    `predictors`: a Plan's."""

    ask: Ask
    spec: ModelSpec
    weights: Format
    machine: MachineSpec
    split: Split
    chunk_rows: int
    ring_bytes: int
    host_ring_bytes: int
    stage_bytes: int
    order: str = "overlapped"
    unit_bytes: int = 0
    predictors: tuple[Predictor, ...] = ()

    def plan(self, on_device: Resident, in_memory: Resident) -> Plan:
        """Complete. `on_device`, `in_memory`: granules that stay there, part by part; what is in neither is on the
        disk. Rings that nothing streams through are left out."""
        ask, spec, split = self.ask, self.spec, self.split
        units = [u for part in parts(spec, self.weights) for u in self._cut(part, on_device, in_memory)]
        layers, seqs, fmt = len(spec.layers), (0, ask.batch), kv_format(ask, spec)
        spans = ((0, split.attention_layers, split.kv_home, DEVICE), (split.attention_layers, layers, "host", "host"))
        rings, stage_bytes = self._rings(units)
        process_bytes = self.machine.process_bytes + self.machine.device_process_bytes
        return assembled(
            ask, spec, self.weights, units, [KvHome((lo, hi), seqs, home, fmt, at) for lo, hi, home, at in spans],
            chunk_rows=self.chunk_rows, rings=rings, stage_bytes=stage_bytes, order=self.order, main=DEVICE,
            process_bytes=process_bytes, context_bytes=self.machine.context_bytes, predictors=self.predictors,
        )  # fmt: skip

    def _cut(self, part: Part, on_device: Resident, in_memory: Resident) -> list[Unit]:
        if part.kind in PINNED:
            return [Unit(part.key, 0, part.granules, DEVICE, DEVICE, DEVICE)]
        there = on_device.get(part.key, 0)
        memory = min(part.granules, there + in_memory.get(part.key, 0))
        if part.kind == "embed" and not self.spec.tied:  # gathered, row by row
            home = "host" if memory == part.granules else "disk0"
            return [Unit(part.key, 0, part.granules, home, DEVICE, DEVICE)]
        lifted, lift_bytes = self._lifted(part), self._lift_bytes(part)
        here, far = (int(n * lifted + 0.5) for n in (memory - there, part.granules - memory))
        prompts = DEVICE if self.split.prompts and part.kind == "ffn" else "host"
        runs = (
            (0, there, DEVICE, DEVICE, DEVICE, part.nbytes),
            (there, there + here, "host", DEVICE, DEVICE, lift_bytes),
            (there + here, memory, "host", "host", prompts, lift_bytes if prompts == DEVICE else part.nbytes),
            (memory, part.granules - far, "disk0", "host", prompts, self._load_bytes(part, prompts)),
            (part.granules - far, part.granules, "disk0", DEVICE, DEVICE, self._stage_unit_bytes(part)),
        )
        return [
            Unit(part.key, a, b, home, decode, prefill)
            for lo, hi, home, decode, prefill, unit_bytes in runs
            for a, b in even_units(part, lo, hi, unit_bytes)
        ]

    def _lifted(self, part: Part) -> float:
        """The share of granules outside its memory that the device computes."""
        if part.kind == "ffn":
            return self.split.lifted_by_layer[part.layer] if self.split.lifted_by_layer else self.split.lifted
        return 1.0 if part.kind != "attn" or part.layer < self.split.attention_layers else 0.0

    def _lift_bytes(self, part: Part) -> int:
        """A vocabulary is larger than the ring of two blocks that it comes through, where these are whole units."""
        if self.unit_bytes:
            return self.unit_bytes if part.kind in ("attn", "ffn") else min(self.unit_bytes, self.ring_bytes // 2)
        return self._usual_lift_bytes

    @cached_property
    def _usual_lift_bytes(self) -> int:
        return lift_bytes(self.machine, self.weights, self.ring_bytes)

    def _stage_unit_bytes(self, part: Part) -> int:
        return min(self._lift_bytes(part), self.stage_bytes // 2)

    def _load_bytes(self, part: Part, prompts: str) -> int:
        loads = min(UNIT_BYTES, self.host_ring_bytes // 4)
        return min(loads, self._stage_unit_bytes(part)) if prompts == DEVICE else loads

    def _rings(self, units: list[Unit]) -> tuple[dict[str, int], int]:
        """(rings that something streams through, the stage), none smaller than its largest unit."""
        sizes = {part.key: part.granule_bytes for part in parts(self.spec, self.weights)}
        gathered = "" if self.spec.tied else "embed"
        need = {DEVICE: 0, "host": 0}
        stage_bytes = 0
        for unit in units:
            if unit.part == gathered:
                continue
            nbytes = (unit.hi - unit.lo) * sizes[unit.part]
            if unit.home == DEVICE:
                stage_bytes = max(stage_bytes, 2 * sizes[unit.part], self.stage_bytes)
            for executor in {unit.decode, unit.prefill} - {unit.home}:
                need[executor] = max(need[executor], nbytes)
                if executor == DEVICE and unit.home.startswith("disk"):
                    stage_bytes = max(stage_bytes, 2 * nbytes, self.stage_bytes)
        wanted = {DEVICE: self.ring_bytes, "host": self.host_ring_bytes}
        return {tier: max(wanted[tier], nbytes) for tier, nbytes in need.items() if nbytes}, stage_bytes


def vocabulary(spec: ModelSpec, weights: Format) -> Part:
    """The part of the head."""
    return next(part for part in parts(spec, weights) if part.key == head_key(spec))


def lift_bytes(machine: MachineSpec, weights: Format, ring_bytes: int) -> int:
    """The least unit whose copying takes 1 / FIXED_SHARE times its fixed cost, in whole MiB: the link's line (ScheInfer
    Eq. 3) says what PIPO's appendix A finds by trying. Small enough that four fit into the ring."""
    s_per_byte = max(machine.rate(LINK, "lift", "*").s_per_byte, 1e-15)
    wanted = _fixed_s(machine, weights) / FIXED_SHARE / s_per_byte
    return min(round_up(max(1, int(wanted)), MIB), ring_bytes // 4)


def lift_reason(machine: MachineSpec, weights: Format, ring_bytes: int) -> str:
    nbytes = lift_bytes(machine, weights, ring_bytes)
    why = f"at most {FIXED_SHARE:.0%} of its copy"
    if nbytes == ring_bytes // 4:
        why = f"and a ring of {format_bytes(ring_bytes)} should hold four"
    fixed = f"each costs {_fixed_s(machine, weights) * 1e6:.0f} µs beside its bytes"
    return f"lifted in units of at most {format_bytes(nbytes)}: {fixed}, {why}"


def _fixed_s(machine: MachineSpec, weights: Format) -> float:
    """What a unit costs beside its bytes: its copy is begun on the link, its product launched on the device."""
    lift, product = machine.rate(LINK, "lift", "*"), machine.rate(DEVICE, "ffn", weights.name)
    return lift.alpha_s + product.alpha_s + machine.overhead_s(LINK, "task") + machine.overhead_s(DEVICE, "task")
