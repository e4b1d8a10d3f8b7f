"""`python -m bench.choice`: is the plan that is chosen the fastest of the candidates, when all of them are run?

Three settings on this machine. Every candidate of every solver that the runtime can run is loaded and run, taking turns
in rounds; the median of the rounds counts. One that cannot be loaded or run after all is told with its error, and does
not come again. The last line is one JSON object, which comes whatever fails (`bench.report`); `ratio`: the
seconds of the chosen plan over those of the fastest candidate.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.offload_engines import add_shapes, tell
from bench.peers import token_ids
from bench.report import last_line, model_folder
from penstock.planner.bound import score_s
from penstock.planner.candidate import Compared
from penstock.planner.predict import Prediction
from penstock.planner.solve import settle_context, solve
from penstock.runtime.probe_apart import probe_apart
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.places import HOST
from penstock.spec.plan import Plan
from penstock.store.packed import open_packed
from penstock.store.synth import synth

# shape, share of the weights that memory is left for, what is asked
SETTINGS = (
    ("1b", 0.5, Ask(prompt_tokens=64, output_tokens=24, context=512)),
    ("1b", 0.7, Ask(prompt_tokens=128, output_tokens=16, batch=16, context=256, objective="throughput")),
    ("8b", 0.6, Ask(prompt_tokens=256, output_tokens=12, context=512)),
)
ROUNDS = 3


def limited(model: Path, share: float, ask: Ask, machine: MachineSpec) -> Ask:
    """The ask with memory for `share` of the weights."""
    packed = open_packed(model)
    roomy = replace(machine, tiers=tuple(replace(tier, bytes=1 << 50) for tier in machine.tiers))
    whole = solve(ask, packed.spec, packed.weights, roomy).plan
    weights = sum(whole.unit_bytes(unit) for unit in whole.units)
    limit = whole.tier_bytes()[HOST] - int((1 - share) * weights)
    return settle_context(replace(ask, host_memory_bytes=limit), packed.spec)


def measured_s(plans: Sequence[Plan], run: Callable[[Plan], float], rounds: int) -> list[list[float] | str]:
    """What each plan took, round by round, in turns. A plan that fails does not come again, and has its error there."""
    found: list[list[float] | str] = [[] for _ in plans]
    for _ in range(rounds):
        for i, plan in enumerate(plans):
            if isinstance(times := found[i], str):
                continue
            try:
                times.append(run(plan))
            except Exception as error:
                found[i] = f"{type(error).__name__}: {error}"
                tell(f"  a candidate failed: {found[i]}")
    return found


def _alike(one: Plan, other: Plan) -> bool:
    return (one.units, one.order, one.kv, one.ring_bytes) == (other.units, other.order, other.kv, other.ring_bytes)


def run_s(model: Path, ask: Ask, machine: MachineSpec, plan: Plan) -> float:
    """Seconds of all answers, or of a generated token where throughput is wanted: what the solver brings down."""
    engine = Engine.load(model, ask, Loading(machine=machine, plan=plan))
    try:
        vocab = engine.plan.target.spec.vocab
        prompts = [token_ids(vocab, ask.prompt_tokens, seq).tolist() for seq in range(ask.batch)]
        warm = [prompt[:16] for prompt in prompts[: plan.batch_seqs * plan.batches_per_pass]]
        engine.generate(warm, SamplingParams(max_tokens=2, ignore_eos=True))
        params = SamplingParams(max_tokens=ask.output_tokens, temperature=0.0, ignore_eos=True)
        answers = engine.generate(prompts, params)
    finally:
        engine.close()
    at_once = plan.batch_seqs * plan.batches_per_pass
    total_s = sum(answer.batch_ttft_s + answer.decode_s for answer in answers[::at_once])
    return total_s if ask.objective == "latency" else total_s / (ask.batch * ask.output_tokens)


def setting(model: Path, share: float, ask: Ask, machine: MachineSpec, rounds: int) -> dict[str, Any]:
    """One setting: the candidates, predicted and measured."""
    packed = open_packed(model)
    ask = limited(model, share, ask, machine)
    chosen = solve(ask, packed.spec, packed.weights, machine)
    every = solve(ask, packed.spec, packed.weights, machine, every=True).compared
    runnable = [each for each in every if not each.candidate.cannot_run]
    # The chosen plan reads in blocks of its own size; what stays where is what tells candidates apart.
    at = next(i for i, each in enumerate(runnable) if _alike(each.candidate.plan, chosen.plan))
    measured = measured_s([each.candidate.plan for each in runnable], partial(run_s, model, ask, machine), rounds)
    if isinstance(why := measured[at], str):
        raise RuntimeError(f"the chosen plan could not be run: {why}")
    ran = {i: _row(runnable[i], seconds, ask) for i, seconds in enumerate(measured) if not isinstance(seconds, str)}
    rows = list(ran.values())
    fastest_s = min(row["measured_s"] for row in rows)
    for row in rows:
        tell(
            f"  {row['strategy']:32} predicted {row['predicted_s']:8.3f} s, measured {row['measured_s']:8.3f} s "
            f"({row['least_s']:.3f} to {row['most_s']:.3f})"
        )
    return {
        "model": model.name, "share": share, "prompt": ask.prompt_tokens, "output": ask.output_tokens,
        "batch": ask.batch, "objective": ask.objective, "chosen": ran[at]["strategy"],
        "ratio": ran[at]["measured_s"] / fastest_s, "candidates": rows,
        "failed": {runnable[i].candidate.strategy: why for i, why in enumerate(measured) if isinstance(why, str)},
    }  # fmt: skip


def _row(each: Compared, seconds: list[float], ask: Ask) -> dict[str, Any]:
    prediction: Prediction = each.prediction
    return {
        "strategy": each.candidate.strategy,
        "ring_bytes": sum(each.candidate.plan.ring_bytes.values()),
        "predicted_s": score_s(prediction, each.candidate.plan, ask),
        "measured_s": statistics.median(seconds),
        "least_s": min(seconds),
        "most_s": max(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keeps the models here (5 GB); default a temporary folder")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    add_shapes(parser)
    wanted = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def line() -> dict[str, Any]:
        worst = max((row["ratio"] for row in rows), default=None)
        return {"bench": "choice", "rounds": wanted.rounds, "worst_ratio": worst, "rows": rows}

    with last_line(line) as report, model_folder(wanted.folder) as folder:
        machine = probe_apart(folder, formats=("int4",), kv_formats=("float16",))
        for shape, share, ask in SETTINGS:
            config = wanted.large if shape == "8b" else wanted.small
            model = folder / f"{config.stem}-int4"
            if not model.exists():
                tell(f"writing {model.name}")
                synth(config, model, parse_format("int4"))
            name = f"{model.name}, {share:.0%} in RAM, {ask.prompt_tokens} + {ask.output_tokens} × {ask.batch}"
            tell(name)
            with report.part(name):
                rows.append(setting(model, share, ask, machine, wanted.rounds))


if __name__ == "__main__":
    main()
