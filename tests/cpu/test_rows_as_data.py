"""Passes of a model in memory whose numbers of rows are data: what each gives when it is lowered by itself, to the
bit, in logits and in every byte of the KV pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.graph.batch import Batch
from penstock.graph.passes import DECODE
from penstock.graph.tasks import Pass
from penstock.kernels import cpu
from penstock.serve.session import Running, Session
from penstock.spec.plan import Plan
from penstock.store.packed import open_packed
from tests.cpu.engines import make_model
from tests.plans import resident_plan

SEQS, CONTEXT, ROWS, LOGITS = 4, 128, 24, 6
Tokens = list[NDArray[np.int32]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda name, weights: make_model(folder, name, weights)


def some_passes(plan: Plan, seed: int, paged: bool, count: int = 40) -> Iterator[tuple[Pass, Tokens]]:
    """Of sequences that begin, read prompts, answer and begin again, in pages anywhere or in those of their number."""
    random, vocab = Random(seed), plan.target.spec.vocab
    each = CONTEXT // plan.page_tokens
    pages = list(range(SEQS * plan.batches_per_pass * each))
    random.shuffle(pages)
    at = [0] * SEQS * plan.batches_per_pass
    for _ in range(count):
        batches, tokens, reads, speaks = [], list[NDArray[np.int32]](), False, False
        for number in range(plan.batches_per_pass):
            chosen = sorted(random.sample(range(number * SEQS, (number + 1) * SEQS), random.randint(1, SEQS)))
            room, rows, logits = ROWS, list[int](), list[int]()
            for i, seq in enumerate(chosen):
                at[seq] = 0 if at[seq] > CONTEXT - ROWS else at[seq]
                left = room - (len(chosen) - i - 1)
                rows.append(random.choice([1, 1, random.randint(1, left)]))
                room -= rows[-1]
                reads, speaks = reads or rows[-1] > 1, speaks or rows[-1] == 1
                if random.random() < 0.7 and len(logits) < LOGITS:
                    logits.append(sum(rows) - 1)
            tables = tuple(tuple(pages[s * each : (s + 1) * each]) for s in chosen) if paged else ()
            starts = tuple(at[seq] for seq in chosen)
            used = tuple(t[: -(-(s + n) // plan.page_tokens)] for t, s, n in zip(tables, starts, rows, strict=False))
            hidden = random.random() < 0.3
            batches.append(Batch(number, tuple(chosen), starts, tuple(rows), tuple(logits), (), used, hidden))
            tokens.append(np.array([random.randrange(vocab) for _ in range(sum(rows))], np.int32))
            for seq, n in zip(chosen, rows, strict=True):
                at[seq] += n
        purpose = "decode" if not reads else "mixed" if speaks else "prefill"
        yield Pass(purpose, tuple(batches), DECODE), tokens


def opened(folder: Path, plan: Plan, **how: Any) -> closing[Session]:
    return closing(Session(open_packed(folder), plan, Running(threads=2, **how)))


def of(folder: Path, batches: int = 1, kv: str = "float16") -> Plan:
    packed = open_packed(folder)
    sizes: dict[str, Any] = dict(batch_seqs=SEQS, chunk_rows=ROWS, logits_rows=LOGITS, context=CONTEXT, kv=kv)
    return resident_plan(packed.spec, packed.weights, batches_per_pass=batches, **sizes)


def compare(folder: Path, plan: Plan, paged: bool, seed: int, **how: Any) -> Session:
    """Runs the same passes with what is kept, and each lowered and bound anew."""
    with opened(folder, plan, **how) as session, opened(folder, plan, **how) as oracle:
        for p, tokens in some_passes(plan, seed, paged):
            oracle._start_over()
            expected = oracle.step(p, tokens)
            found = session.step(p, tokens)
            for ours, theirs in zip(found, expected, strict=True):
                assert np.array_equal(ours, theirs) and np.isfinite(ours).all()
            assert session.best == oracle.best
            for ours, theirs in zip(session.hidden, oracle.hidden, strict=True):
                assert (ours is None) == (theirs is None) and (ours is None or np.array_equal(ours, theirs))
        assert np.array_equal(session._arenas.whole("host.kv"), oracle._arenas.whole("host.kv"))
        return session


@pytest.mark.parametrize("isa", list(cpu.available()))
@pytest.mark.parametrize(("name", "weights"), [("llama", "int4"), ("gemma2", "float32"), ("qwen2_moe", "int8")])
def test_rows_sequences_and_logits_are_data(
    made: Callable[[str, str], Path], name: str, weights: str, isa: str
) -> None:  # fmt: skip
    folder = made(name, weights)
    session = compare(folder, of(folder), paged=True, seed=1, kernels=isa)
    forms = session.lowering._repeats._of_form
    # Three purposes, with logits and without, with hidden states and without.
    assert len(forms) <= 12 and not session.lowering._repeats._known


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("name", ["gpt_oss", "falcon", "olmoe", "qwen3"])
def test_whatever_the_layers_and_the_pages(
    made: Callable[[str, str], Path], name: str, paged: bool, batches: int
) -> None:  # fmt: skip
    folder = made(name, "int4")
    session = compare(folder, of(folder, batches, "int8"), paged, seed=2 + batches)
    if paged and batches == 1:
        assert len(session.lowering._repeats._of_form) <= 12


def test_what_looks_at_calls_gets_its_own(made: Callable[[str, str], Path]) -> None:
    """numpy embeds positions that are learned, and timelines tell of bytes: there passes of other numbers of rows are
    lowered anew."""
    folder = made("opt", "float32")
    session = compare(folder, of(folder), paged=True, seed=5)
    assert not session.lowering._repeats._of_form and session.lowering._repeats._known
    folder = made("llama", "int4")
    flops: list[int] = []
    with opened(folder, of(folder)) as session:
        session.watchers.append(lambda timeline, _: flops.append(sum(span.flops for span in timeline.spans)))
        for rows in (1, 5, 9, 5, 1):
            batch = Batch(0, (0,), (0,), (rows,), (rows - 1,), (), ((0,),))
            session.step(Pass("prefill", (batch,), None), [np.zeros(rows, np.int32)])
    assert flops[0] < flops[1] < flops[2] and flops[3:] == [flops[1], flops[0]]
