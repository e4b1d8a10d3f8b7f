"""`penstock plan`: where everything would go, and how fast it would be. Reads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

import penstock
from penstock.cli.options import Json, Machine, Model, Weights, Work, as_path, read_text
from penstock.cli.output import note, print_json, progress
from penstock.errors import BadRequest

if TYPE_CHECKING:
    from penstock.spec.machine import MachineSpec

_MACHINES = Path(penstock.__file__).parent / "machines"


def plan(
    model: Model,
    machine: Machine,
    work: Work,
    weights: Weights = None,
    machine_file: Annotated[
        str | None,
        Option("--machine", metavar="FILE", help="A machine that is not here: a file of `penstock probe --json`."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Where everything would go, and how fast it would be.

    Reads the model's config.json and no weights.
    """
    machine.prepare()
    from penstock.planner.explain import table
    from penstock.planner.solve import solve
    from penstock.serve.planning import describe
    from penstock.spec import codec
    from penstock.spec import plan as plans
    from penstock.spec.format import parse_format

    spec, fmt = describe(as_path(model), parse_format(weights) if weights else None)
    ask = work.ask(machine)
    solved = solve(ask, spec, fmt, _machine(machine_file, machine))
    if not as_json:
        print(table(solved))
        return
    predicted = {name: codec.to_json(value) for name, value in vars(solved.prediction).items()}
    print_json({"plan": plans.to_json(solved.plan), "predicted": predicted, "reasons": solved.reasons})


def _machine(name: str | None, machine: Machine) -> MachineSpec:
    """A file, a machine that comes with penstock by its name, or this one."""
    from penstock.spec import machine as machines

    if name is None:
        from penstock.runtime.probe import load_or_probe

        with progress() as tell:
            return load_or_probe(machine.cache_folder, machine.cache_folder, tell)
    bundled = {path.stem: path for path in sorted(_MACHINES.glob("*.json"))}
    if not as_path(name).exists() and name not in bundled:
        there = f"; bundled are {', '.join(bundled)}" if bundled else ""
        raise BadRequest(f"--machine {name}: there is no such file{there}")
    if machine.threads is not None:
        note(f"--threads {machine.threads} says nothing about --machine {name}")
    return machines.loads(read_text(name if name not in bundled else str(bundled[name])), name)
