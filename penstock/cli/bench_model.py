"""Prints the result of `penstock bench MODEL` as a table: measured, predicted, and the bound of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.spec.places import CPU, DISK
from penstock.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.serve.bench_result import Measured, Result

_ROW = "{:<22}{:>11}{:>24}{:>12}{:>8}"  # 77 columns: a terminal has 80


def table(result: Result) -> str:
    """The whole table, without a newline at its end."""
    return "\n\n".join("\n".join(part(result)) for part in (_setting, _speeds, _lanes, _bound))


def _setting(result: Result) -> list[str]:
    plan, ask = result.plan, result.ask
    total = sum(plan.unit_bytes(unit) for unit in plan.units)
    stays = sum(plan.unit_bytes(unit) for unit in plan.units if unit.home == plan.main)
    before, after = result.before, result.after
    ceilings = f"RAM {_rates(before.ram_read_bytes_per_s, after.ram_read_bytes_per_s)}"
    if before.disk_read_bytes_per_s:
        ceilings += f", disk {_rates(before.disk_read_bytes_per_s, after.disk_read_bytes_per_s)}"
    return [
        f"{format_bytes(total)} of weights in {plan.target.weights.name}, {format_bytes(stays)} of them in memory; "
        f"KV in {plan.kv[0].format.name}, context {plan.context}",
        f"{ask.prompt_tokens} + {ask.output_tokens} tokens × {ask.batch} sequences, "
        f"{result.repeats} × after a warm-up, on {result.threads} threads",
        f"ceilings before and after: {ceilings}",
    ]


def _speeds(result: Result) -> list[str]:
    p = result.prediction
    lines = [_ROW.format("", "measured", "least … most", "predicted", "ratio")]

    def row(name: str, value: Measured, predicted: float, shown: str) -> None:
        between = f"{_value(value.least, shown)} … {_value(value.most, shown)}"
        ratio = f"{value.median / predicted:.2f}" if predicted else "–"
        lines.append(_ROW.format(name, _value(value.median, shown), between, _value(predicted, shown), ratio))

    row("first token", result.ttft_s, p.ttft_s, "s")
    row("prefill, tokens/s", result.prefill_tokens_per_s, result.predicted_prefill_tokens_per_s, "")
    row("decode, tokens/s", result.decode_tokens_per_s, p.decode_tokens_per_s, "")
    promised = {"p50": p.inter_token_s.p50, "p95": p.inter_token_s.p95}
    for name, seconds in result.inter_token_s.items():
        foreseen = promised.get(name)
        beside = ("–", "") if foreseen is None else (format_seconds(foreseen), f"{seconds / foreseen:.2f}")
        lines.append(_ROW.format(f"between tokens, {name}", format_seconds(seconds), "", *beside))
    per_token, foreseen = result.disk_bytes / result.ask.batch, p.disk_bytes_per_token
    ratio = f"{per_token / foreseen:.2f}" if foreseen else "–"
    lines.append(_ROW.format("disk bytes a token", format_bytes(per_token), "", format_bytes(foreseen), ratio))
    peaks = result.peak_host_bytes, p.peak_host_bytes
    lines.append(
        _ROW.format("peak memory", format_bytes(peaks[0]), "", format_bytes(peaks[1]), f"{peaks[0] / peaks[1]:.2f}")
    )
    return lines


def _lanes(result: Result) -> list[str]:
    decoding, line = result.decoding, "{:<26}{:>12}{:>26}{:>14}"
    lines = [line.format("while decoding", "busy", "bytes", "GB/s busy")]
    for lane, use in decoding.lanes.items():
        busy_rate = f"{use.bytes / use.busy_s / 1e9:.2f}" if use.busy_s else "–"
        lines.append(line.format(lane, f"{use.busy_s / decoding.wall_s:.0%}", format_bytes(use.bytes), busy_rate))
    lines.append(
        f"loading and computing at once {decoding.overlap_share:.0%} of the time; "
        f"lanes are busy {decoding.busy_over_wall:.2f} × the time that passes"
    )
    return lines


def _bound(result: Result) -> list[str]:
    """Both terms of the bound, and which one is longer."""
    if not result.bound_tokens_per_s:
        return ["no bound: all weights are in the device's memory, whose speed is not read here"]
    name = {DISK.reads: "the disk", CPU: "reading weights from RAM"}[result.bound_by]
    terms = f"{format_bytes(result.weight_bytes)} of weights from RAM {format_seconds(result.ram_s)}"
    if result.disk_s:
        terms = f"{format_bytes(result.disk_bytes)} from disk {format_seconds(result.disk_s)}, {terms}"
    return [
        f"a pass at least: {terms}",
        f"so at most {_value(result.bound_tokens_per_s, '')} tokens/s, bound by {name}; "
        f"{result.share_of_bound:.0%} of that is reached",
    ]


def _value(value: float, kind: str) -> str:
    from penstock.planner.explain import rate

    return format_seconds(value) if kind == "s" else rate(value)


def _rates(before: float, after: float) -> str:
    return f"{format_rate(before)} and {format_rate(after)}"
