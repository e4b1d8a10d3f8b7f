"""`python -m tests.at_size.beside_device`: random plans beside an emulated device, at the widths of real models.

Each case has a model of `draws` and a plan: a random one (homes of weights and KV, executors, caches, shared rows of
prompts), one that a solver proposes, or one as another system would make it. The same passes go through it
- with all lanes at once, slots filled with NaN before each load, and one task after the other: the same bits;
- in company and each sequence alone in other chunks: the same bits, where no row's executor depends on company;
- and through a plan that has everything in RAM and the CPU compute: near, as another order of sums allows.
`verify` checks the tasks as they ran.

    --cases N | --minutes M    how much (2 minutes)
    --first N                  begin with this case
    --case N                   this one alone
    --narrow                   hidden states of 64 numbers: many more cases a minute

The last line is one JSON object; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import BadRequest, InternalError
from penstock.graph.arenas import with_arenas
from penstock.graph.check_plan import check_plan
from penstock.graph.tasks import Pass, Task
from penstock.graph.verify import verify
from penstock.runtime.device.emulated import EmulatedDevice
from penstock.serve.session import Running, Session
from penstock.spec.format import Format, parse_format
from penstock.spec.parts import parts
from penstock.spec.places import GPU
from penstock.spec.plan import Plan
from penstock.store.packed import Packed, open_packed, read_config
from penstock.store.synth import synth
from tests.at_size import beside
from tests.at_size.beside import ALL_VALUES, Planned, Setting
from tests.at_size.draws import Case
from tests.at_size.running import main

MOST_BYTES = 200 << 20  # of a case's weights, so that a case takes seconds
MOST_TASKS = 1500  # that are verified, since that takes time by their square
ALONE = 2  # sequences of a case that run once more alone
# How far two orders of sums may be from each other, by KV format, as a share of the largest logit of a row.
NEAR = {"float32": 1e-4, "bf16": 2e-2, "int8": 2e-2, "int4": 0.15, "int4-g32": 0.15}
NEAR_ALL = 1e-5  # values of all by the way that chooses: several rows add them up in another order
ROUNDED = 5e-2  # where activations are rounded to int8

Logits = dict[tuple[int, int], np.ndarray[Any, np.dtype[np.float32]]]  # sequence and position → [V]


class _Noted(Session):
    """Keeps the first tasks that it ran, where somebody wants them."""

    tasks: list[Task] | None = None

    def _counted(self, p: Pass) -> Iterator[Task]:
        for task in super()._counted(p):
            if self.tasks is not None and len(self.tasks) < MOST_TASKS:
                self.tasks.append(task)
            yield task


def differences(case: Case, folder: Path) -> list[str]:
    """What is not the same. Raises one of `running.LEFT_OUT` where the case cannot run."""
    rng = random.Random(case.number)
    case = beside.fitted(case, rng)
    config = folder / "config.json"
    config.write_text(json.dumps(case.config))
    weights = parse_format(case.weights)
    while (nbytes := _weight_bytes(config, weights)) > MOST_BYTES:
        if not beside.lessen(case.config):
            raise BadRequest(f"{nbytes} bytes of weights are more than a case should have")
        config.write_text(json.dumps(case.config))
    packed = open_packed(synth(config, folder / "packed", weights, seed=case.number))
    how = beside.setting(rng, case, packed)
    check_plan(how.plan, packed.spec, packed.weights)
    try:
        found = list(_compared(case, how, rng, packed))
    except Exception as error:
        error.add_note(f"{case}: {how}")
        raise
    return [f"{how}: {'; '.join(found)}"] if found else []


def _weight_bytes(config: Path, weights: Format) -> int:
    _, spec = read_config(config)
    return sum(part.granules * part.granule_bytes for part in parts(spec, weights))


def _compared(case: Case, how: Setting, rng: random.Random, packed: Packed) -> Iterator[str]:
    plan, ids = how.plan, beside.ids_of(case, how.plan)
    together = beside.company(rng, how, ids)
    running = Running(kernels=case.isa, exact=case.exact, poisoned=True)
    near = max(NEAR[case.kv or "float32"], 0.0 if case.exact else ROUNDED)
    tasks: list[Task] = []
    seen = _run(packed, plan, how, together, running, tasks)
    yield from _differs(
        "one task after the other", seen, _run(packed, plan, how, together, replace(running, serial=True))
    )
    try:
        verify(tasks, plan.arenas, plan.units)
    except InternalError as error:
        yield f"verify: {error}"
    if plan.value_share == ALL_VALUES:
        dense = with_arenas(replace(plan, value_share=1.0))
        yield from _far(
            "values of all", NEAR_ALL if case.exact else near, seen, _run(packed, dense, how, together, running)
        )
    if plan.sparsity == "exact":
        dense = with_arenas(replace(plan, sparsity="off"))
        yield from _differs("all neurons", seen, _run(packed, dense, how, together, running))
    yield from _differs_alone(rng, how, packed, running, seen, ids)
    by_cpu = _run(packed, beside.on_cpu(plan, packed), how, together, replace(running, poisoned=False))
    yield from _far("by the CPU", near, seen, by_cpu)


def _differs_alone(
    rng: random.Random, how: Setting, packed: Packed, running: Running, seen: Logits, ids: beside.Ids
) -> Iterator[str]:
    """Sequences alone. Of prompts whose rows are shared it depends on company who computes which, and of few rows with
    caches. Embeddings that are projected are numpy's, whose sums depend on the rows beside a row."""
    units, projects = how.plan.units, packed.spec.d_embed != packed.spec.d_model
    asked = bool(how.plan.caches) and any(u.part.endswith(".experts") and u.decode != u.prefill for u in units)
    if (how.prompts and (how.plan.device_rows or asked)) or projects:
        return
    seqs = sorted({seq for seq, _ in seen})
    for seq in rng.sample(seqs, min(ALONE, len(seqs))):
        places = sorted(at for of, at in seen if of == seq)
        some = places if how.prompts else sorted(rng.sample(places, min(4, len(places))))
        one = _run(packed, how.plan, how, beside.alone(rng, how, seq, some, ids, places[0] + 1), running)
        yield from _differs(f"sequence {seq} alone", {(seq, at): seen[seq, at] for at in some}, one)


