"""Makes a plan for an ask on this machine, with the device that it computes on. No weights are read here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import BadRequest, DoesNotFit
from penstock.graph.check_plan import check_plan
from penstock.planner.firing import Firing, sparsity_of
from penstock.planner.firing import reason as firing_reason
from penstock.planner.predict import predict
from penstock.planner.routing import RouterTrace
from penstock.planner.solve import Solved, settle_context, solve
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.refusal import require_minimum
from penstock.runtime import host
from penstock.runtime.device import Device, uses_device
from penstock.runtime.device.choose import ChosenDevice, choose
from penstock.runtime.host import Progress
from penstock.runtime.made import stays_here
from penstock.runtime.probe import load_or_probe, machine_file
from penstock.serve.lately import Lately, as_runs_show
from penstock.serve.planning import default_cache, firing_of, routers_of
from penstock.serve.session import Running
from penstock.serve.tokenizer import Tokenizer
from penstock.spec.ask import Ask
from penstock.spec.machine import PROCESS_BYTES, MachineSpec
from penstock.spec.parts import PAGE_BYTES
from penstock.spec.places import GPU, HOST
from penstock.spec.plan import Plan
from penstock.store.packed import Packed
from penstock.units import MIB, format_bytes, format_mib_up, round_up


@dataclass(frozen=True, kw_only=True)
class Loading(Running):
    """How a model is loaded.

    machine       the machine's figures; None for those of this machine, which is probed once
    device        auto, cuda, none, emulated, or a device that was chosen already
    cache         the folder of machine files and of KV on a disk; None for the user's
    plan          a plan that is taken as it is; None to make one
    family        the system whose plan is wanted, one of `planner.families.FAMILIES`; None for the best plan
    verify        whether every byte is compared with its checksum when it is read first
    tokenizer     the model's tokenizer, if it is open already
    beside_bytes  memory that the process takes for other things than this model, such as a server's libraries
    guide_bytes   the part of `beside_bytes` that the process takes which holds answers to JSON schemas
    prompt        the ids of the prompt that is answered first; () if it is not known. If all weights stay in RAM, the
                  prompt is read while they are loaded
    """

    machine: MachineSpec | None = None
    device: str | ChosenDevice = "auto"
    cache: Path | None = None
    plan: Plan | None = None
    family: str | None = None
    verify: bool = True
    tokenizer: Tokenizer | None = None
    beside_bytes: int = 0
    guide_bytes: int = 0
    prompt: tuple[int, ...] = ()

    @property
    def cache_folder(self) -> Path:
        return self.cache or default_cache()

    def sparsity(self, ask: Ask) -> str:
        """What is done about neurons that do not fire: as the given plan says, or else the ask."""
        return ask.sparsity if self.plan is None else self.plan.sparsity


@dataclass(frozen=True)
class Planned:
    """A plan and a device, before loading. `machine_file`: of the machine whose figures the prediction comes from; None
    where a machine was given. `lately`: its figures as measured, and as runs of the last days show them. `trace`: what
    routers were taken to say. `context_told`: what the context costs, where the user named it or had it grow."""

    ask: Ask
    how: Loading
    solved: Solved
    chosen: ChosenDevice
    machine_file: Path | None
    lately: Lately
    trace: RouterTrace | None
    context_told: str | None = None

    @property
    def plan(self) -> Plan:
        return self.solved.plan

    def open_device(self) -> Device | None:
        """Opens the device if the plan computes on one. Its cap is the user's limit, or else all of its memory."""
        if not uses_device(self.plan):
            return None
        assert self.chosen.open is not None, "a machine without a device has no such plan"
        limit, asked = self.chosen.machine.tier(GPU.executor).bytes, self.ask.device_memory_bytes
        return self.chosen.open(limit if asked is None else min(limit, asked))

    def device_reasons(self, device: Device | None) -> tuple[str, ...]:
        """Why this device computes, or why none does. Empty if none does and the user asked for none. `device`: as
        `open_device` returned it."""
        if device is not None:
            return (device.description,)
        return () if self.how.device == "auto" else (self.chosen.reason,)

    def notes(self, device: Device | None) -> tuple[str, ...]:
        """Lines for the user, about what the context costs and about the device. `device`: as `open_device` returned
        it."""
        told = () if self.context_told is None else (self.context_told,)
        return (*told, *self._device_notes(device))

    def _device_notes(self, device: Device | None) -> tuple[str, ...]:
        if device is not None:
            return tuple(line for line in (device.description, device.note) if line)
        if self.chosen.open is not None:
            return (f"{self.chosen.reason}, but is left alone: the CPU by itself is as fast",)
        if self.ask.device_memory_bytes is not None and self.chosen.name == "none":
            return (f"--device-memory limits nothing: {self.chosen.reason}",)
        return ()

    def require_free(self) -> None:
        """Raises DoesNotFit where the memory that the plan takes is no longer free: other processes may have taken it
        since the plan was made. All pages of arenas are taken at once, and a system without free memory kills a process
        instead of refusing."""
        tiers = self.plan.tier_bytes()
        # The memory of an emulated device is the host's too.
        need = tiers[HOST] + (tiers.get(GPU.executor, 0) if self.chosen.name == "emulated" else 0)
        have = host.available_bytes()
        if need > have:
            raise _does_not_fit(
                f"the plan takes {format_bytes(need)} of memory, and now only {format_bytes(have)} are free: end what "
                f"took the rest, or plan for less (--host-memory {format_mib_up(have * 9 // 10)})",
                need,
                have,
            )


