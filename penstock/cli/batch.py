"""`penstock batch`: answers a file of requests, overnight if need be, and goes on where it was interrupted."""

from __future__ import annotations

import importlib.util
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from penstock.cli.batch_told import ShownBatch, counts, report, report_of_nodes, say_done
from penstock.cli.flags import flag
from penstock.cli.loading import loaded, loading, packed_model
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
    given_plan,
)
from penstock.cli.output import note, print_json, progress
from penstock.errors import BadRequest
from penstock.spec.ask import DEFAULT_SCORE_ROWS, MOST_SEQUENCES, value_share
from penstock.units import MIB, format_seconds

if TYPE_CHECKING:
    from penstock.serve.batch.journal import Journal
    from penstock.serve.batch.lines import Lines
    from penstock.serve.batch.survey import Survey
    from penstock.serve.source import Source
    from penstock.serve.tokenizer import Tokenizer
    from penstock.spec.ask import Ask
    from penstock.spec.plan import Plan

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
    model: Annotated[str, Option("--model", metavar="MODEL", help=f"{MODEL_HELP}.")],
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
    machine.prepare()
    _require_packages(nodes, plan_file)
    plan = given_plan(plan_file, machine, work)
    work.ask(machine)  # raises for wrong flags before a first use packs for minutes
    out = file_to_write(answers, "OUT")
    sparsity = work.sparsity_of(plan)
    # A plan of a file is for a packed model, and nodes are told its checksum.
    unpacked = plan is None and nodes is None
    with ExitStack() as stack:
        source = packed_model(model, weights, machine, cache_limit, True, unpacked, sparsity, plan)
        stack.callback(source.close)
        terms = _Terms.of(source, work, machine, plan, names=_names(model, name), max_tokens=max_tokens)
        source, lines, journal = _begun(stack, source, as_path(requests), out, terms, machine)
        stack.enter_context(source.naming())
        tokenizer = source.open_tokenizer(machine.host_memory_bytes, not machine.no_verify)
        stack.callback(tokenizer.close)
        job = _Job(source, machine, work, terms, lines, journal, tokenizer, before=len(journal.done))
        surveyed = job.survey()
        if not surveyed.todo:
            note(f"all {len(lines)} lines are done")
            result = counts(None, job.refused(), job.before, len(lines))
        elif nodes is not None:
            result = _over_nodes(job, surveyed, model, weights, nodes, quiet=as_json)
        else:
            result = _here(job, surveyed, plan, quiet=as_json)
        if as_json:
            print_json(result)


def _begun(
    stack: ExitStack, source: Source, requests: Path, out: Path, terms: _Terms, machine: Machine
) -> tuple[Source, Lines, Journal]:
    """Opens the requests and OUT until `stack` ends. Answers that were begun with a packed copy which is gone are gone
    on with when the checkpoint is packed again: only then is it known to be the same. Raises as `opened`."""
    from penstock.serve.batch.begun import model_names, opened
    from penstock.serve.batch.journal import OtherAnswers

    def open_by(one: Source) -> tuple[Lines, Journal]:
        keys = [repr(terms.key(name, machine)) for name in model_names(one)]
        return stack.enter_context(opened(requests, out, keys))

    try:
        return source, *open_by(source)
    except OtherAnswers:
        if source.to_write is None:
            raise
    with progress() as tell:
        source = source.packed(tell)
    stack.callback(source.close)
    return source, *open_by(source)


def _require_packages(nodes: int | None, plan_file: str | None) -> None:
    """Raises BadRequest where a package is missing that the command needs, and for --nodes beside --plan."""
    if importlib.util.find_spec("pydantic") is None:
        raise BadRequest("requests are read with pydantic: pip install 'penstock[serve]'")
    if nodes is not None and plan_file is not None:
        raise BadRequest("--nodes plans on each node by its own figures: it goes without --plan")
    if nodes is not None and importlib.util.find_spec("ray") is None:
        raise BadRequest("--nodes takes Ray: pip install 'penstock[ray]'")