def _run(
    packed: Packed, plan: Plan, how: Setting, wanted: list[Planned], running: Running, tasks: list[Task] | None = None
) -> Logits:
    """The logits of all rows that want them. `tasks`: gets the first tasks."""
    device = None
    if need := plan.tier_bytes().get(GPU.executor):
        device = EmulatedDevice(need, how.link_bytes_per_s, 0 if running.serial else how.jitter_s, len(wanted))
    session = _Noted(packed, plan, running, device=device)
    session.tasks = tasks
    found: Logits = {}
    try:
        for p, tokens, rows in wanted:
            logits = np.concatenate(session.step(p, tokens))
            found |= {at: row.copy() for at, row in zip(rows, logits, strict=True)}
        session.drain()
    finally:
        session.close()
    return found


def _differs(what: str, seen: Logits, other: Logits) -> Iterator[str]:
    """A line where bits differ, or are no numbers."""
    wrong = [at for at in seen if at not in other or not np.array_equal(seen[at], other[at])]
    if wrong:
        most = max(_off(seen[at], other[at]) if at in other else float("nan") for at in wrong)
        yield f"{what}: {len(wrong)} of {len(seen)} rows differ, {wrong[:3]}, by {most:.2g} of the largest logit"


def _far(what: str, near: float, seen: Logits, other: Logits) -> Iterator[str]:
    """A line where logits are no numbers, or farther from others than another order of sums makes them."""
    broken = [at for at, row in seen.items() if not np.isfinite(row).all()]
    if broken:
        yield f"rows {broken[:3]} are no numbers"
        return
    off = sorted((_off(row, other[at]), at) for at, row in seen.items())
    if off[-1][0] > near:
        over = sum(each > near for each, _ in off)
        yield f"{what}: {over} of {len(off)} rows are far, {off[-1][1]} by {off[-1][0]:.2g} of the largest logit"


def _off(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", differences))
