"""`penstock eval`: measures the perplexity of a text, and what a lossy choice costs against the exact model."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

from typer import Option

from penstock.cli.loading import loaded, packed_model
from penstock.cli.options import CacheLimit, Json, Machine, Model, PlanFile, Weights, Workload, given_plan, read_text
from penstock.cli.output import print_json, progress
from penstock.cli.text_argument import TextFile

if TYPE_CHECKING:
    from penstock.serve.evaluate import Evaluation


def eval_(
    model: Model,
    file: TextFile,
    machine: Machine,
    work: Workload,
    weights: Weights = None,
    against: Annotated[
        str | None,
        Option(
            "--against",
            metavar="MODEL",
            help="Also the KL divergence from this (exact) model, without --kv, predictors and levels.",
        ),
    ] = None,
    plan_file: PlanFile = None,
    cache_limit: CacheLimit = None,
    as_json: Json = False,
) -> None:
    """Perplexity of a text, and what a lossy choice costs.

    The text is cut into windows of 512 tokens; the first token of each is not scored.
    """
    machine.prepare()
    work.refuse_sizes("eval scores")
    text, plan = read_text(file), given_plan(plan_file, machine, work)
    ask = work.ask(machine)  # raises for wrong flags, before a first use packs for minutes
    sparsity = work.sparsity_of(plan)
    from penstock.serve.evaluate import evaluate
    from penstock.serve.windows import in_windows

    verify = not machine.no_verify
    with ExitStack() as stack:
        unpacked = plan is None
        sources = [packed_model(model, weights, machine, cache_limit, False, unpacked, sparsity, plan)]
        stack.callback(sources[0].close)
        if against is not None:
            sources.append(packed_model(against, None, machine, cache_limit, unpacked=True))
            stack.callback(sources[1].close)
            stack.enter_context(sources[1].naming())
            if sources[1].to_write is not None:  # else it was tried before it was packed
                sources[1].open_tokenizer(ask.host_memory_bytes, verify).close()
        ask = in_windows(dataclasses.replace(ask, score=True), *(source.spec(verify) for source in sources))
        if against is not None and ask.host_memory_bytes is not None:
            # Both models are in this process, and the limit is the process's.
            ask = dataclasses.replace(ask, host_memory_bytes=ask.host_memory_bytes // 2)
        stack.enter_context(sources[0].naming())
        tokenizer = sources[0].open_tokenizer(ask.host_memory_bytes, verify)
        engine = stack.enter_context(loaded(sources[0], ask, machine, plan, tokenizer=tokenizer))
        # --kv is one of the lossy choices, and so are predictors, levels and --attention.
        exactly = "auto" if ask.sparsity in ("predict", "threshold") else ask.sparsity
        kept_whole = dataclasses.replace(ask, kv=None, sparsity=exactly, attention="full")
        exact = stack.enter_context(loaded(sources[1], kept_whole, machine)) if against is not None else None
        with progress() as tell:
            scores = evaluate(engine, text, exact, tell)
        _print(scores, as_json)


def _print(scores: Evaluation, as_json: bool) -> None:
    if as_json:
        print_json({name: value for name, value in vars(scores).items() if value is not None})
        return
    print(f"perplexity {scores.perplexity:.4f} over {scores.tokens} tokens", flush=True)
    if scores.kl is not None and scores.agree is not None:
        print(f"KL {scores.kl:.6f} nats a token; the same best token in {scores.agree:.2%}", flush=True)
