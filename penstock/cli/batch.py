"""`penstock batch`: answers a file of requests, overnight if need be, and goes on where it was interrupted."""

from __future__ import annotations

import importlib.util
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from penstock.cli.loading import loaded, packed_model
from penstock.cli.options import (
    MODEL_HELP,
    CacheLimit,
    Json,
    Machine,
    PlanFile,
    Weights,
    Workload,
    as_path,
    file_to_write,
    flag,
    given_plan,
)
from penstock.cli.output import note, print_json, progress
from penstock.errors import BadRequest
from penstock.spec.ask import DEFAULT_SCORE_ROWS, MOST_SEQUENCES, value_share
from penstock.spec.places import is_disk
from penstock.units import MIB, format_left, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.runtime.host import Progress
    from penstock.serve.batch.answering import Done
    from penstock.serve.batch.journal import Journal
    from penstock.serve.batch.lines import Lines
    from penstock.serve.batch.nodes import NodeWork
    from penstock.serve.batch.survey import Survey
    from penstock.serve.engine import Engine
    from penstock.serve.loading import Loading
    from penstock.spec.ask import Ask

_LIBRARY_BYTES = 32 * MIB  # pydantic, which reads requests, and prompts that wait (`answering`)


@dataclass(frozen=True)
class BatchWorkload(Workload):
    """What the plan is for: as many answers at once as pays."""

    batch: int = flag("--batch", "N", "Answers at once, at most; default as many as pays.", MOST_SEQUENCES, min=1)
    objective: str = flag("--objective", "NAME", "latency or throughput.", "throughput")


