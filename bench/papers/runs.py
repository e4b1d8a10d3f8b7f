"""`python -m bench.papers.runs`: mechanisms of PowerInfer and ScheInfer as they run, beside what is printed of them.

    operators  the time of a product of 4096 × 4096 weights in rows of neurons over the dense kernel's, at 90, 50 and
               10 % zeros (Figure 16), by `bench.sparsity --only ops`
    ablation   Figure 15: llama.cpp's split, then predictors and operators, the hybrid engine, the policy. Each is a
               plan of eight of the model's layers, which the executor runs on the paper's machine with a wait for
               every task (`bench/timed`): the schedule runs, and the kernels' times are the machine file's
    assignment ScheInfer's section V-E4: a prompt whose tokens all go to the device, against one by decode's slices. The
               executor runs two shortened plans with a wait for every task, and the line through them tells the whole
    loads      Figures 4 and 12: of the neurons of tale-opt and tale-relu that fire for a text that they have not seen,
               the share that a device would compute which has room for some, the hottest by another kind of text. The
               models compute the text here, and their neurons are counted

It writes `data/runs.tsv`, which the page shows. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from bench.papers import powerinfer, scheinfer, scheinfer_plans
from bench.papers.compare import machine_of
from bench.papers.published import DATA, FIGURES, Published, cells_of
from bench.papers.traits import TRAITS, of_system
from bench.throughput_timed import DISTURBANCE, SEED, waits
from bench.timed import Timed
from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass
from penstock.planner.cost import Cost
from penstock.planner.shorten import quick_s
from penstock.planner.simulate import Simulator
from penstock.runtime.execute import Executor
from penstock.runtime.this_machine import cpu_name
from penstock.spec.plan import Plan

LAYERS, WARM, TIMED, PROMPT, OUTPUT = 8, 1, 2, 64, 128
ROOM = (0.1, 0.26, 0.43)  # shares of the neurons; Figure 4's of OPT-30B and LLaMA(ReGLU)-70B make 80 %
BUILT = 64  # tokens; longer prompts by the CPU of ScheInfer as it was built are waited for for minutes
PARTS = ("operators", "ablation", "assignment", "loads")
_COLUMNS = ("part", "setting", "model", "published", "predicted", "ran", "how")


class Ran(NamedTuple):
    """A row of the page. `published`, `predicted`: as text, empty where there is none."""

    part: str
    setting: str
    model: str
    published: str
    predicted: str
    ran: str
    how: str


def kept() -> list[Ran]:
    """What the last run has written."""
    return [Ran(**cells) for cells in cells_of("runs")]


# -- operators ----------------------------------------------------------------------------------------------


def operators(rounds: int) -> Iterator[Ran]:
    command = [sys.executable, "-m", "bench.sparsity", "--only", "ops", "--rounds", str(rounds)]
    said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    for name, found in said["ops_by_format"].items():
        for zeros in ("90", "50", "10"):
            told = "below 1" if zeros == "10" else ""
            yield Ran(
                "operators", f"time over dense, {zeros} % zeros", name, told, "", f"{found[zeros]:.2f}",
                f"bench.sparsity --only ops, {cpu_name()}",
            )  # fmt: skip


# -- ablation -----------------------------------------------------------------------------------------------


def ablation() -> Iterator[Ran]:
    figures = [row for row in FIGURES if row.table.startswith("Figure 15")]
    for model in dict.fromkeys(row.model for row in figures):
        mine = [row for row in figures if row.model == model]
        setting = powerinfer.Setting(mine[0].machine, model, "float16", layers=LAYERS)
        plans = {row: powerinfer.of_system(setting, powerinfer.STEPS[row.setting], OUTPUT).plan for row in mine}
        yield from _steps(setting, plans, powerinfer.of_system(setting, "llama.cpp", OUTPUT).plan)


def _steps(setting: powerinfer.Setting, plans: dict[Published, Plan], rival: Plan) -> Iterator[Ran]:
    """All plans wait at once: waiting takes no processor."""
    cost = Cost(replace(machine_of(setting.machine), sharing=()))
    every = [rival, *plans.values()]
    with ThreadPoolExecutor(len(every)) as pool:
        measured = list(pool.map(lambda plan: waited_s(plan, cost), every))
    simulated = [simulated_s(plan, cost) for plan in every]
    for i, row in enumerate(plans, 1):
        yield Ran(
            "ablation", f"{row.setting}, times as fast as llama.cpp", row.model, f"{row.value:g}",
            f"{simulated[0] / simulated[i]:.2f}", f"{measured[0] / measured[i]:.2f}",
            f"decode of {LAYERS} layers on {setting.machine}, every task a wait",
        )  # fmt: skip


def _decode(plan: Plan) -> list[Pass]:
    return [passes.decode(plan, (0,), (PROMPT + i,), passes.DECODE) for i in range(WARM + TIMED)]


def simulated_s(plan: Plan, cost: Cost, wanted: Sequence[Pass] = (), warm: int = WARM) -> float:
    """Seconds of a pass by `simulate`. `wanted`: of these passes behind the `warm` first; none: decode passes."""
    lowering, simulator, found = Lowering(plan), Simulator(cost), []
    for p in wanted or _decode(plan):
        start_s = simulator.now_s
        simulator.busy_s(lowering.step(p))
        found.append(simulator.now_s - start_s)
    return statistics.mean(found[warm:])


def waited_s(plan: Plan, cost: Cost, wanted: Sequence[Pass] = (), warm: int = WARM) -> float:
    """Seconds of a pass of the executor, in which every task is a wait, in the machine's seconds. Passes as above."""
    wanted = wanted or _decode(plan)
    scale = waits(plan, wanted, cost)
    lowering, work = Lowering(plan), Timed(lambda task: scale * cost.seconds(task), DISTURBANCE, SEED)
    executor = Executor(work, plan.units)
    timelines = [executor.run(lowering.step(p)) for p in wanted]
    executor.close()
    work.forget()
    return statistics.mean(each.end_s - each.start_s for each in timelines[warm:]) / scale


