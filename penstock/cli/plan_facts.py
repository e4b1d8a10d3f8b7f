"""What `penstock plan` goes by: a machine's figures, and what is known of a model's routers and neurons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import penstock
from penstock.cli.options import Machine, as_path, read_text
from penstock.cli.output import note, progress
from penstock.errors import BadRequest

if TYPE_CHECKING:
    from penstock.planner.firing import Firing
    from penstock.planner.routing import RouterTrace
    from penstock.spec.ask import Ask
    from penstock.spec.format import Format
    from penstock.spec.machine import MachineSpec
    from penstock.spec.model import ModelSpec

_MACHINES = Path(penstock.__file__).parent / "machines"


def figures_of(name: str | None, machine: Machine, ask: Ask) -> MachineSpec:
    """The figures of the machine to plan for: of this one with the device that --device chooses, of a named one with
    its own device. `name`: of --machine. Raises BadRequest."""
    figures = _machine(name, machine)
    if name is not None and machine.device not in ("none", "emulated"):
        return figures
    from penstock.runtime.device.choose import choose

    with progress() as tell:
        return choose(machine.device, figures, ask.device_memory_bytes, machine.cache_folder, tell).machine


def _machine(name: str | None, machine: Machine) -> MachineSpec:
    """The machine of a file, a bundled machine by its name, or with None this one. Raises BadRequest."""
    from penstock.spec import machine as machines

    if name is None:
        from penstock.runtime.probe import load_or_probe

        with progress() as tell:
            return load_or_probe(machine.cache_folder, tell, isa=machine.isa)
    bundled = {path.stem: path for path in sorted(_MACHINES.glob("*.json"))}
    if not as_path(name).exists() and name not in bundled:
        hint = f"; bundled are {', '.join(bundled)}" if bundled else ""
        raise BadRequest(f"--machine {name}: there is no such file{hint}")
    if machine.threads is not None:
        note(f"--threads {machine.threads} says nothing about --machine {name}")
    if machine.isa is not None:
        note(f"--isa {machine.isa} says nothing about --machine {name}")
    if name in bundled:
        return machines.loads(read_text(str(bundled[name])), name)
    from penstock.runtime.probe_begins import with_short_begins

    return with_short_begins(machines.loads(read_text(name), name))


def known(
    path: Path, spec: ModelSpec, ask: Ask, weights: Format | None, machine: Machine, answers: str | None
) -> tuple[RouterTrace | None, Firing | None, str]:
    """What routers say or how often neurons fire, how many do, and what has to be done before the plan runs; "" if
    nothing has. `weights`: None for the checkpoint's. `answers`: the file of --answers. Raises BadRequest for what is
    damaged, or of another model."""
    from penstock.planner.firing import untrained
    from penstock.serve.planning import firing_of, routers_of, with_facts

    beside = with_facts(path, spec, weights, machine.cache_folder)
    firing = firing_of(beside, spec, ask.sparsity)
    not_trained = untrained(ask.sparsity, spec, firing)
    if answers is None:
        return routers_of(beside, spec, ask.sparsity), firing, not_trained
    return *_replayed(answers, beside, spec, ask, firing), not_trained


def _replayed(
    name: str, path: Path, spec: ModelSpec, ask: Ask, firing: Firing | None
) -> tuple[RouterTrace, Firing | None]:
    """The answers of routers in a file of `run --record`, or which neurons count, and how many. `firing`: how many are
    known to otherwise. Raises BadRequest where they are of another model."""
    from penstock.planner import recorded_sets
    from penstock.planner.routing import replayed
    from penstock.spec.answers import MOST_FILE_BYTES, loads
    from penstock.store.packed import is_packed, orders_of, read_manifest

    answers = loads(read_text(name, MOST_FILE_BYTES), name)
    answers.check(spec, name)
    if not answers.live:
        return replayed(answers, name), firing
    recorded_sets.require_kind(answers, ask.sparsity, name)
    orders = orders_of(path, read_manifest(path), spec) if is_packed(path) else {}
    return recorded_sets.trace_of(answers, orders, name), recorded_sets.firing_of(answers, spec, firing, name)
