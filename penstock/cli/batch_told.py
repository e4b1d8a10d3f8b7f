"""What `penstock batch` tells: how far it is, and the result at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cli.output import note
from penstock.spec.places import is_disk
from penstock.units import format_left, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.runtime.host import Progress
    from penstock.serve.batch.answering import Done
    from penstock.serve.batch.nodes import Told
    from penstock.serve.engine import Engine


class ShownBatch:
    """Shows how far a batch is. `answers`: of the whole."""

    def __init__(self, tell: Progress, answers: int) -> None:
        self._tell, self._answers = tell, answers

    def tell(self, done: Done) -> None:
        from penstock.planner.explain import rate

        parts = ["answers", f"{rate(done.generation_tokens_per_s)} tok/s"]
        moved = sum(count for lane, count in done.bytes_moved.items() if is_disk(lane))
        if moved and done.seconds:
            parts.append(f"disk {format_rate(moved / done.seconds)}")
        left_s = done.foretold.left_s(done.answers)
        at_pace_s = done.foretold.left_at_pace_s(done.answers, done.seconds)
        promised = f"promised {format_left(left_s)}"
        parts.append(promised if at_pace_s is None else f"{format_left(at_pace_s)} left ({promised})")
        self._tell(", ".join(parts), done.answers, self._answers)


def say_done(done: Done) -> None:
    """Prints what a run did on this machine."""
    from penstock.planner.explain import rate

    note(
        f"{done.answers} answers, {done.tokens.output} tokens in {format_seconds(done.seconds)} (predicted"
        f" {format_seconds(done.foretold.seconds)}): {rate(done.generation_tokens_per_s)} tok/s, decoding"
        f" {rate(done.decode_tokens_per_s)}; {done.tokens.cached} of {done.tokens.prompt} prompt tokens were read"
        " once for several"
    )


def report(engine: Engine, done: Done, places: int, counted: dict[str, Any]) -> dict[str, Any]:
    """The result of a run on this machine as JSON. `places`: answers at once. `counted`: by `counts`."""
    plan = engine.plan
    return counted | {
        "predicted": {
            "seconds": done.foretold.seconds,
            "ttft_s": done.foretold.ttft_s,
            "decode_tokens_per_s": engine.prediction.decode_tokens_per_s,
        },
        "block": {"answers": places, "batch_seqs": plan.batch_seqs, "batches_per_pass": plan.batches_per_pass},
        "peak_host_bytes": engine.peak_host_bytes,
        "peak_device_bytes": engine.session.peak_device_bytes,
    }


def report_of_nodes(told: Told, nodes: int, seconds: float, counted: dict[str, Any]) -> dict[str, Any]:
    """The result of a run over `nodes` machines as JSON. `counted`: by `counts`."""
    return counted | {
        "prompts": told.lines, "answers": told.answers, "prompt_tokens": told.tokens.prompt,
        "cached_tokens": told.tokens.cached, "output_tokens": told.tokens.output, "seconds": seconds,
        "generation_tokens_per_s": told.tokens.output / seconds,
        "decode_tokens_per_s": nodes * told.decode_tokens_per_s, "bytes_moved": told.bytes_moved,
        "peak_host_bytes": told.peak_host_bytes, "peak_device_bytes": told.peak_device_bytes,
    }  # fmt: skip


def counts(done: Done | None, refused: int, before: int, lines: int) -> dict[str, Any]:
    """The result of a run as JSON. `done`: None if nothing was left to be answered; then there is no plan either."""
    return {
        "lines": lines,
        "resumed": before,
        "prompts": done.lines if done else 0,
        "failed": refused + (done.failed if done else 0),
        "answers": done.answers if done else 0,
        "prompt_tokens": done.tokens.prompt if done else 0,
        "cached_tokens": done.tokens.cached if done else 0,
        "output_tokens": done.tokens.output if done else 0,
        "seconds": done.seconds if done else 0.0,
        "generation_tokens_per_s": done.generation_tokens_per_s if done else 0.0,
        "decode_tokens_per_s": done.decode_tokens_per_s if done else 0.0,
        "predicted": None,
        "bytes_moved": done.bytes_moved if done else {},
        "block": None,
        "peak_host_bytes": None,
        "peak_device_bytes": None,
    }
