"""Whether two commits plan alike: dumps the plans of random asks on random machines, and judges two such dumps.

    python -m bench.same_plans dump OLD.jsonl.gz                         # with the one commit's code
    python -m bench.same_plans dump NEW.jsonl.gz --data OLDER/penstock   # with the other's
    python -m bench.same_plans judge OLD.jsonl.gz NEW.jsonl.gz

`judge` simulates both plans of a pair with the code that runs it, so run it with the old commit's: then no plan wins
because the simulator was changed too. A pair is a bundled shape on a bundled machine whose memory and rates are drawn
anew, and an ask. Pair n is the same whatever the code, if both dumps draw from the `shapes` and `machines` of the older
commit (`--data`). This uses of penstock only what both commits have.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import penstock
from penstock.errors import BadRequest, DoesNotFit, UnsupportedModel
from penstock.planner.shorten import quick
from penstock.planner.solve import settle_context, solve
from penstock.serve.planning import describe
from penstock.spec import machine as machines
from penstock.spec import plan as plans
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import MachineSpec, Rate, Sharing
from penstock.spec.model import ModelSpec
from penstock.spec.places import CPU, DISK, GPU
from penstock.units import GIB, MIB

PAIRS = 300
SLOWER = 1.001  # of a plan's score, by the one simulator: below that it is rounding
_DATA = Path(penstock.__file__).parent  # has `shapes` and `machines`
_FORMATS = ("int4", "int4", "int8", "bfloat16", "float32")
_TOO_LARGE = ("llama-3.1-405b",)  # a pair of it takes a minute

Case = tuple[Ask, ModelSpec, Format, MachineSpec, str]


def case(seed: int, data: Path) -> Case:
    """Ask, model, format, machine and a name of pair `seed`. `data`: has `shapes` and `machines`."""
    r = random.Random(seed)
    shapes = sorted(path.stem for path in (data / "shapes").glob("*.json"))
    shape = r.choice([each for each in shapes if each not in _TOO_LARGE])
    name = r.choice(sorted(path.stem for path in (data / "machines").glob("*.json")))
    weights = parse_format(r.choice(_FORMATS))
    spec, _ = describe(data / "shapes" / f"{shape}.json", weights)
    machine = _varied(r, machines.loads((data / "machines" / f"{name}.json").read_text(), name))
    throughput = r.random() < 0.2
    ask = Ask(
        prompt_tokens=r.choice((1, 16, 64, 200, 512, 1500)),
        output_tokens=r.choice((1, 16, 64, 256)),
        batch=r.choice((4, 8, 16, 24, 64)) if throughput else r.choice((1, 1, 1, 2, 4, 7, 64)),
        context=r.choice((None, None, 2048)),
        objective="throughput" if throughput else "latency",
        host_memory_bytes=_limit(r, machine, "host"),
        device_memory_bytes=_limit(r, machine, "gpu0"),
        resident_bytes=r.choice((None,) * 7 + (0, r.randint(0, 20) * GIB)),
        kv=r.choice((None, None, "int8")),
        kv_home=r.choice((None,) * 6 + ("memory", "disk")),
        score=r.random() < 0.05,
        use_device=r.random() < 0.1,
    )
    return ask, spec, weights, machine, f"{shape} {weights.name} on {name}, {ask.objective}, batch {ask.batch}"


def _limit(r: random.Random, machine: MachineSpec, tier: str) -> int | None:
    there = next((each.bytes for each in machine.tiers if each.name == tier), 0)
    kind = r.random()
    if kind < 0.6 or not there:
        return None
    return 0 if kind < 0.63 and tier != "host" else int(there * _log_uniform(r, 0.02, 1.0)) + 600 * MIB


def _log_uniform(r: random.Random, low: float, high: float) -> float:
    return exp(r.uniform(log(low), log(high)))


def _varied(r: random.Random, machine: MachineSpec) -> MachineSpec:
    """Other memory, other rates lane by lane; one in six has a device that is as slow as the CPU, as the emulated one
    is, and one in six has lost its device."""
    factors = {rate.lane: _log_uniform(r, 1 / 4, 4) if r.random() < 0.6 else 1.0 for rate in machine.rates}

    def other(rate: Rate) -> Rate:
        factor = factors[rate.lane]
        return replace(rate, s_per_byte=rate.s_per_byte * factor, s_per_flop=rate.s_per_flop * factor)

    rates = [other(rate) for rate in machine.rates]
    tiers = [replace(tier, bytes=int(tier.bytes * _log_uniform(r, 1 / 3, 2))) for tier in machine.tiers]
    kind = r.random()
    if kind < 1 / 6:
        tiers = [tier for tier in tiers if tier.name != "gpu0"]
    elif kind < 1 / 3:
        rates = [rate for rate in rates if rate.lane != "gpu0"]
        rates += [replace(rate, lane=GPU.kernels) for rate in rates if rate.lane == "host" and rate.op != "pass"]
    if not any(rate.op == "task" for rate in rates):
        rates += [Rate(lane, "task", "*", _log_uniform(r, 1e-6, 3e-5), 0.0) for lane in (CPU, GPU.kernels)]
    sharing = machine.sharing
    if not sharing and r.random() < 0.5:
        sharing = tuple(Sharing(CPU, lane, r.uniform(1, 1.5)) for lane in (DISK.reads, GPU.to_device, GPU.to_host))
    return replace(machine, tiers=tuple(tiers), rates=tuple(rates), sharing=sharing)


def planned(seed: int, data: Path) -> dict[str, Any]:
    """What this code plans of a pair: the plan and its prediction, or the refusal; every candidate simulated."""
    try:
        ask, spec, weights, machine, name = case(seed, data)
    except UnsupportedModel as refused:  # a shape that can only be planned
        return {"seed": seed, "name": str(seed), "refused": str(refused)}
    found: dict[str, Any] = {"seed": seed, "name": name}
    start_s = time.perf_counter()
    try:
        solved = solve(ask, spec, weights, machine, may_plan=seed % 4 == 0)
    except (DoesNotFit, BadRequest) as refused:
        return found | {"refused": str(refused)}
    found["solve_s"] = time.perf_counter() - start_s
    found["strategy"], found["plan"] = solved.strategy, json.loads(plans.dumps(solved.plan))
    found["predicted"] = _speeds(solved.prediction)
    found["compared"] = [
        [candidate.strategy, hashlib.sha256(plans.dumps(candidate.plan).encode()).hexdigest()[:16], _speeds(prediction)]
        for candidate, prediction in solved.compared
    ]
    return found


def _speeds(prediction: Any) -> list[float]:
    return [prediction.decode_tokens_per_s, prediction.ttft_s, prediction.total_s]


def read(path: str) -> dict[int, dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return {each["seed"]: each for each in map(json.loads, file)}


def judge(old_path: str, new_path: str, data: Path) -> Iterator[str]:
    """A line for each pair that differs in anything but reasons, and the counts."""
    old, new = read(old_path), read(new_path)
    counts = dict.fromkeys(("same", "same plan, other prediction", "faster", "equal", "slower", "other refusal"), 0)
    others = 0
    for seed in sorted(old.keys() & new.keys()):
        before, after = old[seed], new[seed]
        verdict, line = _verdict(seed, before, after, data)
        counts[verdict] += 1
        others += before.get("compared") != after.get("compared")
        if verdict != "same":
            yield f"{seed:4} {verdict:28} {before['name']}: {line}"
    yield ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    yield f"{others} pairs compared other candidates"
    times = [[each[seed]["solve_s"] for seed in old.keys() & new.keys() if "plan" in old[seed] and "plan" in new[seed]]
             for each in (old, new)]  # fmt: skip
    yield f"solving took {sum(times[0]):.1f} s and {sum(times[1]):.1f} s"


def _verdict(seed: int, before: dict[str, Any], after: dict[str, Any], data: Path) -> tuple[str, str]:
    if "plan" not in before or "plan" not in after:
        said = [each.get("refused", "a plan") for each in (before, after)]
        return ("same", "") if said[0] == said[1] else ("other refusal", " → ".join(said))
    if before["plan"] == after["plan"]:
        if before["predicted"] == after["predicted"]:
            return "same", ""
        return "same plan, other prediction", f"{before['predicted']} → {after['predicted']}"
    ask, spec, _, machine, _ = case(seed, data)
    ask = settle_context(ask, spec)
    scores = [_score_s(plans.loads(json.dumps(each["plan"]), "dump"), ask, machine) for each in (before, after)]
    ratio = scores[1] / scores[0]
    verdict = "slower" if ratio > SLOWER else "faster" if ratio < 1 / SLOWER else "equal"
    return verdict, f"{ratio:.4f} of the time, {before['strategy']} → {after['strategy']}"


def _score_s(plan: plans.Plan, ask: Ask, machine: MachineSpec) -> float:
    """What the objective brings down, as `solve` has it: seconds of all answers, or of a generated token."""
    total_s = quick(plan, ask, machine, spread=False).total_s
    seqs = min(ask.batch, plan.batch_seqs * plan.batches_per_pass)
    rounds = -(-ask.batch // seqs)
    return total_s * rounds if ask.objective == "latency" else total_s / (seqs * ask.output_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    dump = commands.add_parser("dump")
    dump.add_argument("file")
    dump.add_argument("--pairs", type=int, default=PAIRS)
    dump.add_argument("--first", type=int, default=0)
    judging = commands.add_parser("judge")
    judging.add_argument("old")
    judging.add_argument("new")
    for each in (dump, judging):
        each.add_argument("--data", type=Path, default=_DATA)
    args = parser.parse_args()
    if args.command == "judge":
        for line in judge(args.old, args.new, args.data):
            print(line)
        return
    with gzip.open(args.file, "wt") as file:
        for seed in range(args.first, args.pairs):
            file.write(json.dumps(planned(seed, args.data)) + "\n")


if __name__ == "__main__":
    main()
