"""What was predicted and what came, run by run: the error band of the next prediction, and a calibration.

One file per machine beside its figures, a JSON object a line, the last few hundred. A line that cannot be read (another
version's, or half-written when the power went) counts as not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path

from penstock.planner.explain import Band
from penstock.planner.predict import Prediction
from penstock.serve.generation import Generation
from penstock.spec import plan as plans
from penstock.spec.machine import MachineSpec, Rate
from penstock.spec.plan import Plan

_KEPT, _RECENT = 500, 50
# The band where nothing was seen yet, and the least where everything was right: machines drift by as much in an hour.
_UNSEEN, _LEAST = 0.25, 0.1
_ENOUGH = 3
_SHARE = 0.8  # how busy a lane must have been for a run to say something of its speed
_MOST_CHANGE = 4.0


@dataclass(frozen=True)
class Run:
    """Predicted beside measured. `plan`: a hash; `bound_by`: a lane, `bound_share`: how busy it was while decoding."""

    plan: str
    prompt_tokens: int
    batch: int
    predicted_ttft_s: float
    ttft_s: float
    predicted_tokens_per_s: float
    tokens_per_s: float
    bound_by: str
    bound_share: float

    @property
    def decode_error(self) -> float:
        return abs(self.predicted_tokens_per_s / self.tokens_per_s - 1) if self.tokens_per_s else 0.0

    @property
    def ttft_error(self) -> float:
        return abs(self.predicted_ttft_s / self.ttft_s - 1) if self.ttft_s else 0.0


def plan_hash(plan: Plan) -> str:
    return hashlib.sha256(plans.dumps(plan).encode()).hexdigest()[:16]


def history_file(machine_file: Path) -> Path:
    return machine_file.with_suffix(".runs.jsonl")


def note_run(machine_file: Path, plan: Plan, prediction: Prediction, generation: Generation) -> None:
    """Keeps a run. Where nothing can be written the run was good all the same."""
    if generation.decode_tokens < 4:  # too little to say anything
        return
    run = Run(
        plan=plan_hash(plan),
        prompt_tokens=generation.prompt_tokens,
        batch=generation.batch,
        predicted_ttft_s=prediction.ttft_s,
        ttft_s=generation.batch_ttft_s,
        predicted_tokens_per_s=prediction.decode_tokens_per_s,
        tokens_per_s=generation.decode_tokens_per_s,
        bound_by=prediction.bound_by,
        bound_share=prediction.lane_share[prediction.bound_by],
    )
    with suppress(OSError):
        file = history_file(machine_file)
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [*_lines(file)[1 - _KEPT :], json.dumps(asdict(run))]
        aside = file.with_suffix(f".{os.getpid()}.tmp")
        aside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        aside.rename(file)


def runs(machine_file: Path) -> list[Run]:
    """Oldest first."""
    names, found = {f.name for f in fields(Run)}, []
    for line in _lines(history_file(machine_file)):
        with suppress(ValueError, TypeError):
            data = json.loads(line)
            if isinstance(data, dict) and set(data) == names:
                run = Run(**data)
                if min(run.ttft_s, run.tokens_per_s, run.predicted_ttft_s, run.predicted_tokens_per_s) > 0:
                    found.append(run)
    return found


def band(seen: list[Run]) -> Band:
    """As wide as four of five of the last runs were wrong, and not narrower than a machine drifts."""
    recent = seen[-_RECENT:]
    if len(recent) < _ENOUGH:
        return Band(_UNSEEN, _UNSEEN, len(recent))
    decode, ttft = (_fifth(errors) for errors in ([r.decode_error for r in recent], [r.ttft_error for r in recent]))
    return Band(max(_LEAST, decode), max(_LEAST, ttft), len(recent))


def error_band(cache: Path) -> Band:
    """Of predictions on this machine."""
    from penstock.runtime.probe import machine_file

    return band(runs(machine_file(cache)))


def calibrated(machine: MachineSpec, seen: list[Run]) -> tuple[MachineSpec, list[str]]:
    """The machine with the speeds that runs showed, and a line per change. Decoding says how fast the busiest lane
    moves bytes, a first token after a longer prompt how fast the processor multiplies."""
    lines, rates = [], list(machine.rates)
    for lane in ("host", "disk0"):
        ratios = [r.predicted_tokens_per_s / r.tokens_per_s for r in seen if _shows(r, lane)]
        if len(ratios) >= _ENOUGH:
            factor = _within(statistics.median(ratios))
            rates = [_scaled(r, lane, factor, 1.0) for r in rates]
            lines.append(f"{lane}: {len(ratios)} runs decoded {1 / factor:.2f} times as fast as predicted")
    ratios = [r.ttft_s / r.predicted_ttft_s for r in seen if r.bound_by == "host" and r.prompt_tokens >= 128]
    if len(ratios) >= _ENOUGH:
        factor = _within(statistics.median(ratios))
        rates = [_scaled(r, "host", 1.0, factor) for r in rates]
        lines.append(f"host: {len(ratios)} prompts took {factor:.2f} times as long as predicted")
    source = f"{machine.source}; calibrated {date.today().isoformat()} by {len(seen)} runs" if lines else machine.source
    return replace(machine, rates=tuple(rates), source=source), lines


def _shows(run: Run, lane: str) -> bool:
    return run.bound_by == lane and run.bound_share >= _SHARE


def _within(factor: float) -> float:
    return min(_MOST_CHANGE, max(1 / _MOST_CHANGE, factor))


def _scaled(rate: Rate, lane: str, bytes_factor: float, flops_factor: float) -> Rate:
    if rate.lane != lane:
        return rate
    return replace(
        rate,
        alpha_s=rate.alpha_s * bytes_factor,
        s_per_byte=rate.s_per_byte * bytes_factor,
        s_per_flop=rate.s_per_flop * flops_factor,
    )


def _fifth(errors: list[float]) -> float:
    """What one in five errors is above."""
    ordered = sorted(errors)
    return ordered[min(len(ordered) - 1, len(ordered) * 4 // 5)]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
