"""`python -m bench.predict`: predicted beside measured, over model sizes, memory, prompt lengths and batches.

Each setting is planned from this machine's figures, probed for it, before it is run. The machine drifts, so its
ceilings (RAM and disk reads, dot products) are read before the probe, right before the run and right after. Where they
differ by more than a tenth, or halves of its answers do, or other processes took more than 3 % of the processors
meanwhile, the setting comes again, its probe too, when all others had their turn: what disturbs a shared machine goes
on for minutes. The last line is one JSON object, which comes whatever fails (`bench.report`).

Beside the probe's prediction each row has three more: by a quick probe, made once at the start; by the same after the
runs so far have shifted its rates; and the promise as it is renewed right before the run. `--probe once` measures the
machine whole once, too, as a user does.

`--part N` ends after so many runs of settings. With `--folder`, `--rows` and `--resume` the next call goes on with the
settings that are left, and with what both probes and the runs have told, if build, machine and flags are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from bench import predict_quick
from bench.cpu import DEFAULT_SHAPES, named_shape
from bench.offload_engines import tell
from bench.peers import token_ids
from bench.predict_quick import Hasty, keep_machine, kept_machine, renewed_fields
from bench.report import Report, last_line, model_folder
from bench.rounds import build, checksum, kept_rows, this_machine
from penstock.planner.predict import Prediction
from penstock.planner.solve import Solved, settle_context, solve
from penstock.runtime import host
from penstock.runtime.ceilings import Ceilings, ceilings
from penstock.runtime.probe_apart import probe_apart
from penstock.runtime.probe_disk import ProbeFile, probe_file
from penstock.serve.engine import Engine
from penstock.serve.generation import Generation
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.places import DISK, HOST
from penstock.store.packed import open_packed
from penstock.store.synth import synth

SHARES = (1.0, 0.75, 0.5, 0.25)  # of the weights, that memory is left for
PROMPTS, BATCHES = (64, 1024), (1, 4)
CONTEXT = 1280
DECODE_S, LEAST_TOKENS, MOST_TOKENS = 5.0, 6, 48
REPEATS, REPEAT_S = 5, 12.0  # of a setting that takes less: a moment in which others had a core is none of its
CEILINGS = 5  # readings of each ceiling, of which the median counts
DRIFT, OTHERS = 0.10, 0.03  # of a ceiling; of the processors' time, that others took meanwhile: more is a disturbance

Setting = tuple[str, float, int, int]  # shape, share, prompt, batch
Rows = dict[Setting, dict[str, Any]]


def differ(one: Ceilings, other: Ceilings, streams: bool) -> float:
    """The most that a ceiling changed; the disk counts where something streams."""
    names = ["ram_read_bytes_per_s", "int8_ops_per_s", *(["disk_read_bytes_per_s"] if streams else [])]
    return max(abs(float(getattr(one, name)) / float(getattr(other, name)) - 1) for name in names)


class Machine:
    """This machine's figures, as of now. `about`: what they are kept with; others' are not taken back."""

    def __init__(
        self, folder: Path, file: ProbeFile, about: dict[str, Any], readings: int = CEILINGS, once: bool = False,
        goes_on: bool = False,
    ) -> None:  # fmt: skip
        self._folder, self._file, self._readings, self._once = folder, file, readings, once
        self._about = about
        self._known: MachineSpec | None = None
        self._kept = folder / "whole-machine.json"
        if once and goes_on and self._kept.exists():
            self._known = kept_machine(self._kept, about)
        self.probes, self.probe_s = 0, 0.0
        self.hasty = Hasty(folder, about, goes_on)

    def ceilings(self) -> Ceilings:
        """Now, medians. At rest one reading of the RAM (0.1 s) differs by 10 % from the next; one of the dot products
        (16 ms) halves where anything else has a core for that moment. Neither is a drift."""
        threads = host.usable_cpus()
        takes = [ceilings(threads, self._file) for _ in range(self._readings)]
        return Ceilings(
            **{each.name: statistics.median(getattr(t, each.name) for t in takes) for each in fields(Ceilings)}
        )

    def figures(self) -> MachineSpec:
        """What the probe measures, of the formats that these models have."""
        if self._known is not None and self._once:
            return self._known
        start_s = time.perf_counter()
        found = self._known = probe_apart(self._folder, formats=("int4",), kv_formats=("float16",))
        self.probe_s, self.probes = time.perf_counter() - start_s, self.probes + 1
        keep_machine(self._kept, found, self._about)
        return found


def solved(model: Path, share: float, prompt: int, batch: int, tokens: int, machine: MachineSpec) -> tuple[Solved, Ask]:
    """A plan for so much memory that about `share` of the weights stays."""
    packed = open_packed(model)
    context = max(CONTEXT, prompt + MOST_TOKENS)
    ask = Ask(prompt_tokens=prompt, output_tokens=tokens, batch=batch, context=context)
    roomy = replace(machine, tiers=tuple(replace(t, bytes=1 << 50) for t in machine.tiers))
    whole = solve(ask, packed.spec, packed.weights, roomy)
    assert all(unit.home == "host" for unit in whole.plan.units)
    if share < 1:
        weights = sum(whole.plan.unit_bytes(unit) for unit in whole.plan.units)
        limit = whole.plan.tier_bytes()[HOST] - int((1 - share) * weights)
        ask = replace(ask, host_memory_bytes=limit)
    return solve(ask, packed.spec, packed.weights, machine), settle_context(ask, packed.spec)


def measure(model: Path, share: float, prompt: int, batch: int, machine: Machine, repeat_s: float) -> dict[str, Any]:
    """One setting, once."""
    at_probe = machine.ceilings()
    figures = machine.figures()
    first, _ = solved(model, share, prompt, batch, MOST_TOKENS, figures)
    tokens = int(DECODE_S * first.prediction.decode_tokens_per_s / batch)
    tokens = max(LEAST_TOKENS, min(MOST_TOKENS, tokens))
    found, ask = solved(model, share, prompt, batch, tokens, figures)
    return run(model, found, ask, tokens, figures, machine, at_probe, repeat_s)


def in_turns(
    settings: Sequence[Setting], models: dict[str, Path], machine: Machine, attempts: int, most_s: float,
    keep: Path | None, known: Sequence[dict[str, Any]], repeat_s: float, report: Report, rows: Rows,
    part: int | None = None, about: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """A row for each setting into `rows`, the least disturbed one of up to `attempts`, whatever its error; the steady
    ones come once, and one that fails has no row or that of an earlier attempt. After `most_s` no setting comes again,
    and after `part` runs of settings there is no other. `known`: attempts of a run before, which count. `about`: what
    rows are kept with."""
    start_s, came = time.perf_counter(), 0
    failed: set[Setting] = set()

    def add(setting: Setting, row: dict[str, Any]) -> None:
        before = rows.get(setting)
        rows[setting] = row if before is None or row["disturbed"] < before["disturbed"] else before
        rows[setting]["attempts"] = row["attempts"]

    for row in known:
        setting = (row["shape"], row["share"], row["prompt"], row["batch"])
        if setting in settings:
            add(setting, row)
    while due := _due([setting for setting in settings if setting not in failed], rows, attempts):
        for setting in due:
            if came == part or (setting in rows and time.perf_counter() - start_s > most_s):
                return
            came += 1
            shape, share, prompt, batch = setting
            failed.add(setting)
            with report.part(f"{shape} {share} {prompt} {batch}"):
                found = measure(models[shape], share, prompt, batch, machine, repeat_s)
                row = {"shape": shape, "share": share, **found}
                row["attempts"] = rows[setting]["attempts"] + 1 if setting in rows else 1
                if keep:
                    with keep.open("a") as kept:
                        kept.write(json.dumps({"about": about, **row}) + "\n")
                tell(line(row))
                add(setting, row)
                failed.discard(setting)


def _due(settings: Sequence[Setting], rows: Rows, attempts: int) -> list[Setting]:
    """The settings of the next round: those that have not been, else those that were disturbed, the most so first."""
    if new := [setting for setting in settings if setting not in rows]:
        return new
    again = [each for each in settings if rows[each]["disturbed"] > 1 and rows[each]["attempts"] < attempts]
    return sorted(again, key=lambda each: -rows[each]["disturbed"])


def run(
    model: Path, found: Solved, ask: Ask, tokens: int, figures: MachineSpec, machine: Machine, at_probe: Ceilings,
    repeat_s: float,
) -> dict[str, Any]:  # fmt: skip
    hasty = machine.hasty.foretell(found.plan, ask)
    engine = Engine.load(model, ask, Loading(machine=figures, plan=found.plan))
    vocab = engine.plan.target.spec.vocab
    try:
        allocated = engine.session.arena_bytes
        prompts = [token_ids(vocab, ask.prompt_tokens, seq).tolist() for seq in range(ask.batch)]
        # The first pass after loading is some 8 % slower (caches, threads): not what a conversation is like.
        engine.generate([token_ids(vocab, 16).tolist()] * ask.batch, SamplingParams(max_tokens=2, ignore_eos=True))
        before, today = machine.ceilings(), renewed_fields(engine.renew())
        answers: list[Generation] = []
        start_s, start_busy_s = time.perf_counter(), others_busy_s()
        while len(answers) < REPEATS and (not answers or time.perf_counter() - start_s < repeat_s):
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            answers.append(engine.generate(prompts, params)[-1])
        others = (others_busy_s() - start_busy_s) / (time.perf_counter() - start_s) / host.usable_cpus()
        after = machine.ceilings()
    finally:
        engine.close()
    machine.hasty.learn(found.plan, answers)
    predicted: Prediction = found.prediction
    streams = bool(found.plan.ring_bytes)
    drift = max(differ(before, after, streams), differ(at_probe, before, streams))
    answer = answers[-1]
    halves = [half for each in answers for half in _halves(each.inter_token_s)]
    decode = statistics.median(each.decode_tokens_per_s for each in answers)
    ttft_s = statistics.median(each.batch_ttft_s for each in answers)
    promised = predicted.peak_host_bytes - found.plan.process_bytes
    return {
        "prompt": ask.prompt_tokens,
        "batch": ask.batch,
        "tokens": tokens,
        "host_memory_bytes": ask.host_memory_bytes,
        "bound_by": predicted.bound_by,
        "decode_tokens_per_s": decode,
        "predicted_decode_tokens_per_s": predicted.decode_tokens_per_s,
        "decode_error": abs(predicted.decode_tokens_per_s / decode - 1),
        "ttft_s": ttft_s,
        "predicted_ttft_s": predicted.ttft_s,
        "ttft_error": abs(predicted.ttft_s / ttft_s - 1),
        "peak_bytes_exact": promised == allocated,
        "disk_bytes_per_token": answer.disk_bytes_per_token,
        "predicted_disk_bytes_per_token": predicted.disk_bytes_per_token,
        **hasty,
        **today,
        "drift": drift,
        "drift_in_run": differ(before, after, streams),
        "others_share": others,
        "swing": (swing := max(halves) / min(halves) - 1),
        "disturbed": max(drift / DRIFT, others / OTHERS, swing / DRIFT),
        "probe_s_per_disk_byte": figures.rate(DISK.reads, "load", "int4").s_per_byte,
        "ceilings_at_probe": asdict(at_probe),
        "ram_bytes_per_s": [before.ram_read_bytes_per_s, after.ram_read_bytes_per_s],
        "disk_bytes_per_s": [before.disk_read_bytes_per_s, after.disk_read_bytes_per_s],
        "int8_ops_per_s": [before.int8_ops_per_s, after.int8_ops_per_s],
    }


def _halves(gaps_s: Sequence[float]) -> list[float]:
    """Mean seconds between tokens, in the first half of an answer and in the second."""
    middle = len(gaps_s) // 2
    return [statistics.fmean(half) for half in (gaps_s[:middle], gaps_s[middle:]) if half]


def others_busy_s() -> float:
    """Seconds that the processors have worked for anyone but this process, a hypervisor's other guests included."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    all_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return all_s - time.process_time()


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Predicted over measured, decode and first token side by side. As SVG, so that it stays small and sharp."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6))
    sides = (
        ("decode_tokens_per_s", "decode, tokens/s (of the batch)"),
        ("ttft_s", "first token, s (of the whole batch)"),
    )
    for axis, (name, title) in zip(axes, sides, strict=True):
        for shape, marker in zip(dict.fromkeys(row["shape"] for row in rows), "os^vD", strict=False):
            for share, color in zip(SHARES, ("#1b6ca8", "#2a9d5c", "#e0a030", "#c8413b"), strict=True):
                chosen = [row for row in rows if row["shape"] == shape and row["share"] == share]
                if chosen:
                    axis.scatter(
                        [row[name] for row in chosen], [row["predicted_" + name] for row in chosen], marker=marker,
                        color=color, s=28, alpha=0.85, label=f"{shape}, {share:.0%} of weights in RAM",
                    )  # fmt: skip
        ends = [min(row[name] for row in rows) * 0.7, max(row[name] for row in rows) * 1.4]
        axis.plot(ends, ends, color="#888888", linewidth=1)
        low, high = [0.9 * end for end in ends], [1.1 * end for end in ends]
        axis.fill_between(ends, low, high, color="#888888", alpha=0.18, linewidth=0)
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured", ylabel="predicted", title=title)
        axis.grid(True, which="major", alpha=0.25)
    axes[0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keeps the models here (5 GB); default a temporary folder")
    parser.add_argument("--shapes", type=named_shape, nargs="+", metavar="NAME[=CONFIG.JSON]", help="default 1b 8b")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--attempts", type=int, default=6, help="at a setting, while the machine drifts")
    parser.add_argument("--minutes", type=float, default=60, help="after which no setting comes again")
    parser.add_argument("--probe", choices=("each", "once"), default="each", help="the whole one: before each setting")
    parser.add_argument("--readings", type=int, default=CEILINGS, help="of each ceiling")
    parser.add_argument("--repeat-seconds", type=float, default=REPEAT_S, help="of runs of a setting")
    parser.add_argument("--rows", type=Path, help="keeps every row here as it comes, a JSON object a line")
    parser.add_argument("--resume", action="store_true", help="the rows that are there already count")
    parser.add_argument("--part", type=int, help="ends after so many runs of settings; --resume goes on")
    parser.add_argument("--plot", type=Path, help="where the picture goes; default none")
    wanted = parser.parse_args()
    if wanted.resume and not (wanted.rows and wanted.folder):
        parser.error("--resume needs --rows and --folder")
    if wanted.rows and wanted.rows.exists() and not wanted.resume:
        parser.error(f"{wanted.rows} is there already; --resume counts its rows")
    shapes = dict(wanted.shapes or DEFAULT_SHAPES)
    about = about_of(wanted)
    known = known_rows(wanted.rows, about) if wanted.resume else []
    start_s = time.perf_counter()
    kept: Rows = {}
    settings = list(product(shapes, wanted.shares, wanted.prompts, wanted.batches))

    def last() -> dict[str, Any]:
        rows = [kept[setting] for setting in settings if setting in kept]
        if wanted.plot and rows:
            plot(rows, wanted.plot)
        return {"bench": "predict", "settings": len(rows), **summary(rows), "took_s": time.perf_counter() - start_s,
                "rows": rows}  # fmt: skip

    with last_line(last) as report, model_folder(wanted.folder) as folder:
        models = {shape: folder / f"{config.stem}-int4" for shape, config in shapes.items()}
        for shape, model in models.items():
            if not model.exists():
                tell(f"writing {model.name}")
                synth(shapes[shape], model, parse_format("int4"))
        os.sync()
        with probe_file(folder) as file:
            machine = Machine(folder, file, about, wanted.readings, wanted.probe == "once", wanted.resume)
            most_s, repeat_s = 60 * wanted.minutes, wanted.repeat_seconds
            in_turns(
                settings, models, machine, wanted.attempts, most_s, wanted.rows, known, repeat_s, report, kept,
                wanted.part, about,
            )  # fmt: skip
            tell(f"{machine.probes} probes, the last took {machine.probe_s:.1f} s")


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The errors over all settings; none without a row."""
    if not rows:
        return {}
    errors = {name: [row[f"{name}_error"] for row in rows] for name in ("decode", "ttft")}
    errors_of = {f"{name}_error_{which}": of(e) for name, e in errors.items() for which, of in
               (("median", statistics.median), ("worst", max))}  # fmt: skip
    return {
        **errors_of,
        **predict_quick.summary(rows, lambda row: row["drift_in_run"] <= DRIFT),
        "peak_bytes_exact": all(row["peak_bytes_exact"] for row in rows),
        "disturbed": sum(row["disturbed"] > 1 for row in rows),
    }


def about_of(wanted: argparse.Namespace) -> dict[str, Any]:
    """What rows and probes that are kept have in common: one bench goes on with those of the same alone."""
    return {
        "bench": "predict",
        "configs": {shape: checksum(config) for shape, config in (DEFAULT_SHAPES | dict(wanted.shapes or ())).items()},
        "tokens": {"context": CONTEXT, "least": LEAST_TOKENS, "most": MOST_TOKENS},
        "probe": wanted.probe,
        "readings": wanted.readings,
        "repeat_seconds": wanted.repeat_seconds,
        "machine": this_machine(),
        "build": build(),
    }


def known_rows(file: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file; of another build, machine or way of measuring they end the bench."""
    return [{name: value for name, value in row.items() if name != "about"} for row in kept_rows(file, about)]


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['shape']} {row['share']:4.0%} prompt {row['prompt']:4} × {row['batch']}: decode "
        f"{row['decode_tokens_per_s']:7.2f} (predicted {row['predicted_decode_tokens_per_s']:7.2f}, "
        f"{row['decode_error']:4.0%}), first token {row['ttft_s']:6.2f} s ({row['predicted_ttft_s']:6.2f}, "
        f"{row['ttft_error']:4.0%}), drift {row['drift']:.0%}, swing {row['swing']:.0%}, others "
        f"{row['others_share']:.0%}, bound by {row['bound_by']}, {predict_quick.line(row)}, attempt {row['attempts']}"
    )


if __name__ == "__main__":
    main()
