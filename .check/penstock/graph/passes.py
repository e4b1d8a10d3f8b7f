"""The passes of a generation: prompt chunks, then one pass a token. The engine runs them, the planner
simulates them; both take them from here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.graph.tasks import Batch, Pass, Stream
from penstock.spec.plan import Plan

DECODE = Stream("decode", True)


def prefill(plan: Plan, seq: int, tokens: int, then: Stream | None, score: bool = False) -> Iterator[Pass]:
    """The prompt of one sequence in chunks of `plan.chunk_rows`. Logits: of the last row; with `score` of
    every row, in chunks of `plan.logits_rows` at most. `then`: what follows the last chunk."""
    step = min(plan.chunk_rows, plan.logits_rows) if score else plan.chunk_rows
    for start in range(0, tokens, step):
        rows = min(step, tokens - start)
        last = start + rows == tokens
        logits = tuple(range(rows)) if score else (rows - 1,) if last else ()
        following = then if last else Stream("prefill", score or start + rows + step >= tokens)
        yield Pass("prefill", (Batch(0, (seq,), (start,), (rows,), logits),), following)


def decode(plan: Plan, seqs: Sequence[int], positions: Sequence[int], then: Stream | None) -> Pass:
    """One token of each sequence, at its position; sequences go into batches of `plan.batch_seqs`."""
    batches = []
    for index, lo in enumerate(range(0, len(seqs), plan.batch_seqs)):
        chosen = tuple(seqs[lo : lo + plan.batch_seqs])
        n = len(chosen)
        batches.append(Batch(index, chosen, tuple(positions[lo : lo + n]), (1,) * n, tuple(range(n))))
    return Pass("decode", tuple(batches), then)
