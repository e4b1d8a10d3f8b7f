"""What is compared with what, as plans: orders of work, cuts, where weights and KV live."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from bench.pipo.session import PipoSession
from penstock.graph.arenas import Layout
from penstock.planner.solve import settle_context, solve
from penstock.planner.solve.ours.ram import skeleton
from penstock.planner.solve.problem import Problem
from penstock.runtime import host
from penstock.spec.ask import Ask
from penstock.spec.machine import Capacity, MachineSpec, Rate
from penstock.spec.parts import PINNED
from penstock.spec.places import CPU, DISK, HOST
from penstock.spec.plan import Plan, Unit
from penstock.store.packed import Packed


@dataclass(frozen=True)
class Setting:
    """`resident`: share of the weights that stays in memory; what streams does so in `order`, where `two_blocks` is set
    through a ring as FlexGen's order has it. `plain` and `dequantise`: see PipoSession; plain reads take a part at a
    time. `batch` sequences with room for `context` tokens each, of which `prompt` come first."""

    order: str = "overlapped"
    two_blocks: bool = False
    plain: bool = False
    dequantise: bool = False
    resident: float = 0.0
    kv_home: str = "memory"
    batch: int = 1
    prompt: int = 512
    context: int = 576


OURS = Setting()
FLEXGEN = Setting(order="flexgen", two_blocks=True, plain=True, dequantise=True)


@dataclass(frozen=True)
class Workshop:
    """The model, the machine whose figures the solver takes, and a folder on the disk for KV."""

    packed: Packed
    machine: MachineSpec
    folder: Path

    def open(self, setting: Setting) -> PipoSession:
        return PipoSession(
            self.packed, self.plan(setting), self.folder, plain=setting.plain, dequantise=setting.dequantise
        )

    def plan(self, setting: Setting) -> Plan:
        """The solver's plan; in another order, or for plain reads, with units and a ring that fit those, and with the
        solver's chunks and reads all the same."""
        weights = self.packed.total_bytes
        ask = Ask(
            prompt_tokens=setting.prompt, output_tokens=max(1, setting.context - setting.prompt), batch=setting.batch,
            context=setting.context, kv_home=setting.kv_home, host_memory_bytes=1 << 50,
            resident_bytes=None if setting.resident >= 1 else int(setting.resident * weights),
        )  # fmt: skip
        plan = solve(ask, self.packed.spec, self.packed.weights, self.machine).plan
        if setting.order == "overlapped" and not setting.two_blocks:
            return plan
        assert setting.resident == 0, "other orders are measured with everything streaming"
        return self._reordered(plan, setting, settle_context(ask, self.packed.spec))

    def _reordered(self, plan: Plan, setting: Setting, ask: Ask) -> Plan:
        """FlexGen's order holds two blocks, the one that is computed and the one that comes in (and room for what wraps
        round at the ring's end); the saving order one, which a larger head goes through in pieces."""
        blocks = [part.nbytes for part in plan.parts.values() if part.kind in ("attn", "ffn")]
        granule = max(part.granule_bytes for part in plan.parts.values() if part.kind not in PINNED)
        whole = max(blocks + [part.nbytes for part in plan.parts.values() if part.kind in ("embed", "head")])
        ring_bytes = 2 * whole + max(blocks)
        if setting.order == "saving":
            ring_bytes = whole if setting.plain else max(max(blocks), granule)
        kv_layers = len(plan.target.spec.layers) if setting.kv_home == "memory" else 0
        problem = Problem(ask, self.packed.spec, self.packed.weights, self.machine)
        found = skeleton(problem, plan.chunk_rows, kv_layers, ring_bytes, setting.order).plan({}, {})
        found = replace(
            found, io_block_bytes=plan.io_block_bytes, io_depth=plan.io_depth, io_engine=plan.io_engine,
            units=tuple(_whole(found.units)) if setting.plain else found.units, arenas=(),
        )  # fmt: skip
        return replace(found, arenas=Layout(found).arenas())


def _whole(units: tuple[Unit, ...]) -> list[Unit]:
    """A unit per part and home. An engine of single tensors would read q, k, v and o apart, and gate, up and down; here
    they lie together, so that even a plain read is one of what PIPO calls merged data (§3.3)."""
    runs = (list(run) for _, run in groupby(units, key=lambda unit: (unit.part, unit.home)))
    return [replace(run[0], hi=run[-1].hi) for run in runs]


def guessed_machine() -> MachineSpec:
    """For a quick look, without a probe: its rates choose between plans that stream, so any do."""
    return MachineSpec(
        name="bench",
        tiers=(Capacity(HOST, 1 << 60), Capacity(DISK.tier, 1 << 60)),
        rates=(Rate(CPU, "*", "*", 1e-6, 1e-10), Rate(DISK.reads, "*", "*", 1e-4, 1e-9)),
        threads=host.usable_cpus(),
    )