# -- assignment ---------------------------------------------------------------------------------------------


def assignment() -> Iterator[Ran]:
    """As penstock would run it, and with ScheInfer's own trait where that is no long wait. All wait at once."""
    rows = [row for row in FIGURES if "V-E4" in row.table]
    traits = of_system(TRAITS, "ScheInfer", "ScheInfer")
    wanted = [(row, scheinfer.of_prompt(row, own)) for row in rows for own in ((), traits)[: 1 + (row.prompt == BUILT)]]
    plans = [scheinfer_plans.scheinfer(setting, prompts=prompts) for _, setting in wanted for prompts in (False, None)]
    with ThreadPoolExecutor(len(plans)) as pool:
        ran = list(pool.map(lambda spent: _prompt_s(spent, waited_s), plans))
    simulated = [_prompt_s(spent, simulated_s) for spent in plans]
    for i, (row, setting) in enumerate(wanted):
        built = "as built" if setting.traits else "as penstock"
        yield Ran(
            "assignment", f"prompt of {row.prompt} with tokens assigned, times as fast as by decode's slices, {built}",
            row.model, f"{row.value:g}", f"{simulated[2 * i] / simulated[2 * i + 1]:.2f}",
            f"{ran[2 * i] / ran[2 * i + 1]:.2f}", f"prompt on {setting.machine}, every task a wait",
        )  # fmt: skip


def _prompt_s(spent: scheinfer_plans.Spent, seconds: Callable[[Plan, Cost, Sequence[Pass], int], float]) -> float:
    """Of a whole prompt: of its passes' mean times their number, of the quickest of the plans that read prompts."""
    cost = Cost(replace(spent.whole.machine, sharing=()))

    def whole(plan: Plan) -> float:
        wanted = list(passes.prompts(plan, (0,), [spent.whole.ask.prompt_tokens], passes.DECODE))
        return seconds(plan, cost, wanted, 0) * len(wanted)

    return min(quick_s(plan, whole) for plan in spent.prompts)


# -- loads --------------------------------------------------------------------------------------------------


def loads(tokens: int) -> Iterator[Ran]:
    import numpy as np

    from bench.tale_sparsity import BOOKS, MODELS, WINDOW_TOKENS, kinds_of, live_neurons, packed_beside

    kinds = kinds_of(BOOKS)
    for model in MODELS:
        with packed_beside(model, kinds, tokens) as (packed, texts):
            counts = []
            for ids in texts:
                windows = [np.array(ids[lo : lo + WINDOW_TOKENS], np.int32) for lo in range(0, len(ids), WINDOW_TOKENS)]
                counts.append([fires.sum(0) for fires in live_neurons(packed, windows)])
        for room in ROOM:
            ran = statistics.mean(load(counts[1 - k], counts[k], room) for k in (0, 1))
            told = "0.8" if (room == ROOM[1]) == (model.name == "tale-opt") and room != ROOM[0] else ""
            yield Ran(
                "loads", f"active neurons that a device with room for {room:.0%} of them computes", model.name, told,
                f"{room:.2f} at random", f"{ran:.2f}",
                f"{2 * tokens} tokens of held-out text at most, the hottest by another kind of text",
            )  # fmt: skip


def load(profile: Sequence[Any], fired: Sequence[Any], room: float) -> float:
    """The share of what fires that the hottest neurons of each layer make, by the counts of another text."""
    there = whole = 0.0
    for known, counts in zip(profile, fired, strict=True):
        hottest = (-known).argsort(kind="stable")[: round(room * len(known))]
        there, whole = there + float(counts[hottest].sum()), whole + float(counts.sum())
    return there / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="other parts' rows stay as they are")
    parser.add_argument("--rounds", type=int, default=2, help="of the operators")
    parser.add_argument("--tokens", type=int, default=8192, help="of each kind of text, at most")
    wanted = parser.parse_args()
    rows = {part: [row for row in kept() if row.part == part] for part in PARTS}
    new: dict[str, Callable[[], Iterator[Ran]]] = {
        "operators": lambda: operators(wanted.rounds), "ablation": ablation, "assignment": assignment,
        "loads": lambda: loads(wanted.tokens),
    }  # fmt: skip
    for part in wanted.only:
        rows[part] = list(new[part]())
        for row in rows[part]:
            print(*row, sep=" | ", flush=True)
    every = [row for part in PARTS for row in rows[part]]
    lines = ["# Written by `python -m bench.papers.runs`.", "\t".join(_COLUMNS), *map("\t".join, every)]
    (DATA / "runs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(json.dumps({"bench": "papers.runs", "rows": [row._asdict() for row in every]}))


if __name__ == "__main__":
    main()
