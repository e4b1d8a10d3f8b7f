"""The result of `penstock bench MODEL`: measured speeds, beside the prediction and the bound of disk and RAM."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from penstock.graph.occupancy import LaneUse, Occupancy
from penstock.graph.tasks import Pass
from penstock.graph.timeline import Timeline
from penstock.planner.predict import Prediction
from penstock.runtime.ceilings import Ceilings
from penstock.spec.ask import Ask
from penstock.spec.places import CPU, DISK, Lane
from penstock.spec.plan import Plan

_SPREADS = ("ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s")


@dataclass(frozen=True)
class Measured:
    """A median with minimum and maximum."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Measured:
        return cls(statistics.median(values), min(values), max(values))


class Decoding:
    """How long lanes were busy while decoding, which is from the last prompt's end to the last token, summed over all
    repeats. `watch`: a Session's Watch. `overlap_s`: seconds of loading and computing at once. `wall_s`: all seconds
    that passed."""

    def __init__(self) -> None:
        self._now = Occupancy()
        self._start_s = self._end_s = 0.0
        self.lanes: dict[str, LaneUse] = {}
        self.overlap_s = self.wall_s = 0.0

    def watch(self, timeline: Timeline, p: Pass | None) -> None:
        """Counts a pass of the current repeat."""
        if p is None:
            return
        if p.purpose != "decode":  # of prompts alone: a bench has no passes with both
            self._now, self._start_s = Occupancy(), timeline.end_s
        else:
            self._now.add(timeline)
            self._end_s = timeline.end_s

    def end(self) -> None:
        """Adds the current repeat, which has ended, to the sums."""
        for lane, use in self._now.lanes(self._start_s, self._end_s).items():
            before = self.lanes.get(lane, LaneUse(0.0, 0))
            self.lanes[lane] = LaneUse(before.busy_s + use.busy_s, before.bytes + use.bytes)
        self.overlap_s += self._now.overlap_s(self._start_s, self._end_s)
        self.wall_s += self._end_s - self._start_s

    @property
    def overlap_share(self) -> float:
        return self.overlap_s / self.wall_s

    @property
    def busy_over_wall(self) -> float:
        return sum(use.busy_s for use in self.lanes.values()) / self.wall_s


@dataclass(frozen=True)
class Result:
    """Everything that was measured. `before`, `after`: the ceilings before and after the answers. `disk_bytes`: that a
    decode pass streams. `weight_bytes`: of weights that a decode pass reads from RAM."""

    ask: Ask
    plan: Plan
    threads: int
    repeats: int
    prediction: Prediction
    ttft_s: Measured
    prefill_tokens_per_s: Measured
    decode_tokens_per_s: Measured
    inter_token_s: dict[str, float]
    decoding: Decoding
    before: Ceilings
    after: Ceilings
    disk_bytes: float
    weight_bytes: int
    bytes_moved: dict[str, int]
    peak_host_bytes: int

    @property
    def disk_s(self) -> float:
        """The least seconds of a decode pass, by the disk."""
        rate = (self.before.disk_read_bytes_per_s + self.after.disk_read_bytes_per_s) / 2
        return self.disk_bytes / rate if rate else 0.0

    @property
    def ram_s(self) -> float:
        """The least seconds of a decode pass, by the RAM."""
        return 2 * self.weight_bytes / (self.before.ram_read_bytes_per_s + self.after.ram_read_bytes_per_s)

    @property
    def bound_by(self) -> Lane:
        """The lane of the longer one: the disk's reads, or the CPU for the RAM."""
        return DISK.reads if self.disk_s > self.ram_s else CPU

    @property
    def bound_tokens_per_s(self) -> float:
        """The most tokens per second that disk and RAM allow. 0 where there is no bound, since nothing comes from the
        disk or out of RAM."""
        longer_s = max(self.disk_s, self.ram_s)
        return self.ask.batch / longer_s if longer_s else 0.0

    @property
    def share_of_bound(self) -> float:
        bound = self.bound_tokens_per_s
        return self.decode_tokens_per_s.median / bound if bound else 0.0

    @property
    def predicted_prefill_tokens_per_s(self) -> float:
        return self.ask.batch * self.ask.prompt_tokens / self.prediction.ttft_s

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `bench --json`. Fields that `run --json` has too have the same names."""
        predicted, wall_s = self.prediction, self.decoding.wall_s
        return {
            "batch": self.ask.batch,
            "context": self.plan.context,
            "prompt_tokens": self.ask.prompt_tokens,
            "output_tokens": self.ask.output_tokens,
            "repeats": self.repeats,
            "threads": self.threads,
            "weights": self.plan.target.weights.name,
            "kv": self.plan.kv[0].format.name,
            "ttft_s": self.ttft_s.median,
            "prefill_tokens_per_s": self.prefill_tokens_per_s.median,
            "decode_tokens_per_s": self.decode_tokens_per_s.median,
            "least": {name: getattr(self, name).least for name in _SPREADS},
            "most": {name: getattr(self, name).most for name in _SPREADS},
            "inter_token_s": self.inter_token_s,
            "predicted": {
                "ttft_s": predicted.ttft_s,
                "prefill_tokens_per_s": self.predicted_prefill_tokens_per_s,
                "decode_tokens_per_s": predicted.decode_tokens_per_s,
                "inter_token_s": vars(predicted.inter_token_s),
                "disk_bytes_per_token": predicted.disk_bytes_per_token,
                "peak_host_bytes": predicted.peak_host_bytes,
                "bound_by": predicted.bound_by,
                "lane_share": predicted.lane_share,
            },
            "measured_to_predicted": {
                "ttft_s": self.ttft_s.median / predicted.ttft_s,
                "decode_tokens_per_s": self.decode_tokens_per_s.median / predicted.decode_tokens_per_s,
            },
            "lanes": {
                lane: {
                    "busy_share": use.busy_s / wall_s,
                    "bytes": use.bytes,
                    "bytes_per_s": use.bytes / wall_s,
                    "bytes_per_busy_s": use.bytes / use.busy_s if use.busy_s else 0.0,
                }
                for lane, use in self.decoding.lanes.items()
            },
            "overlap_share": self.decoding.overlap_share,
            "busy_over_wall": self.decoding.busy_over_wall,
            "bytes_moved": self.bytes_moved,
            "disk_bytes_per_token": self.disk_bytes / self.ask.batch,
            "ceilings": {"before": vars(self.before), "after": vars(self.after)},
            "bound": {
                "disk_bytes_per_pass": self.disk_bytes,
                "weight_bytes_per_pass": self.weight_bytes,
                "disk_s": self.disk_s,
                "ram_s": self.ram_s,
                "decode_tokens_per_s": self.bound_tokens_per_s,
            },
            "bound_by": self.bound_by,
            "share_of_bound": self.share_of_bound,
            "peak_host_bytes": self.peak_host_bytes,
            "peak_device_bytes": predicted.peak_device_bytes,
        }
