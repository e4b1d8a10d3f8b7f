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


def prompts(plan: Plan, lengths: Sequence[int], then: Stream | None) -> Iterator[Pass]:
    """The prompts of sequences 0, 1, …, of so many tokens: one after the other, or of a plan with several batches a
    pass together (FlexGen's zig-zag block), so that a pass reads what streams once for all of them. A batch is as many
    whole prompts as a chunk holds, or a chunk of a longer one."""
    if plan.batches_per_pass == 1:
        for seq, tokens in enumerate(lengths):
            yield from prefill(plan, seq, tokens, then if seq == len(lengths) - 1 else None)
        return
    groups = _groups(plan, lengths)
    wanted: list[tuple[Batch, ...]] = []
    for lo in range(0, len(groups), plan.batches_per_pass):
        block = groups[lo : lo + plan.batches_per_pass]
        for start in range(0, max(lengths[seqs[0]] for seqs in block), plan.chunk_rows):
            live = [seqs for seqs in block if start == 0 or lengths[seqs[0]] > start]
            wanted.append(tuple(_chunk(plan, i, seqs, start, lengths) for i, seqs in enumerate(live)))
    for i, batches in enumerate(wanted):
        following = then
        if i + 1 < len(wanted):
            following = Stream("prefill", any(batch.logits for batch in wanted[i + 1]))
        yield Pass("prefill", batches, following)


def _groups(plan: Plan, lengths: Sequence[int]) -> list[list[int]]:
    """Sequences that make a batch: prompts that fit into a chunk, one after the other; longer ones alone."""
    groups: list[list[int]] = []
    rows = plan.chunk_rows
    for seq, tokens in enumerate(lengths):
        if not groups or rows + tokens > plan.chunk_rows or len(groups[-1]) == plan.logits_rows:
            groups.append([])
            rows = 0
        groups[-1].append(seq)
        rows += tokens
    return groups


def _chunk(plan: Plan, number: int, seqs: list[int], start: int, lengths: Sequence[int]) -> Batch:
    rows = tuple(min(plan.chunk_rows, lengths[seq] - start) for seq in seqs)
    ends = tuple(sum(rows[: i + 1]) - 1 for i, seq in enumerate(seqs) if start + rows[i] == lengths[seq])
    return Batch(number, tuple(seqs), (start,) * len(seqs), rows, ends)


def decode(plan: Plan, seqs: Sequence[int], positions: Sequence[int], then: Stream | None) -> Pass:
    """One token of each sequence, at its position; sequences go into batches of `plan.batch_seqs`."""
    batches = []
    for index, lo in enumerate(range(0, len(seqs), plan.batch_seqs)):
        chosen = tuple(seqs[lo : lo + plan.batch_seqs])
        n = len(chosen)
        batches.append(Batch(index, chosen, tuple(positions[lo : lo + n]), (1,) * n, tuple(range(n))))
    return Pass("decode", tuple(batches), then)