@dataclass(frozen=True)
class _Terms:
    """Everything beside a line that decides its answer.

    names       names by which lines may call the model; answers bear the first one
    context     the most tokens of a sequence
    max_tokens  the most tokens of an answer whose line names no length
    kv          the formats of keys and values: the given plan's, or as asked
    sparsity    the given plan's sparsity, or as asked
    share       the share of positions whose values attention adds up; 1.0 for all
    left_out    a name of the predictors or levels that decide which neurons are left out; "" without any
    """

    names: tuple[str, ...]
    context: int
    max_tokens: int
    kv: list[str] | str | None
    sparsity: str | None
    share: float
    left_out: str

    @classmethod
    def of(
        cls, source: Source, work: BatchWorkload, machine: Machine, plan: Plan | None, *, names: tuple[str, ...],
        max_tokens: int,
    ) -> _Terms:  # fmt: skip
        """A plan that the user gave decides instead of flags."""
        from penstock.serve.batch.what_is_left_out import what_is_left_out

        spec = source.spec(not machine.no_verify)
        most, sparsity = spec.max_positions, work.sparsity_of(plan)
        left_out = what_is_left_out(sparsity, source.folder, spec, plan)
        context = min(work.named_context or most, most)
        if plan is None:
            return cls(names, context, max_tokens, work.kv, sparsity, value_share(work.attention), left_out)
        kv = [home.format.name for home in plan.kv]
        return cls(names, min(context, plan.context), max_tokens, kv, sparsity, plan.value_share, left_out)

    def key(self, model: str, machine: Machine) -> list[Any]:
        """OUT is gone on with only under the same key. `model`: what the model is called there (`model_names`). The
        share stands in the key only below 1, and what is left out only where something is, so that a file goes on that
        was begun before these existed."""
        what = [model, self.names[0], self.context, self.max_tokens, self.kv, self.sparsity]
        what += [machine.exact, machine.device, *([self.share] if self.share < 1 else [])]
        return what + ([self.left_out] if self.left_out else [])


@dataclass(frozen=True)
class _Job:
    """One run of the command, with its files open. `before`: how many lines had an answer when it began."""

    source: Source
    machine: Machine
    work: BatchWorkload
    terms: _Terms
    lines: Lines
    journal: Journal
    tokenizer: Tokenizer
    before: int

    def survey(self) -> Survey:
        """Reads all lines, and writes an error for each that cannot be answered."""
        from penstock.serve.batch.survey import survey

        if self.before:
            note(f"{self.before} of {len(self.lines)} lines were answered before")
        terms = self.terms
        with progress() as tell:
            surveyed = survey(
                self.lines, self.journal, terms.names, self.tokenizer, terms.max_tokens, terms.context, tell
            )
        if refused := self.refused():
            note(f"{refused} lines cannot be answered: OUT says why")
        return surveyed

    def refused(self) -> int:
        """Before the first answer is written: how many lines got an error from the survey."""
        return len(self.journal.done) - self.before

    def ask(self, surveyed: Survey) -> Ask:
        """The ask for answers of average length, which share KV pages as each grows. More context than the longest of
        them needs is of no use, so with `--context -1` it does not grow either."""
        from penstock.serve.batch.sizing import of_size

        ask = self.work.ask(self.machine, surveyed.prompt_tokens, surveyed.output_tokens)
        scored = DEFAULT_SCORE_ROWS if surveyed.scores else 0
        context = min(self.terms.context, surveyed.longest)
        ask = replace(ask, context=context, grow_context=False, score_rows=scored)
        return of_size(ask, min(self.work.batch, surveyed.answers, MOST_SEQUENCES))

    def beside(self, surveyed: Survey) -> dict[str, int]:
        """Memory that the process takes beside the model, in the words of `Loading`."""
        from penstock.serve.batch.lines import LINE_BYTES
        from penstock.serve.guides import guide_bytes, has_guides

        guide = guide_bytes(self.tokenizer.size) if surveyed.schemas and has_guides() else 0
        return {"beside_bytes": _LIBRARY_BYTES + LINE_BYTES * len(self.lines) + guide, "guide_bytes": guide}

    def say_left(self) -> None:
        left, count = len(self.lines) - len(self.journal.done), len(self.lines)
        note(f"{left} of {count} lines are left: the same command goes on with them")