def plan_here(ask: Ask, packed: Packed, how: Loading, on_progress: Progress | None = None) -> Planned:
    """Plans a packed model for this machine, or takes `how.plan`. Raises DoesNotFit, and BadRequest for a plan that
    makes no sense, is for another model, or needs a device that is not here."""
    _require_limit(ask)
    sparsity = how.sparsity(ask)
    firing = firing_of(packed.folder, packed.spec, sparsity)
    if how.plan is not None:
        check_plan(how.plan, packed.spec, packed.weights)
    elif ask.host_memory_bytes is not None:  # checked before the probe, which may take a minute
        settled = settle_context(ask, packed.spec)
        process_bytes = PROCESS_BYTES + how.beside_bytes
        require_minimum(settled, packed.spec, packed.weights, process_bytes, ask.host_memory_bytes, firing)
    machine, file = how.machine, None
    if machine is None:
        isa = how.kernels if how.kernels != "reference" else None
        machine = load_or_probe(how.cache_folder, on_progress, kind=packed.weights.kind, isa=isa)
        file = machine_file(how.cache_folder, isa)
    chosen = how.device
    if isinstance(chosen, str):
        chosen = choose(chosen, machine, ask.device_memory_bytes, how.cache_folder, on_progress)
    if how.beside_bytes:
        beside = replace(chosen.machine, process_bytes=chosen.machine.process_bytes + how.beside_bytes)
        chosen = replace(chosen, machine=beside)
    shown, context_told = Lately(chosen.machine, chosen.machine), None
    if file is not None:
        shown = as_runs_show(file, chosen.machine, packed.weights.name, sparsity_of(sparsity, packed.spec))
        chosen = replace(chosen, machine=shown.machine)
    trace = routers_of(packed.folder, packed.spec, sparsity)
    if how.plan is None and how.family is not None:
        problem = Problem(settle_context(ask, packed.spec), packed.spec, packed.weights, chosen.machine, trace, firing)
        solved = _as_given(_of_family(how.family, problem), ask, packed, chosen, firing, trace)
    elif how.plan is None:
        ask, solved, context_told = _solved(ask, packed, chosen.machine, trace, firing)
    else:
        solved = _as_given(how.plan, ask, packed, chosen, firing, trace)
    return Planned(ask, how, solved, chosen, file, shown, trace, context_told)


