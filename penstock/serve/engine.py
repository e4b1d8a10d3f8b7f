"""Plans and loads a model, and answers requests with it. `LLM` does the same under the names that people know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest, DamagedModel, PenstockError
from penstock.graph import passes
from penstock.graph.tasks import Pass
from penstock.planner.explain import Band
from penstock.planner.firing import check_sparsity
from penstock.planner.predict import Prediction
from penstock.planner.solve import settle_context
from penstock.runtime.host import Progress
from penstock.serve.answering import Answering, checked_ids
from penstock.serve.copying import CopyWriting
from penstock.serve.generation import Generation
from penstock.serve.guides import Guide, Guides, memory_left
from penstock.serve.history import error_band, note_run
from penstock.serve.kept import common
from penstock.serve.loading import Loading, Planned, plan_here, to_load_unpacked
from penstock.serve.renewal import Renewed, renewed
from penstock.serve.sampling import SamplingParams
from penstock.serve.scores import Scores
from penstock.serve.session import CLOSED, FirstPass, Session
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.turns import Turns
from penstock.spec.ask import Ask
from penstock.spec.places import DISK
from penstock.spec.plan import Plan
from penstock.store.packed import Packed, open_packed
from penstock.store.pooling import of_packed
from penstock.store.predictors import with_predictors
from penstock.store.unpacked import Unpacked
from penstock.store.writer import Fill

if TYPE_CHECKING:
    from penstock.serve.source import Source


class Engine:
    """One model, planned and loaded. `solved`: the plan, its prediction and its reasons. `machine`: the figures that
    the plan was made with. `lately`: the same figures as they were measured, and as runs of the last days showed them.
    `notes`: lines about the device for the user.

    Threads may share it. A call waits until the calls and streams of other threads have ended. A thread that holds an
    open stream gets BadRequest from every other call, until that stream is read to its end, closed or collected.
    """

    def __init__(self, packed: Packed, planned: Planned, session: Session, why: tuple[str, ...] = ()) -> None:
        """`why`: more reasons."""
        self.packed, self.session, self.ask, self.machine = packed, session, planned.ask, planned.chosen.machine
        self.lately = planned.lately
        device = session.device
        reasons = (*planned.solved.reasons, session.kernels, *planned.device_reasons(device), *why)
        self.solved = replace(planned.solved, reasons=reasons)
        self.plan, self.prediction = planned.plan, planned.solved.prediction
        self.notes = planned.notes(device)
        self._trace = planned.trace
        # The machine whose error band this engine's runs count for. None where passes are not computed as predictions
        # assume, for then an error says nothing of the machine.
        self._usual = planned.how.is_usual and device is None
        self._machine_file = planned.machine_file if self._usual else None
        self._turns = Turns()
        self._tokenizer = planned.how.tokenizer
        self._opening_tokenizer = threading.Lock()
        self._guides: Guides | None = None
        self._freed = False
        self._guide_bytes = planned.how.guide_bytes
        self.last: Generation | None = None
        self._source: Source | None = None
        self._copying = threading.Lock()  # held while the packed copy is written
        self._copy: CopyWriting | None = None  # who writes it beside answers
        self.pooling = of_packed(packed.folder)

    @classmethod
    def open(cls, source: Source, ask: Ask, how: Loading, on_progress: Progress | None = None) -> Engine:
        """Loads the model that `serve.source.resolve` found, and holds it until `close`. A copy in the cache that
        loading finds damaged is packed again and loaded. One that a pass finds damaged is packed again when it is next
        opened. A checkpoint without a copy is loaded as it is where its weights stay in RAM, for `write_copy`, also
        where the disk has no room for a copy; else it is packed first. Raises as `load`."""
        how = replace(how, beside_bytes=how.beside_bytes + source.beside_bytes)
        if source.to_write is not None:
            with source.naming():
                engine = cls._load_unpacked(source, source.to_write, ask, how, on_progress)
            if engine is not None:
                return engine
            source = source.packed(on_progress)
        try:
            engine = cls.load(source.folder, ask, how, on_progress)
        except DamagedModel as error:
            source = source.again(error, on_progress)
            engine = cls.load(source.folder, ask, how, on_progress)
        engine._source = source
        engine.session.on_damage = source.mark_damaged
        return engine

    @classmethod
    def load(cls, folder: Path, ask: Ask, how: Loading = Loading(), on_progress: Progress | None = None) -> Engine:
        """Plans, then loads. Raises DoesNotFit before anything is loaded; DamagedModel here and in later passes;
        BadRequest for a given plan that makes no sense or is for another model; StorageFailed, DeviceFailed."""
        packed = open_packed(folder, how.verify)
        if how.sparsity(ask) == "predict":
            check_sparsity(replace(ask, sparsity="predict"), packed.spec, None)  # advises no training where none helps
            packed = with_predictors(packed)
        return cls._loaded(packed, plan_here(ask, packed, how, on_progress), on_progress)

    @classmethod
    def _load_unpacked(
        cls, source: Source, unpacked: Unpacked, ask: Ask, how: Loading, on_progress: Progress | None
    ) -> Engine | None:
        """Loads a checkpoint without a copy. None where that is no way, which `on_progress` is told."""
        planned = plan_here(ask, unpacked.model, how, on_progress)
        within, why_not = to_load_unpacked(planned, unpacked.reading_bytes)
        if within is None:
            if on_progress is not None:
                on_progress(why_not, 0, 0)
            return None
        source.say_writing(on_progress)
        copy = f"none is kept: {unpacked.no_copy}" if unpacked.no_copy else "it is written after that"
        why = (f"weights come from the checkpoint itself, which has no packed copy yet: {copy}",)
        engine = cls._loaded(unpacked.model, within, on_progress, unpacked.fill, why)
        unpacked.forget()
        engine._source = source
        try:
            source.require_unchanged()
        except PenstockError:
            engine.close()
            raise
        return engine

    @classmethod
    def _loaded(
        cls, packed: Packed, planned: Planned, on_progress: Progress | None, fill: Fill | None = None,
        why: tuple[str, ...] = (),
    ) -> Engine:  # fmt: skip
        """Loads what was planned. `fill`: as for `Session`."""
        how, plan = planned.how, planned.plan
        first = first_pass(plan, how.prompt) if how.prompt else None
        device = planned.open_device()
        planned.require_free()
        kv_folder = how.cache_folder if DISK.tier in plan.tier_bytes() else None
        session = Session(
            packed, plan, how, kv_folder=kv_folder, device=device, on_progress=on_progress, first=first, fill=fill
        )
        return cls(packed, planned, session, why)

    @property
    def lacks_copy(self) -> bool:
        """Whether the checkpoint was loaded without a packed copy, and one can be written that was not since."""
        unpacked = None if self._source is None else self._source.to_write
        return unpacked is not None and not unpacked.no_copy

    @property
    def packs_again(self) -> bool:
        """Whether a copy that a pass finds damaged is packed again when the model is next loaded."""
        return self._source is not None and self._source.packs_again

    @property
    def packed_folder(self) -> Path:
        """The folder of the packed model; before a copy of a checkpoint is written, that of its small files."""
        written_to = None if self._source is None else self._source.written_to
        return written_to or self.packed.folder

    def write_copy(self, on_progress: Progress | None = None) -> None:
        """Writes the packed copy of a checkpoint that was loaded without one, out of memory, and holds it as one that
        was found. Does nothing where there is one, or no room for one. Meanwhile others may ask. A call that is broken
        off leaves whole shards, or no copy. Raises StorageFailed; BrokenModel where the checkpoint has changed;
        BadRequest after `close`."""
        with self._copying:
            if self._source is not None and self.lacks_copy:
                self._source = self._source.written(self.session.loaded_granules(), on_progress)

    def begin_copy(self, failed: Callable[[str], None], on_progress: Progress | None = None) -> None:
        """Has a thread do `write_copy`, between passes, until `end_copy` or `close`. `failed`: gets a line where the
        copy cannot be written. Does nothing where there is one."""
        if self.lacks_copy:
            self._copy = CopyWriting(self.write_copy, failed, on_progress)

    @property
    def writes_copy(self) -> bool:
        """Whether a copy that was begun is still being written."""
        return self._copy is not None and self._copy.goes_on

    def end_copy(self, within_s: float | None = None) -> None:
        """Waits, at most so many seconds, until the copy that was begun is written."""
        if self._copy is not None:
            self._copy.wait(within_s)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, opened when it is first wanted. Raises as `Tokenizer.open`, BadRequest after
        `close`."""
        with self._opening_tokenizer:
            if self._freed:  # its process would start again, and nobody would end it
                raise BadRequest(CLOSED)
            if self._tokenizer is None:
                verify = self.packed.sums is not None
                self._tokenizer = Tokenizer.open(self.packed.folder, self.ask.host_memory_bytes, verify)
            return self._tokenizer

    @property
    def guides(self) -> Guides:
        """The child process that holds answers to JSON schemas. It starts with the first such answer. Raises BadRequest
        where llguidance is not installed, and after `close`."""
        tokenizer = self.tokenizer
        with self._opening_tokenizer:
            if self._guides is None:
                vocab, within, planned = self.packed.spec.vocab, self.ask.host_memory_bytes, self._guide_bytes
                self._guides = Guides(tokenizer, vocab, lambda: memory_left(within, planned, tokenizer, vocab))
            return self._guides

    def guide(self, params: SamplingParams) -> Guide | None:
        """The guide that holds one answer to the schema of `params`; None without a schema. Does not wait for the
        child. Raises as `guides`."""
        return None if params.rule is None else self.guides.begin(params.rule)

    @property
    def peak_host_bytes(self) -> int:
        """The most memory that this process and its children have had, less what stands in for a device's."""
        children = sum(child.peak_bytes for child in (self._tokenizer, self._guides) if child is not None)
        return self.session.peak_host_bytes + children

    def close(self) -> None:
        """Frees the model. An answer under way in another thread ends with BadRequest at its next token. A copy that is
        being written is broken off."""
        if self._copy is not None:
            self._copy.break_off()
        self._free()

    def leave(self) -> None:
        """Frees the model when its copy is written, and does not wait for that."""
        if self._copy is not None:
            self._copy.then(self._free)
        else:
            self._free()

    def _free(self) -> None:
        self._freed = True
        self.session.close()
        if self._source is not None:
            self._source.close()
        if self._guides is not None:
            self._guides.close()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits of every position, float32 [T, V]. The ask must have been one with `score`. Raises as `generate`."""
        rows = list(self.score(token_ids))
        return np.concatenate(rows)

    def score(self, token_ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Logits of every position in order, chunk by chunk, float32 [n, V] each. Raises as `generate`."""
        return self._turns.stream(self._scored(checked_ids(token_ids, self.plan)))

    def _scored(self, ids: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
        for p in passes.prefill(self.plan, 0, len(ids), None, score=True):
            batch = p.batches[0]
            chunk = ids[batch.start[0] : batch.start[0] + batch.rows[0]]
            yield self.session.step(p, [chunk])[0].copy()

    def scores(self, token_ids: Sequence[int], count: int = 0) -> Scores:
        """What the model thinks of a text, and `count` of the likeliest tokens at each place, in passes whose
        logits the plan has room for. Raises as `generate`."""
        scores = Scores(checked_ids(token_ids, self.plan), count)
        start = 0
        for logits in self.score(token_ids):
            scores.take(start, logits)
            start += len(logits)
        return scores

    def generate_ids(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        return self.generate([prompt_ids], params)[0].token_ids

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Generation]:
        """Answers prompts, in their order, as many at a time as the plan has sequences. It reads all these prompts
        before it generates a token of each. That is how the plan is predicted, so `bench` can measure prompts and
        decoding apart. Tests take it as an oracle for the scheduler of `serve.service`, through which everybody else
        answers several prompts.

        Raises BadRequest for prompts that are no ids of this model or do not fit the context, and where this thread
        holds an open stream; DamagedModel, StorageFailed and DeviceFailed from passes; BrokenModel for logits that are
        not finite."""
        layout = self.session.lowering.layout  # where sequences share pages, each gets a whole context here
        at_once = min(self.plan.sequences, layout.kv.pages // layout.kv.pages_per_seq)
        answers: list[Generation] = []
        with self._turns.turn():
            for lo in range(0, len(prompts), at_once):
                ids = [checked_ids(prompt, self.plan) for prompt in prompts[lo : lo + at_once]]
                guides = [self.guide(params) for _ in ids]
                run = Answering(self.session, self.tokenizer, ids, params, streams=False, guides=guides)
                for _ in run.pieces():
                    pass
                answers += run.answers
        if answers:
            self.last = answers[-1]
        return answers

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[str]:
        """Pieces of the answer's text as they become certain. `last` is the Generation, which grows with them. The
        prompt goes on from what is left of earlier ones (`holds`). Raises as `generate`."""
        return self._turns.stream(self._streamed(prompt_ids, params))

    def holds(self, prompt_ids: Sequence[int] | NDArray[np.int32]) -> int:
        """How many of a prompt's first tokens need not go through the model in `stream`, because their keys and values
        are left from an earlier prompt. `prompt_ids`: int32 [T]."""
        return common(np.asarray(prompt_ids, np.int32), self.session.held.of(0))

    def _streamed(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[str]:
        ids = checked_ids(prompt_ids, self.plan)
        how: Any = {"starts": [self.holds(ids)], "guides": [self.guide(params)]}
        run = Answering(self.session, self.tokenizer, [ids], params, streams=True, **how)
        self.last = run.answers[0]
        for _, piece in run.pieces():
            if piece:
                yield piece

    def renew(self) -> Renewed | None:
        """The promise by what disk and RAM give now. This takes some 20 ms, up to half a second where weights stream,
        and a few tenths of a second more where the promise differs. None where they cannot be told, or passes are not
        computed as predictions assume."""
        if not self._usual:
            return None
        ask = settle_context(self.ask, self.packed.spec)
        with self._turns.turn():
            return renewed(self.prediction, self.session, ask, self.machine, self._trace)

    def band(self) -> Band:
        """The error band of the prediction, from earlier runs on this machine."""
        if self._machine_file is None:
            return Band()
        return error_band(self._machine_file, self.lately.measured, self.prediction, self.plan, self.ask.batch)

    def held(self) -> AbstractContextManager[None]:
        """Holds the model for the length of a `with` block, in which the caller steps `session` itself. Other calls
        wait. Raises BadRequest where this thread holds an open stream."""
        return self._turns.turn()

    def require_no_stream(self) -> None:
        """Raises BadRequest where this thread holds an open stream: it would wait for itself."""
        self._turns.require_none()

    def keep(self, generation: Generation, foreseen: Prediction | None = None, reads: Sequence[Pass] = ()) -> None:
        """Keeps the predicted and the measured speed of this run, for the error band of later predictions
        (`serve.history`). `foreseen`: its prediction, and `reads` the passes of its prompts, where these are others
        than the plan's. A run that somebody heard all answers of is not kept: it was slower."""
        if self._machine_file is not None and not self.session.hearing.slows:
            prediction = foreseen or self.prediction
            measured = self.lately.measured
            note_run(
                self._machine_file, measured, self.plan, prediction, generation, reads, self.machine, self.packed.folder
            )  # fmt: skip


def first_pass(plan: Plan, prompt: Sequence[int]) -> FirstPass:
    """The first pass of a prompt's answer, and its token ids. Raises BadRequest as `checked_ids`."""
    ids = checked_ids(prompt, plan)
    p = next(passes.prompts(plan, (0,), (len(ids),), None))
    return p, [ids[: p.total_rows]]
