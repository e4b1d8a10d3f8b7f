"""`python -m tests.at_size.served`: random requests that a service answers together, beside each of them alone.

Models are as wide as real ones (`draws`). Weights stream, KV pages are few, some on a disk, and requests come and go
between passes. So pages are shared, copied, given away, stored, brought back after a restart, or found damaged. Each
answer must be what an engine of its own gives to that request alone: its tokens, text, log probabilities and embedding,
to the bit. Where reads of weights or of KV fail now and then, a request may get one StorageFailed in its place. In the
end every page and sequence is free, and no thread and no file is left.

    --cases N | --minutes M    how much (2 minutes)
    --first N                  begin with this case
    --case N                   this one alone
    --narrow                   hidden states of 64 numbers: many more cases a minute

The last line is one JSON object; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import BadRequest, StorageFailed
from penstock.graph.arenas import Layout, with_arenas
from penstock.graph.guests import may_have_guests
from penstock.serve.engine import Engine
from penstock.serve.generation import Generation
from penstock.serve.kv_store import KvStore, store_key
from penstock.serve.loading import Loading
from penstock.serve.service import Service
from penstock.serve.steps import Step
from penstock.serve.told import AnswerPiece, Cancelled, Ended, Failed, Told
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.parts import parts
from penstock.store.packed import read_config
from penstock.store.synth import synth
from tests.at_size.draws import Case
from tests.at_size.requests import Request, requests
from tests.at_size.running import main
from tests.cpu.commands import MACHINE

MOST_BYTES = 400 << 20  # of a case's weights, so that a case takes seconds
_WAIT_S = 600.0
_FAULTS: tuple[dict[str, int], ...] = ({"error": errno.EIO}, {"most_bytes": 0}, {"most_bytes": 100})


@dataclass(frozen=True)
class Setting:
    """How a case is served, beside what `Case` says."""

    context: int
    prompt_rows: int
    stored_pages: int | None  # None: nothing is stored
    swaps: bool
    guests: bool
    sequences: int
    two_batches: bool  # of half as many sequences each
    pages: float  # of the room for all contexts, at least one of them
    damages: bool  # some stored pages are damaged before the second round
    guided: bool
    sparsity: str
    faults: float  # of passes, after which a read fails


def setting(rng: random.Random, case: Case) -> Setting:
    relu = case.config["model_type"] == "opt" or "relu" in case.shape
    stores, two = rng.random() < 0.6, rng.random() < 0.4
    return Setting(
        context=rng.choice((40, 150, 257, 384)),
        prompt_rows=rng.choice((1, 7, 32, 64, 100, 1000)),
        stored_pages=rng.choice((1, 3, 1000)) if stores else None,
        swaps=stores and rng.random() < 0.7,
        guests=rng.random() < 0.5,
        sequences=case.batch + (two and case.batch % 2),
        two_batches=two,
        pages=rng.choice((0.0, 0.0, 0.3, 0.6, 1.0)),
        damages=stores and rng.random() < 0.3,
        guided=rng.random() < 0.3,
        sparsity=rng.choice(("off", "exact", "exact")) if relu else "auto",
        # Drawn apart, so that all else is drawn as before there were faults.
        faults=random.Random(f"faults of {case.number}").choice((0.0, 0.0, 0.05, 0.3)),
    )


def differences(case: Case, folder: Path) -> list[str]:
    """What is not the same. Raises one of `running.LEFT_OUT` where the case cannot run."""
    rng = random.Random(case.number)
    how = setting(rng, case)
    config = folder / "config.json"
    config.write_text(json.dumps(case.config))
    weights = parse_format(case.weights)
    _, spec = read_config(config)
    if (nbytes := sum(part.granules * part.granule_bytes for part in parts(spec, weights))) > MOST_BYTES:
        raise BadRequest(f"{nbytes} bytes of weights are more than a case should have")
    packed = synth(config, folder / "packed", weights, seed=case.number)
    weight_bytes = sum(file.stat().st_size for file in packed.glob("*.safetensors"))
    before = _open_files(), set(threading.enumerate())
    found = _compared(case, how, rng, packed, folder, weight_bytes)
    for thread in set(threading.enumerate()) - before[1]:
        thread.join(5)
    if left := set(threading.enumerate()) - before[1]:
        found.append(f"threads are left: {left}")
    if left_files := _open_files() - before[0]:
        found.append(f"files are left open: {left_files}")
    return found


def _open_files() -> set[str]:
    """What files this process has open, those without a name aside."""
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # of the listing itself
            continue
    return {link for link in links if link.startswith("/") and not link.startswith("/dev/")}


def _compared(case: Case, how: Setting, rng: random.Random, packed: Path, folder: Path, weight_bytes: int) -> list[str]:
    ask = Ask(
        prompt_tokens=min(64, how.context // 2), output_tokens=8, batch=how.sequences, context=how.context, kv=case.kv,
        kv_home=case.kv_home, objective=case.objective, kv_tokens=how.context, score_rows=8, sparsity=how.sparsity,
        resident_bytes=None if case.share == 1 else int(case.share * weight_bytes),
    )  # fmt: skip
    loading = Loading(machine=MACHINE, device="none", kernels=case.isa, exact=case.exact, cache=folder / "cache")
    plain = replace(ask, batch=1, resident_bytes=None, kv_home=None, objective="latency")
    with ExitStack() as opened:
        alone = opened.enter_context(closing(Engine.load(packed, plain, loading)))
        engine = opened.enter_context(closing(_engine(case, how, packed, ask, loading)))
        layout = Layout(engine.plan).kv
        page = engine.plan.page_tokens * layout.page_group
        asked = [requests(rng, rng.randint(2, 14), how.context, page, how.guided) for _ in range(2)]
        asked[1] += [replace(each, comes=rng.randrange(24)) for each in asked[0] if rng.random() < 0.4]
        found, known = list[str](), list[tuple[str, tuple[int, ...]]]()
        for nth, each in enumerate(asked):
            if nth and how.damages:
                _damage(rng, folder / "kept")
            told = _round(engine, how, case, each, folder / "kept", found)
            known += [(one.owner, _all_ids(one, what)) for one, what in zip(each, told, strict=True)]
            for one, what in zip(each, told, strict=True):
                others = [each for each in known if each[1] is not one.ids]
                found += [f"round {nth}: {line}" for line in _judged(alone, one, what, others, how.faults > 0)]
        return found


def _engine(case: Case, how: Setting, packed: Path, ask: Ask, loading: Loading) -> Engine:
    """An engine with as many pages as the setting says, and with guests where it wants them and they can be."""
    with closing(Engine.load(packed, ask, loading)) as first:
        plan = first.plan
    layout = Layout(plan).kv
    group = layout.page_group
    most = plan.batch_seqs * plan.batches_per_pass * layout.pages_per_seq
    pages = max(layout.pages_per_seq, int(how.pages * most) // group * group)
    plan = replace(plan, kv_pages=pages)
    if how.two_batches and plan.batches_per_pass == 1 and plan.batch_seqs % 2 == 0:
        plan = replace(plan, batch_seqs=plan.batch_seqs // 2, batches_per_pass=2)
    if how.guests and may_have_guests(plan) and plan.sparsity == "off":
        plan = replace(plan, guests=True)
    return Engine.load(packed, ask, replace(loading, plan=with_arenas(plan)))


def _damage(rng: random.Random, folder: Path) -> None:
    """Breaks some of the stored pages: a byte, the end, or the whole file."""
    for file in sorted(folder.glob("*/*.kv")):
        if rng.random() < 0.4:
            content = bytearray(file.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            cut = rng.choice((len(content), len(content), rng.randrange(len(content)), 0))
            file.write_bytes(content[:cut])


class _Round:
    """Requests that come and go as passes end."""

    def __init__(self, asked: Sequence[Request], engine: Engine, faults: float) -> None:
        self.asked, self.passes, self._engine = asked, 0, engine
        self._faults, self._rng = faults, random.Random(len(asked))
        self.told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self.heard: list[list[Told]] = [[] for _ in asked]
        self.numbers: dict[int, int] = {}
        self.came: dict[int, int] = {}
        self._left = sorted(range(len(asked)), key=lambda i: asked[i].comes, reverse=True)
        self._lock = threading.Lock()
        self.service: Service | None = None

    def on_pass(self, _: Step) -> None:
        self.passes += 1
        if self._rng.random() < self._faults:
            session = self._engine.session
            readers = list(session.reader._readers.values())
            readers += [session.kv_file._reader] if session.kv_file is not None else []
            how = self._rng.choice(_FAULTS)
            self._rng.choice(readers).inject(self._rng.randint(1, 60), **how, forever=False)
        for i, came in list(self.came.items()):
            at = self.asked[i].leaves_at_pass
            if at is not None and self.passes - came == at:
                self.cancel(i)
        self.come(self.passes)

    def cancel(self, i: int) -> None:
        assert self.service is not None
        self.service.cancel(self.numbers[i])

    def come(self, until: int, least: int = 0) -> None:
        """Submits the requests that come by this pass, and `least` of them whenever they come."""
        assert self.service is not None
        with self._lock:
            while self._left and (self.asked[self._left[-1]].comes <= until or least > 0):
                i, least = self._left.pop(), least - 1
                one = self.asked[i]
                self.came[i] = self.passes
                self.numbers[i] = self.service.submit(
                    one.ids, one.params, lambda what, i=i: self._hear(i, what), one.priority, one.owner
                )
                if one.leaves_at_pass == 0:
                    self.cancel(i)

    def _hear(self, i: int, what: Told) -> None:
        self.heard[i].append(what)
        leaves = self.asked[i].leaves
        if isinstance(what, AnswerPiece) and leaves is not None and len(self.heard[i]) >= leaves:
            self.cancel(i)
        self.told.put(what)

    def wait(self) -> None:
        ended = 0
        while ended < len(self.asked):
            more = bool(self._left)
            try:
                what = self.told.get(timeout=0.2 if more else _WAIT_S)
            except queue.Empty:
                if not more:
                    raise AssertionError(f"nothing was told for {_WAIT_S:.0f} s") from None
                self.come(self.passes, 1)
                continue
            ended += not isinstance(what, AnswerPiece)


def _round(
    engine: Engine, how: Setting, case: Case, asked: Sequence[Request], kept: Path, found: list[str]
) -> list[list[Told]]:
    """What each request is told by a service of its own. What is not free in the end is put into `found`."""
    store = None
    if how.stored_pages is not None:
        page_bytes = engine.session.kv_pages.page_bytes
        key = store_key(engine.plan, engine.packed.sums, case.exact)
        store = KvStore(kept, key, page_bytes, how.stored_pages * (page_bytes + 32))
    this = _Round(asked, engine, how.faults)
    service = Service(
        engine, prompt_rows=how.prompt_rows, queue=1000, store=store, swaps=how.swaps, on_pass=this.on_pass
    )
    with closing(service):
        this.service = service
        this.come(0, 1)
        this.wait()
        if not service.idle(_WAIT_S):
            found.append("requests are left")
        scheduler = service._scheduler
        sequences = engine.plan.batch_seqs * engine.plan.batches_per_pass
        if scheduler.pages.had or service.free_sequences != sequences or scheduler.waiting or scheduler.running:
            found.append(f"{scheduler.pages.had} pages and {sequences - service.free_sequences} sequences are had")
    counts = service.counts
    whole = [sum(isinstance(told[-1], kind) for told in this.heard) for kind in (Ended, Failed, Cancelled)]
    if whole != [counts.answered, counts.failed, counts.cancelled]:
        found.append(f"{counts} of answered, failed, cancelled {whole}")
    return this.heard


def _all_ids(one: Request, told: Sequence[Told]) -> tuple[int, ...]:
    """The ids of a prompt and its answer; of one that was cancelled the answer is not known."""
    return (*one.ids, *(told[-1].answer.token_ids if isinstance(told[-1], Ended) else ()))


def _judged(
    alone: Engine, one: Request, told: Sequence[Told], known: Sequence[tuple[str, tuple[int, ...]]], faults: bool
) -> Iterator[str]:
    """What is wrong about what a request was told. `known`: (owner, ids) of all requests so far and of this round.
    `faults`: whether reads may have failed."""
    last, about = told[-1], f"prompt of {len(one.ids)}, {one.params}"
    if not all(isinstance(each, AnswerPiece) for each in told[:-1]):
        yield f"{about}: told after its end: {[type(each).__name__ for each in told]}"
    with closing(Service.of_whole_answers(alone, threaded=False)) as service:
        try:
            (right,) = service.generate([list(one.ids)], [one.params])  # type: ignore[list-item]
        except BadRequest as error:
            if not (isinstance(last, Failed) and str(last.error) == str(error)) and not one.cancelled:
                yield f"{about}: {last} in place of {error}"
            return
    if isinstance(last, Cancelled) and one.cancelled:
        text = "".join(each.text for each in told[:-1] if isinstance(each, AnswerPiece))
        if not right.text.startswith(text):
            yield f"{about}: {text!r} before it was cancelled, {right.text!r} alone"
        return
    if faults and isinstance(last, Failed) and isinstance(last.error, StorageFailed):
        text = "".join(each.text for each in told[:-1] if isinstance(each, AnswerPiece))
        if not right.text.startswith(text):
            yield f"{about}: {text!r} before a read failed, {right.text!r} alone"
        return
    if not isinstance(last, Ended):
        yield f"{about}: {last}"
        return
    answer = last.answer
    for name, (said, should) in _fields(answer, right).items():
        if said != should:
            yield f"{about}, {answer.cached_tokens} cached: {name} {said}, alone {should}"
    pieces = [each for each in told if isinstance(each, AnswerPiece)]
    if "".join(each.text for each in pieces) != answer.text:
        yield f"{about}: pieces {[each.text for each in pieces]} of {answer.text!r}"
    if [each for piece in pieces for each in piece.likely] != answer.logprobs:
        yield f"{about}: pieces have other log probabilities"
    most = max((_common(one.ids, ids) for owner, ids in known if owner == one.owner), default=0)
    if not 0 <= answer.cached_tokens <= min(most, len(one.ids) - 1):
        yield f"{about}: {answer.cached_tokens} tokens cached of at most {min(most, len(one.ids) - 1)}"


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _fields(answer: Generation, right: Generation) -> dict[str, tuple[Any, Any]]:
    """Name → (as it was answered in company, as alone)."""
    names = ("text", "token_ids", "logprobs", "finish_reason", "stopped_by", "context_full", "prompt_tokens", "context")
    fields = {name: (getattr(answer, name), getattr(right, name)) for name in names}
    scores = [None if each.prompt_scores is None else each.prompt_scores.tokens() for each in (answer, right)]
    embeddings = [None if each.embedding is None else each.embedding.tobytes() for each in (answer, right)]
    return fields | {"prompt_scores": (scores[0], scores[1]), "embedding": (embeddings[0], embeddings[1])}


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", differences))