def batch(
    requests: Annotated[
        str, Argument(metavar="IN", help="Requests, one JSON object a line, as OpenAI's batch API takes them.")
    ],
    answers: Annotated[
        str, Argument(metavar="OUT", help="Answers, a line each as they come. One that was begun is gone on with.")
    ],
    machine: Machine,
    work: BatchWorkload,
    model: Annotated[
        str,
        Option("--model", metavar="MODEL", help=f"{MODEL_HELP}."),
    ],
    name: Annotated[
        str | None, Option("--name", metavar="NAME", help="What lines call the model; default as --model does.")
    ] = None,
    max_tokens: Annotated[
        int, Option("--max-tokens", metavar="N", min=1, help="Longest answer to lines that name no length.")
    ] = 512,
    weights: Weights = None,
    plan_file: PlanFile = None,
    cache_limit: CacheLimit = None,
    nodes: Annotated[
        int | None,
        Option("--nodes", metavar="N", min=1, help="Over a Ray cluster: so many engines, one a node (extra: ray)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Answers a file of requests, as many at once as give the most tokens a second.

    Lines are chats, completions and embeddings (/v1/chat/completions, /v1/completions, /v1/embeddings) with all that
    the server takes. A line that cannot be answered gets an error line. OUT is written as answers come, in any order;
    custom_id says which is which.
    After an interruption the same command goes on where it was: nothing is answered twice, and nothing is lost.
    """
    if importlib.util.find_spec("pydantic") is None:
        raise BadRequest("requests are read with pydantic: pip install 'penstock[serve]'")
    machine.prepare()
    if nodes is not None and plan_file is not None:
        raise BadRequest("--nodes plans on each node by its own figures: it goes without --plan")
    if nodes is not None and importlib.util.find_spec("ray") is None:
        raise BadRequest("--nodes takes Ray: pip install 'penstock[ray]'")
    plan = given_plan(plan_file, machine, work)
    work.ask(machine)  # raises for wrong flags before a first use packs for minutes
    out = file_to_write(answers, "OUT")
    source = packed_model(model, weights, machine, cache_limit, chat=True)
    from penstock.serve.batch.answering import BatchRun
    from penstock.serve.batch.foretelling import foretell
    from penstock.serve.batch.journal import Journal
    from penstock.serve.batch.lines import Lines
    from penstock.serve.batch.nodes import NodeWork
    from penstock.serve.batch.sizing import best_ask
    from penstock.serve.batch.survey import survey
    from penstock.serve.planning import describe
    from penstock.serve.tokenizer import Tokenizer
    from penstock.store.predictors import model_sha256

    spec, _ = describe(source.folder, verify=not machine.no_verify)
    context = min(work.named_context or spec.max_positions, spec.max_positions)
    if plan is not None:
        context = min(context, plan.context)
    names = tuple(dict.fromkeys(map(_utf8, (name, model) if name else (model, Path(model).name))))
    kv = [home.format.name for home in plan.kv] if plan is not None else work.kv
    sparsity = plan.sparsity if plan is not None else work.sparsity
    share = plan.value_share if plan is not None else value_share(work.attention)
    asked_of = [model_sha256(source.folder), names[0], context, max_tokens, kv, sparsity, machine.exact, machine.device]
    asked_of += [share] if share < 1 else []  # a file that was begun without it is gone on with
    with (
        closing(Lines(as_path(requests), repr(asked_of))) as lines,
        closing(Journal(out, lines)) as journal,
        closing(Tokenizer.open(source.folder, machine.host_memory_bytes, not machine.no_verify)) as tokenizer,
    ):
        before = len(journal.done)
        if before:
            note(f"{before} of {len(lines)} lines were answered before")
        with progress() as tell:
            surveyed = survey(lines, journal, names, tokenizer, max_tokens, context, tell)
        if refused := len(journal.done) - before:
            note(f"{refused} lines cannot be answered: OUT says why")
        if not surveyed.todo:
            note(f"all {len(lines)} lines are done")
            if as_json:
                print_json(_counts(None, refused, before, len(lines)))
            return
        ask = _ask(work, machine, surveyed, context)
        if nodes is not None:
            how = replace(_loading(machine, _beside(surveyed, lines, tokenizer), 0), cache=machine.named_cache)
            where = str(Path(model).absolute()) if Path(model).exists() else model
            sha256 = model_sha256(source.folder)
            there = NodeWork(where, weights, sha256, ask, how, names, max_tokens, -(-surveyed.answers // nodes))
            _over_nodes(there, lines, journal, surveyed, nodes, (refused, before), as_json)
            return
        beside: dict[str, Any] = {"tokenizer": tokenizer, **_beside(surveyed, lines, tokenizer)}
        if plan is None:
            with progress() as tell:
                ask = best_ask(ask, surveyed, source.folder, _loading(machine, beside, source.beside_bytes), tell)
        with loaded(source, ask, machine, plan, **beside) as engine:
            places = engine.plan.at_once(ask.batch, ask.prompt_tokens + ask.output_tokens)
            with progress() as tell:
                foretold = foretell(engine.plan, engine.prediction, ask, engine.machine, surveyed.todo, tell)
            takes = format_seconds(foretold.seconds)
            note(f"{surveyed.answers} answers, {places} at once, are predicted to take {takes}")
            try:
                with progress() as tell:
                    shown = _ShownBatch(tell, surveyed.answers)
                    done = BatchRun(engine, lines, journal, names, max_tokens, foretold, shown.tell).run(surveyed)
            except KeyboardInterrupt:
                _say_left(lines, journal)
                raise
            _report(engine, done, refused, before, places, len(lines), as_json)


def _over_nodes(
    there: NodeWork, lines: Lines, journal: Journal, surveyed: Survey, nodes: int, earlier: tuple[int, int],
    as_json: bool,
) -> None:  # fmt: skip
    """Answers by engines on several machines, and prints the result. `earlier`: how many lines were refused, and how
    many were done before."""
    from penstock.serve.batch.nodes import Told, answer

    told, start_s = Told(), time.perf_counter()
    with progress() as tell:

        def hear(counts: dict[str, Any]) -> None:
            told.add(counts)
            rate = told.tokens.output / (time.perf_counter() - start_s)
            tell(f"{rate:.3g} tok/s; answers", told.answers, surveyed.answers)

        try:
            answer(there, lines, journal, surveyed, nodes, hear)
        except KeyboardInterrupt:
            _say_left(lines, journal)
            raise
    seconds = time.perf_counter() - start_s
    rate = told.tokens.output / seconds
    if not as_json:
        note(f"{told.answers} answers, {told.tokens.output} tokens in {format_seconds(seconds)}: {rate:.3g} tok/s")
        return
    refused, before = earlier
    print_json(
        _counts(None, refused + told.failed, before, len(lines))
        | {
            "prompts": told.lines, "answers": told.answers, "prompt_tokens": told.tokens.prompt,
            "cached_tokens": told.tokens.cached, "output_tokens": told.tokens.output, "seconds": seconds,
            "generation_tokens_per_s": rate, "decode_tokens_per_s": nodes * told.decode_tokens_per_s,
            "bytes_moved": told.bytes_moved, "peak_host_bytes": told.peak_host_bytes,
            "peak_device_bytes": told.peak_device_bytes,
        }
    )  # fmt: skip


def _say_left(lines: Lines, journal: Journal) -> None:
    note(f"{len(lines) - len(journal.done)} of {len(lines)} lines are left: the same command goes on with them")


def _ask(work: BatchWorkload, machine: Machine, surveyed: Survey, context: int) -> Ask:
    """The ask for answers of average length, which share KV pages as each grows. More context than the longest of them
    needs is of no use, so with `--context -1` it does not grow either."""
    from penstock.serve.batch.sizing import of_size

    ask = work.ask(machine, surveyed.prompt_tokens, surveyed.output_tokens)
    scored = DEFAULT_SCORE_ROWS if surveyed.scores else 0
    ask = replace(ask, context=min(context, surveyed.longest), grow_context=False, score_rows=scored)
    return of_size(ask, min(work.batch, surveyed.answers, MOST_SEQUENCES))


def _loading(machine: Machine, beside: dict[str, Any], more_bytes: int) -> Loading:
    """How the model is loaded. `more_bytes`: memory that the process takes beyond `beside`."""
    from penstock.serve.loading import Loading

    how: dict[str, Any] = {"threads": machine.threads, "exact": machine.exact, "verify": not machine.no_verify}
    how["kernels"] = machine.isa
    beside = {**beside, "beside_bytes": beside["beside_bytes"] + more_bytes}
    return Loading(device=machine.device, cache=machine.cache_folder, **how, **beside)


def _utf8(name: str) -> str:
    """A model's name for answers. Bytes of it that are no UTF-8 are replaced."""
    return name.encode(errors="replace").decode()


def _beside(surveyed: Survey, lines: Lines, tokenizer: Any) -> dict[str, int]:
    """Memory that the process takes beside the model."""
    from penstock.serve.batch.lines import LINE_BYTES
    from penstock.serve.guides import guide_bytes, has_guides

    guide = guide_bytes(tokenizer.size) if surveyed.schemas and has_guides() else 0
    return {"beside_bytes": _LIBRARY_BYTES + LINE_BYTES * len(lines) + guide, "guide_bytes": guide}


class _ShownBatch:
    """Shows how far a batch is. `answers`: of the whole."""

    def __init__(self, tell: Progress, answers: int) -> None:
        self._tell, self._answers = tell, answers

    def tell(self, done: Done) -> None:
        parts = ["answers", f"{done.generation_tokens_per_s:.3g} tok/s"]
        moved = sum(count for lane, count in done.bytes_moved.items() if is_disk(lane))
        if moved and done.seconds:
            parts.append(f"disk {format_rate(moved / done.seconds)}")
        left_s = done.foretold.left_s(done.answers)
        at_pace_s = done.foretold.left_at_pace_s(done.answers, done.seconds)
        promised = f"promised {format_left(left_s)}"
        parts.append(promised if at_pace_s is None else f"{format_left(at_pace_s)} left ({promised})")
        self._tell(", ".join(parts), done.answers, self._answers)


def _report(engine: Engine, done: Done, refused: int, before: int, places: int, lines: int, as_json: bool) -> None:
    plan = engine.plan
    if not as_json:
        note(
            f"{done.answers} answers, {done.tokens.output} tokens in {format_seconds(done.seconds)} (predicted"
            f" {format_seconds(done.foretold.seconds)}): {done.generation_tokens_per_s:.3g} tok/s, decoding"
            f" {done.decode_tokens_per_s:.3g}; {done.tokens.cached} of {done.tokens.prompt} prompt tokens were read"
            " once for several"
        )
        return
    print_json(
        _counts(done, refused, before, lines)
        | {
            "predicted": {
                "seconds": done.foretold.seconds,
                "ttft_s": done.foretold.ttft_s,
                "decode_tokens_per_s": engine.prediction.decode_tokens_per_s,
            },
            "block": {"answers": places, "batch_seqs": plan.batch_seqs, "batches_per_pass": plan.batches_per_pass},
            "peak_host_bytes": engine.peak_host_bytes,
            "peak_device_bytes": engine.session.peak_device_bytes,
        }
    )


def _counts(done: Done | None, refused: int, before: int, lines: int) -> dict[str, Any]:
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
