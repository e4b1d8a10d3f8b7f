"""Makes the passes of a generation: prompt chunks, then one pass per token. The engine runs these passes, and the
planner simulates the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from penstock.graph.batch import Batch
from penstock.graph.tasks import Pass, Stream
from penstock.spec.plan import Plan

DECODE = Stream("decode", True)
MIXED = "mixed"  # the purpose of a pass with rows of prompts beside rows of answers


def prompts(
    plan: Plan, seqs: Sequence[int], lengths: Sequence[int], then: Stream | None, starts: Sequence[int] = ()
) -> Iterator[Pass]:
    """The prompts of sequences that decode together, `lengths[i]` tokens of sequence `seqs[i]`. A pass has as many rows
    as its batches hold, since weights that stream are read once a pass. Logits are wanted of each prompt's last row.
    `then`: the stream of the pass that follows the last one. `starts[i]`: tokens of the prompt whose keys and values
    are there already, fewer than all; () for none."""
    size, wanted = plan.batch_seqs, tuple(zip(seqs, starts or [0] * len(seqs), lengths, strict=True))
    groups = [_chunks(plan.chunk_rows, wanted[lo : lo + size]) for lo in range(0, len(seqs), size)]
    following = then
    passes = []
    for i in reversed(range(max(map(len, groups)))):
        batches = tuple(
            [
                chunks[i]._replace(id=index) if index else chunks[i]
                for index, chunks in enumerate(groups)
                if i < len(chunks)
            ]
        )
        most = max(batch.total_rows for batch in batches)
        few = most <= plan.asking_rows
        passes.append(Pass(purpose_of(plan, most), batches, following, few, pages_used(plan, batches)))
        following = passes[-1].stream
    yield from reversed(passes)


def purpose_of(plan: Plan, rows: int) -> str:
    """The purpose of a pass of prompts alone. `rows`: the most rows of one of its batches. If they are too few for a
    device to take any from the CPU, the executors of decode compute them."""
    return "prefill" if rows >= plan.least_device_rows else MIXED


def ended(batch: Batch) -> list[int]:
    """Sequences whose prompts end in this chunk, in the order of its logits."""
    ends = accumulate(batch.rows)
    return [seq for seq, end in zip(batch.seqs, ends, strict=True) if end - 1 in batch.logits]


@lru_cache(maxsize=32)  # solvers try many plans with chunks of the same size, which took a tenth of 10,000 sequences
def _chunks(chunk_rows: int, wanted: tuple[tuple[int, int, int], ...]) -> tuple[Batch, ...]:
    """The prompts of one batch's sequences, one after the other, in batches of `chunk_rows` rows. `wanted`:
    (sequence, start, end) of each."""
    batches: list[Batch] = []
    chunk: list[tuple[int, int, int, bool]] = []  # sequence, start, rows, whether its prompt ends here
    room = chunk_rows
    for seq, start, length in wanted:
        while start < length:
            rows = min(room, length - start)
            chunk.append((seq, start, rows, start + rows == length))
            start, room = start + rows, room - rows
            if not room:
                batches.append(_batch(chunk))
                chunk, room = [], chunk_rows
    if chunk:
        batches.append(_batch(chunk))
    return tuple(batches)


def _batch(chunk: Sequence[tuple[int, int, int, bool]]) -> Batch:
    seqs, start, rows, ends = zip(*chunk, strict=True)
    last = (end - 1 for end, is_last in zip(accumulate(rows), ends, strict=True) if is_last)
    return Batch(0, seqs, start, rows, tuple(last))


def prefill(plan: Plan, seq: int, tokens: int, then: Stream | None, score: bool = False) -> Iterator[Pass]:
    """The prompt of one sequence in chunks of `plan.chunk_rows`. Logits are wanted of the last row. With `score` they
    are wanted of every row, and chunks have at most `plan.logits_rows` rows. `then`: the stream of the pass that
    follows the last chunk."""
    if not score:
        yield from prompts(plan, (seq,), (tokens,), then)
        return
    step = min(plan.chunk_rows, plan.logits_rows)
    for start in range(0, tokens, step):
        rows = min(step, tokens - start)
        following = then if start + rows == tokens else scored(plan, tokens - start - rows)
        purpose = scored(plan, rows).purpose
        batches = (Batch(0, (seq,), (start,), (rows,), tuple(range(rows))),)
        yield Pass(purpose, batches, following, pages_used=pages_used(plan, batches))


def scored(plan: Plan, tokens: int) -> Stream:
    """The stream of the next pass of a prompt of which so many tokens are left, where logits of all are wanted."""
    return Stream(purpose_of(plan, min(tokens, plan.chunk_rows, plan.logits_rows)), True)


def decode(plan: Plan, seqs: Sequence[int], positions: Sequence[int], then: Stream | None) -> Pass:
    """A pass with one token of each sequence, at its position. Sequences go into batches of `plan.batch_seqs`."""
    batches = []
    for index, lo in enumerate(range(0, len(seqs), plan.batch_seqs)):
        chosen = tuple(seqs[lo : lo + plan.batch_seqs])
        n = len(chosen)
        batches.append(Batch(index, chosen, tuple(positions[lo : lo + n]), (1,) * n, tuple(range(n))))
    return Pass("decode", tuple(batches), then, pages_used=pages_used(plan, batches))


def pages_used(plan: Plan, batches: Sequence[Batch]) -> int | None:
    """`Pass.pages_used` of a plan for one sequence, which has all pages: up to the last one that it reaches. None for a
    plan that has no use for the others, and for several sequences. Who runs these knows what their pages hold."""
    if not plan.guests or plan.batch_seqs * plan.batches_per_pass > 1:
        return None
    (batch,) = batches
    return -(-(batch.start[-1] + batch.rows[-1]) // plan.page_tokens)


def one_batch(purpose: str, seqs: int, rows: int, start: int) -> Pass:
    """A pass of one batch of `seqs` sequences, each with `rows` rows from position `start` on. Logits are wanted of
    each sequence's last row."""
    last = tuple(range(rows - 1, seqs * rows, rows))
    return Pass(purpose, (Batch(0, tuple(range(seqs)), (start,) * seqs, (rows,) * seqs, last),), None)