def _here(job: _Job, surveyed: Survey, plan: Plan | None, quiet: bool) -> dict[str, Any]:
    """Answers by one engine on this machine, and says how it went unless `quiet`. Returns the result as JSON."""
    from penstock.serve.batch.answering import BatchRun
    from penstock.serve.batch.foretelling import foretell
    from penstock.serve.batch.sizing import best_ask

    ask, refused = job.ask(surveyed), job.refused()
    beside: dict[str, Any] = {"tokenizer": job.tokenizer, **job.beside(surveyed)}
    if plan is None:
        with_source = {**beside, "beside_bytes": beside["beside_bytes"] + job.source.beside_bytes}
        with progress() as tell:
            ask = best_ask(
                ask, surveyed, job.source.model(not job.machine.no_verify), loading(job.machine, **with_source), tell
            )
    with loaded(job.source, ask, job.machine, plan, **beside, copy="beside") as engine:
        places = engine.plan.at_once(ask.batch, ask.sequence_tokens)
        with progress() as tell:
            foretold = foretell(engine.plan, engine.prediction, ask, engine.machine, surveyed.todo, tell)
        takes = format_seconds(foretold.seconds)
        note(f"{surveyed.answers} answers, {places} at once, are predicted to take {takes}")
        try:
            with progress() as tell:
                shown = ShownBatch(tell, surveyed.answers)
                run = BatchRun(
                    engine, job.lines, job.journal, job.terms.names, job.terms.max_tokens, foretold, shown.tell
                )
                done = run.run(surveyed)
        except KeyboardInterrupt:
            job.say_left()
            raise
        if not quiet:
            say_done(done)
        if engine.writes_copy:
            note("all is answered; what is left of the packed copy is being written, and Ctrl-C ends that")
            engine.end_copy()
        return report(engine, done, places, counts(done, refused, job.before, len(job.lines)))


def _over_nodes(
    job: _Job, surveyed: Survey, model: str, weights: str | None, nodes: int, quiet: bool
) -> dict[str, Any]:
    """Answers by engines on several machines, and says how it went unless `quiet`. Returns the result as JSON."""
    from penstock.planner.explain import rate
    from penstock.serve.batch.nodes import NodeWork, Told, answer
    from penstock.store.predictors import model_sha256

    how = replace(loading(job.machine, **job.beside(surveyed)), cache=job.machine.named_cache)
    where = str(Path(model).absolute()) if Path(model).exists() else model
    work = NodeWork(
        where, weights, model_sha256(job.source.folder), job.terms.left_out, job.ask(surveyed), how, job.terms.names,
        job.terms.max_tokens, -(-surveyed.answers // nodes),
    )  # fmt: skip
    told, start_s, refused = Told(), time.perf_counter(), job.refused()
    with progress() as tell:

        def hear(block: dict[str, Any]) -> None:
            told.add(block)
            speed = rate(told.tokens.output / (time.perf_counter() - start_s))
            tell(f"{speed} tok/s; answers", told.answers, surveyed.answers)

        try:
            answer(work, job.lines, job.journal, surveyed, nodes, hear)
        except KeyboardInterrupt:
            job.say_left()
            raise
    seconds = time.perf_counter() - start_s
    if not quiet:
        speed = rate(told.tokens.output / seconds)
        note(f"{told.answers} answers, {told.tokens.output} tokens in {format_seconds(seconds)}: {speed} tok/s")
    return report_of_nodes(told, nodes, seconds, counts(None, refused + told.failed, job.before, len(job.lines)))


def _names(model: str, name: str | None) -> tuple[str, ...]:
    """Names by which lines may call the model. Bytes of them that are no UTF-8 are replaced, for answers bear them."""
    names = (name, model) if name else (model, Path(model).name)
    return tuple(dict.fromkeys(each.encode(errors="replace").decode() for each in names))