def to_load_unpacked(planned: Planned, reading_bytes: int) -> tuple[Planned | None, str]:
    """What is planned for a packed model, with what a checkpoint takes that is loaded without one: `reading_bytes` more
    while it is read. Or None, and why it has to be packed first."""
    plan, machine = planned.plan, planned.chosen.machine
    if not stays_here(plan):
        return None, "packs the checkpoint first: not all of its weights stay in RAM"
    within = replace(plan, process_bytes=plan.process_bytes + round_up(reading_bytes, MIB))
    need, limit = within.tier_bytes()[HOST], planned.ask.host_memory_bytes
    have = min(host.available_bytes(), machine.tier(HOST).bytes if limit is None else limit)
    if need > have:
        took = f"it takes {format_bytes(need)} to load it as it is, and {format_bytes(have)} are there"
        return None, f"packs the checkpoint first: {took}"
    return replace(planned, solved=replace(planned.solved, plan=within)), ""


def _solved(
    ask: Ask, packed: Packed, machine: MachineSpec, trace: RouterTrace | None, firing: Firing | None
) -> tuple[Ask, Solved, str | None]:
    """The ask, with a context that has grown where that is wanted, its plan, and what the context costs."""

    def solving(one: Ask) -> Solved:
        return solve(one, packed.spec, packed.weights, machine, packed.part_disks, trace=trace, firing=firing)

    if not ask.grow_context and ask.context is None:
        return ask, solving(ask), None
    from penstock.planner.room import cost_of_context, grown  # most runs do not ask it

    if ask.grow_context:
        return grown(ask, packed.spec, solving)
    solved = solving(ask)
    return ask, solved, cost_of_context(ask, packed.spec, solved, solving)


def _of_family(family: str, problem: Problem) -> Plan:
    """Raises BadRequest where the family has no plan for this problem."""
    from penstock.planner.families import plan_of  # it imports solvers that most runs do not ask

    plan = plan_of(family, problem)
    if plan is None:
        raise BadRequest(
            f"--family {family} has no plan here: it takes a device, which does not hold all weights, RAM for the"
            " others, and experts where the family is about them, or none"
        )
    return plan


def _as_given(
    plan: Plan, ask: Ask, packed: Packed, chosen: ChosenDevice, firing: Firing | None, trace: RouterTrace | None
) -> Solved:
    """A given plan with its prediction. It is held to the same limit as a plan that is made here: where it counts fewer
    bytes for the process itself than such a plan would, the difference is added. Raises BadRequest, DoesNotFit."""
    if uses_device(plan) and chosen.open is None:
        raise BadRequest(f"this plan computes on a device (--device says which); {chosen.reason}")
    machine = chosen.machine
    process = round_up(machine.process_bytes + packed.spec.tokenizer_bytes, MIB)
    need = plan.tier_bytes()[HOST] + max(0, process - plan.process_bytes)
    have = machine.tier(HOST).bytes if ask.host_memory_bytes is None else ask.host_memory_bytes
    if need > have:
        raise _does_not_fit(
            f"host memory of {format_bytes(have)} is too little for this plan: it needs {format_bytes(need)}"
            f" (--host-memory {format_mib_up(need)}, or a plan for less)",
            need,
            have,
        )
    prediction = predict(plan, settle_context(ask, packed.spec), machine, trace=trace)
    return Solved(plan, prediction, ("as given", *firing_reason(plan, firing, ask.resident_bytes is None)))


def _require_limit(ask: Ask) -> None:
    """Raises BadRequest for a limit beyond the memory that this process may have: the system would kill us before we
    reach it. The limit of a cgroup was rounded down to a page. What was asked for may be more by less than that."""
    most = host.memory_limit_bytes()
    if ask.host_memory_bytes is not None and ask.host_memory_bytes - most >= PAGE_BYTES:
        raise BadRequest(
            f"--host-memory {format_bytes(ask.host_memory_bytes)} is more than the {format_bytes(most)} "
            "that this process may have"
        )


def _does_not_fit(text: str, need: int, have: int) -> DoesNotFit:
    return DoesNotFit(text, tier=HOST, need_bytes=need, have_bytes=have, minimum_bytes=need)
