"""Measures a loaded model's speed with random prompts, for `penstock bench MODEL`.

The result stands beside the prediction, and beside the bound of disk and RAM. A decode pass takes at least

    max(bytes streamed / the disk's speed, bytes of weights / the RAM's speed)

Both speeds are measured right before the answers and right after.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import BadRequest
from penstock.planner.predict import predict
from penstock.runtime.ceilings import ceilings_apart
from penstock.runtime.host import Progress
from penstock.serve.bench_result import Decoding, Measured, Result
from penstock.serve.engine import Engine
from penstock.serve.generation import Generation, percentiles
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.spec.part_keys import gathered_key
from penstock.spec.places import GPU, HOST
from penstock.spec.plan import Plan

_LEAST_PROMPT, _LEAST_TOKENS = 8, 8  # lengths are not cut below these where time is short
_WARM_PROMPT, _WARM_TOKENS = 16, 3


@dataclass(frozen=True)
class WantedRun:
    """How to measure. `prompt_tokens`, `output_tokens`: None for 64, or fewer where that would take too long.
    `repeats`: at most so many answers, and at least one. `seconds`: about so long for all of them."""

    prompt_tokens: int | None
    output_tokens: int | None
    repeats: int
    seconds: float


def bench(
    engine: Engine,
    wanted: WantedRun,
    threads: int,
    on_progress: Progress | None = None,
) -> Result:
    """Warms up and measures. `threads`: that measure the ceilings. Raises BadRequest where the lengths do not fit the
    context or a single token is asked for, and StorageFailed."""
    tell = on_progress or (lambda text, done, total: None)
    at_once = engine.plan.sequences
    ask = replace(engine.ask, context=engine.plan.context, batch=min(engine.ask.batch, at_once))
    ask = _lengths(engine, ask, wanted)
    file = max(engine.packed.files, key=lambda path: path.stat().st_size) if _streams(engine.plan) else None
    before = ceilings_apart(threads, file)
    decoding = Decoding()
    answers: list[list[Generation]] = []
    params = SamplingParams(max_tokens=ask.output_tokens, temperature=0.0, ignore_eos=True)
    engine.session.watchers.append(decoding.watch)
    try:
        start_s, repeat_tokens = time.perf_counter(), ask.batch * ask.sequence_tokens
        while len(answers) < wanted.repeats:
            tell("measuring tokens", len(answers) * repeat_tokens, wanted.repeats * repeat_tokens)
            answers.append(engine.generate(_prompts(engine, ask.prompt_tokens, ask.batch, len(answers)), params))
            decoding.end()
            taken_s = time.perf_counter() - start_s
            if taken_s * (1 + 1 / len(answers)) > wanted.seconds:
                break
    finally:
        engine.session.watchers.remove(decoding.watch)
    after = ceilings_apart(threads, file)
    firsts = [batch[0] for batch in answers]  # whose figures are the batch's
    gaps = [gap for batch in answers for answer in batch for gap in answer.inter_token_s]
    return Result(
        ask,
        engine.plan,
        threads,
        len(answers),
        predict(engine.plan, ask, engine.machine),
        Measured.of([first.batch_ttft_s for first in firsts]),
        Measured.of([ask.batch * ask.prompt_tokens / first.batch_ttft_s for first in firsts]),
        Measured.of([first.decode_tokens_per_s for first in firsts]),
        percentiles(gaps),
        decoding,
        before,
        after,
        statistics.median(first.disk_bytes_per_token for first in firsts) * ask.batch,
        weight_bytes(engine.plan),
        _moved(firsts),
        engine.peak_host_bytes,
    )


def weight_bytes(plan: Plan) -> int:
    """The least bytes of weights that a decode pass reads from RAM.

    Units at home on a device do not count. An embedding that is no head does not count: a pass reads one row of it. Of
    experts only those of one token count, for all tokens may want the same ones."""
    spec, parts = plan.target.spec, plan.parts
    units = [unit for unit in plan.units if unit.home != GPU.executor and parts[unit.part].kind != "experts"]
    dense_bytes = sum(plan.unit_bytes(unit) for unit in units if unit.part != gathered_key(spec))
    experts = [part for part in parts.values() if part.kind == "experts"]
    return dense_bytes + sum(spec.layers[part.layer].active * part.least_bytes for part in experts)


def _lengths(engine: Engine, ask: Ask, wanted: WantedRun) -> Ask:
    """The ask with the lengths to run. Warms up first, for the first passes are slower; the time of a pass then tells
    how many there is time for. Raises BadRequest where the context is too small, or a single token is asked for."""
    plan = engine.plan
    room = plan.context // 2
    prompt = min(wanted.prompt_tokens or min(ask.prompt_tokens, max(1, room)), plan.context)
    tokens = wanted.output_tokens or ask.output_tokens
    if (wanted.prompt_tokens or 1) + (wanted.output_tokens or 2) - 1 > plan.context:
        raise BadRequest(f"prompt and output are more than the context of {plan.context} tokens holds: raise --context")
    tokens = min(tokens, plan.context - prompt + 1)
    if tokens < 2:
        raise BadRequest("decoding cannot be measured with a single token: --output-tokens should be 2 or more")
    warm = SamplingParams(max_tokens=min(_WARM_TOKENS, tokens), temperature=0.0, ignore_eos=True)
    (warmed_up, *_) = engine.generate(_prompts(engine, min(_WARM_PROMPT, prompt), ask.batch, -1), warm)
    pass_s = min(warmed_up.inter_token_s)
    repeat_s = wanted.seconds / wanted.repeats
    slower = pass_s * engine.prediction.decode_tokens_per_s / ask.batch  # than predicted, by this factor
    ttft_s = slower * engine.prediction.ttft_s * prompt / ask.prompt_tokens
    if wanted.prompt_tokens is None and ttft_s > repeat_s / 2:
        prompt = max(min(_LEAST_PROMPT, prompt), int(prompt * repeat_s / 2 / ttft_s))
    if wanted.output_tokens is None:
        tokens = min(tokens, max(_LEAST_TOKENS, int((repeat_s - min(ttft_s, repeat_s / 2)) / pass_s)))
    return replace(ask, prompt_tokens=prompt, output_tokens=tokens)


def _prompts(engine: Engine, tokens: int, batch: int, repeat: int) -> list[list[int]]:
    """Random ids below the vocabulary, different ones for each sequence and each repeat."""
    vocab = engine.plan.target.spec.vocab
    return [np.random.default_rng((repeat + 1, seq)).integers(0, vocab, tokens).tolist() for seq in range(batch)]


def _streams(plan: Plan) -> bool:
    """Whether anything of the plan lies on a disk or crosses a link."""
    homes = {*(unit.home for unit in plan.units), *(kv.home for kv in plan.kv)}
    return not homes <= {HOST, plan.main}


def _moved(answers: list[Generation]) -> dict[str, int]:
    """Bytes moved by all answers together, by lane."""
    total: dict[str, int] = {}
    for answer in answers:
        for lane, nbytes in answer.bytes_moved.items():
            total[lane] = total.get(lane, 0) + nbytes
    return total
