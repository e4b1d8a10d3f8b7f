"""The quick probe beside the whole one, for `bench.predict`: what it foretells, raw and after the runs so far, and what
the promise is when it is renewed right before the first word."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.rounds import refuse_other, replace
from penstock.planner.predict import Prediction
from penstock.planner.shorten import quick
from penstock.runtime.probe import quick_apart
from penstock.serve.generation import Generation
from penstock.serve.history import note_run, runs
from penstock.serve.lately import as_runs_show
from penstock.serve.renewal import Renewed
from penstock.spec import machine as machines
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.places import reads_disk
from penstock.spec.plan import Plan

LEARNT = 10  # runs that the disk binds, after which the quick probe should foretell as well as the whole one
LIMIT_QUICK, LIMIT_POINTS = 0.20, 0.02  # at the median; of the median beyond the whole probe's
LIMIT_RENEWED, LIMIT_RENEWED_WORST, LIMIT_LEFT_OUT = 0.05, 0.15, 0.2


def keep_machine(file: Path, machine: MachineSpec, about: dict[str, Any]) -> None:
    """With `about`: the build, the machine and how it is measured."""
    replace(file, json.dumps({"about": about, "machine": machines.dumps(machine)}))


def kept_machine(file: Path, about: dict[str, Any]) -> MachineSpec:
    """What was kept of the same `about`; another one ends the bench. Raises BadRequest."""
    kept = json.loads(file.read_text())
    refuse_other(file, kept.get("about"), about)
    return machines.loads(kept["machine"], file.name)


class Hasty:
    """This machine as a new user has it: measured once, in haste, and shifted by the runs so far. `folder`: keeps
    both. `goes_on`: with what is kept there, which must be of the same `about`. Raises BadRequest, StorageFailed."""

    def __init__(self, folder: Path, about: dict[str, Any], goes_on: bool = False) -> None:
        self._file, self.runs = folder / "quick-machine.json", 0
        kept = self._file.with_suffix(".runs.jsonl")
        if goes_on and self._file.exists():
            self._machine = kept_machine(self._file, about)
            self._count()
            return
        machine = quick_apart(folder, "int4", None)
        assert machine is not None, "a machine like this one was measured whole"
        self._machine = machine
        kept.unlink(missing_ok=True)
        keep_machine(self._file, machine, about)

    def foretell(self, plan: Plan, ask: Ask) -> dict[str, Any]:
        """Fields of a row: the prediction of a plan by the quick probe alone, and after the runs so far."""
        learnt = as_runs_show(self._file, self._machine, plan.target.weights.name, plan.sparsity).machine
        self._last = quick(plan, ask, learnt, spread=False)
        self._taken = learnt
        return {
            "quick": _figures(quick(plan, ask, self._machine, spread=False)),
            "learnt": _figures(self._last),
            "runs_before": self.runs,
        }

    def learn(self, plan: Plan, answers: Sequence[Generation]) -> None:
        """Keeps the runs of a setting, which `foretell` was asked for last. Those whose decoding the disk
        binds are counted: no other run says what it gives, and settings in RAM come first."""
        for answer in answers:
            note_run(self._file, self._machine, plan, self._last, answer, (), self._taken)
        self._count()

    def _count(self) -> None:
        kept = runs(self._file, self._machine)
        self.runs = sum(reads_disk(run.step.dominant.figure.lane) for run in kept)


def _figures(prediction: Prediction) -> dict[str, float]:
    return {"decode_tokens_per_s": prediction.decode_tokens_per_s, "ttft_s": prediction.ttft_s}


def renewed_fields(renewed: Renewed | None) -> dict[str, Any]:
    return {"renewed": None if renewed is None else _figures(renewed.prediction)}


def summary(rows: Sequence[dict[str, Any]], steady: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Errors at the median, of decoding and of first tokens, and whether they are as they should be. Of renewed
    promises the rows count that were `steady`."""
    learnt = [row for row in rows if row["runs_before"] >= LEARNT]
    promised = [row for row in rows if row["renewed"] is not None]
    kept = [row for row in promised if steady(row)]
    found: dict[str, Any] = {
        "learnt_settings": len(learnt),
        "renewed_settings": len(kept),
        "renewed_left_out": len(promised) - len(kept),
    }
    of: tuple[tuple[str, Sequence[dict[str, Any]]], ...] = (("quick", rows), ("learnt", learnt), ("renewed", kept))
    for name, those in of:
        for figure in ("decode_tokens_per_s", "ttft_s"):
            errors = [abs(row[name][figure] / row[figure] - 1) for row in those]
            found[f"{name}_{figure}_error_median"] = statistics.median(errors) if errors else None
            found[f"{name}_{figure}_error_worst"] = max(errors, default=None)
    whole = [row["decode_error"] for row in learnt]
    found["whole_decode_error_median_beside_learnt"] = statistics.median(whole) if whole else None
    return found | {"within": _within(found, len(promised), whole)}


def _within(found: dict[str, Any], promised: int, whole: Sequence[float]) -> dict[str, bool | None]:
    quick_error = found["quick_decode_tokens_per_s_error_median"]
    learnt_error, renewed_error = (found[f"{name}_decode_tokens_per_s_error_median"] for name in ("learnt", "renewed"))
    return {
        "quick": None if quick_error is None else quick_error <= LIMIT_QUICK,
        "learnt": None if learnt_error is None else learnt_error <= statistics.median(whole) + LIMIT_POINTS,
        "renewed": None
        if renewed_error is None
        else renewed_error <= LIMIT_RENEWED
        and found["renewed_decode_tokens_per_s_error_worst"] <= LIMIT_RENEWED_WORST
        and found["renewed_left_out"] <= LIMIT_LEFT_OUT * promised,
    }


def line(row: dict[str, Any]) -> str:
    """What a row's line says of these."""

    def error(name: str) -> str:
        known = row[name]
        return "–" if known is None else f"{known['decode_tokens_per_s'] / row['decode_tokens_per_s'] - 1:+.0%}"

    return ", ".join([f"quick {error('quick')}", f"after {row['runs_before']} runs {error('learnt')}",
                      f"renewed {error('renewed')}"])  # fmt: skip
