"""`python -m tests.at_size`: random passes through models as wide as real ones, beside the same rows one by one.

Tests have small models, whose rows all go through a kernel at once. Wide ones are cut: into chunks of rows, columns and
panels. So a row is computed here twice: in a pass of random company, and as a pass of its own behind a prompt in other
chunks. Its logits must be the same, to the bit. Where sequences share KV pages, prompts are answered instead: all at
once by the scheduler, and then one by one. Tokens and their probabilities must be the same, to the bit.

    --cases N | --minutes M    how much (2 minutes)
    --first N                  begin with this case
    --case N                   this one alone

The last line is one JSON object; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import BadRequest
from penstock.graph import passes
from penstock.graph.batch import Batch
from penstock.graph.passes import MIXED
from penstock.graph.tasks import Pass
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.serve.service import Service
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.store.synth import synth
from tests.at_size.draws import CONTEXT, MOST_WEIGHT_BYTES, VOCABULARY, Case, Rows, prompts, schedule
from tests.at_size.running import main
from tests.cpu.commands import MACHINE

ROWS = 1500  # of a case, in company
ALONE = 4  # prompts of a case that are answered once more alone
CHECKED = 10  # rows of a case that are computed once more alone


def differences(case: Case, folder: Path) -> list[str]:
    """What is not the same. Raises one of `running.LEFT_OUT` where the case cannot run."""
    config = folder / "config.json"
    config.write_text(json.dumps(case.config))
    packed = synth(config, folder / "packed", parse_format(case.weights), seed=case.number)
    weight_bytes = sum(file.stat().st_size for file in packed.glob("*.safetensors"))
    if weight_bytes > MOST_WEIGHT_BYTES:
        raise BadRequest(f"{weight_bytes} bytes of weights are more than a case should have")
    ask = Ask(
        prompt_tokens=64, output_tokens=8, batch=case.batch, context=CONTEXT, kv=case.kv, kv_home=case.kv_home,
        objective=case.objective, kv_tokens=case.kv_tokens,
        resident_bytes=None if case.share == 1 else int(case.share * weight_bytes),
    )  # fmt: skip
    how = Loading(machine=MACHINE, device="none", kernels=case.isa, exact=case.exact, cache=folder / "cache")
    with closing(Engine.load(packed, ask, how)) as engine:
        return passes_compared(engine, case) if case.kv_tokens is None else answers_compared(engine, case)


def answers_compared(engine: Engine, case: Case) -> list[str]:
    """Prompts that are answered together, some with a beginning that another one left, beside each alone."""
    rng = random.Random(case.number)
    asked = prompts(rng, 2 * case.batch + 1)
    chosen = [SamplingParams(max_tokens=rng.randint(1, 16), ignore_eos=True, logprobs=0) for _ in asked]
    with closing(Service.of_whole_answers(engine)) as together:
        answers = together.generate(asked, chosen)
    found = []
    for nth in rng.sample(range(len(asked)), min(len(asked), ALONE)):
        engine.session.held.forget()
        with closing(Service.of_whole_answers(engine)) as service:
            (alone,) = service.generate([asked[nth]], [chosen[nth]])
        if (alone.token_ids, alone.logprobs) != (answers[nth].token_ids, answers[nth].logprobs):
            cached = answers[nth].cached_tokens
            found.append(f"prompt {nth} of {len(asked[nth])} tokens ({cached} cached): {alone.token_ids} alone")
    return found


def passes_compared(engine: Engine, case: Case) -> list[str]:
    rng = random.Random(case.number)
    ids = np.random.default_rng(case.number).integers(0, VOCABULARY, (case.batch, CONTEXT)).astype(np.int32)
    most = min(case.chunk_rows, engine.plan.chunk_rows)
    seen: dict[tuple[int, int], tuple[np.ndarray[Any, np.dtype[np.float32]], list[Rows]]] = {}
    for rows in schedule(rng, min(case.batch, engine.plan.batch_seqs * engine.plan.batches_per_pass), most, ROWS):
        for each, logits in zip(rows, step(engine, rows, ids), strict=True):
            seen[each.seq, each.start + each.rows - 1] = logits.copy(), rows
    # The last rows of passes of many rows first: those are behind whole chunks.
    wanted = sorted(seen, key=lambda at: (-sum(each.rows for each in seen[at][1]), rng.random()))
    by_seq: dict[int, list[int]] = {}
    for seq, at in (*wanted[: CHECKED // 2], *rng.sample(wanted, min(len(wanted), CHECKED // 2))):
        by_seq.setdefault(seq, []).append(at)
    found = []
    for seq, places in by_seq.items():
        reached = 0
        for at in sorted(set(places)):
            while reached < at:
                rows = min(at - reached, rng.randint(1, most))
                step(engine, [Rows(seq, reached, rows)], ids)
                reached += rows
            (alone,) = step(engine, [Rows(seq, at, 1)], ids)
            reached = at + 1
            beside, company = seen[seq, at]
            if not np.array_equal(alone, beside):
                off = np.abs(alone - beside).max() / np.abs(alone).max()
                found.append(f"sequence {seq} at {at}: {off:.2g} of the largest logit, in {tuple(map(tuple, company))}")
    return found


def step(
    engine: Engine, rows: list[Rows], ids: np.ndarray[Any, np.dtype[np.int32]]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The logits of the last row of each, float32 [len(rows), V], of one pass. `rows`: by sequence, upwards."""
    batches, tokens = list[Batch](), list[np.ndarray[Any, np.dtype[np.int32]]]()
    for nth, group in itertools.groupby(rows, lambda each: each.seq // engine.plan.batch_seqs):
        of_batch = list(group)
        seqs, start, counts = zip(*of_batch, strict=True)
        last = tuple(end - 1 for end in itertools.accumulate(counts))
        batches.append(Batch(nth, seqs, start, counts, last))
        tokens.append(np.concatenate([ids[each.seq, each.start : each.start + each.rows] for each in of_batch]))
    purpose = "decode" if max(each.rows for each in rows) == 1 else MIXED
    used = passes.pages_used(engine.plan, batches)
    return np.concatenate(engine.session.step(Pass(purpose, tuple(batches), None, pages_used=used), tokens))


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", differences))
