"""Answers one prompt several times, for `run --batch`: through the scheduler that a server's clients share, so that the
prompt is read once, with the figures of the whole batch beside what is predicted for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import cached_property

from penstock.planner.predict import Prediction, with_prompts
from penstock.serve.answering import checked_ids
from penstock.serve.decode_clock import DecodeClock
from penstock.serve.engine import Engine
from penstock.serve.foretold import first_passes
from penstock.serve.generation import Generation
from penstock.serve.planning import routers_of
from penstock.serve.sampling import SamplingParams
from penstock.serve.service import Service


class Together:
    """`count` answers to a prompt, by one engine. Raises BadRequest for a prompt that is no ids of this model, or does
    not fit the context.

    `batch`: how many of them the plan has room for at once; `reads`: the passes until these have their first tokens.
    The others begin as these end. The plan is one for `count` prompts. So it is predicted for them too, and
    `prediction` is what becomes of that where the prompt is read once."""

    def __init__(self, engine: Engine, prompt: Sequence[int], params: SamplingParams, count: int) -> None:
        self._engine, self._prompts, self._params = engine, [prompt] * count, params
        ids = checked_ids(prompt, engine.plan)
        self.batch = engine.plan.at_once(count, len(ids) + params.max_tokens)
        self.reads = first_passes(engine.plan, ids, self.batch, params.max_tokens)

    @property
    def read_tokens(self) -> int:
        """How many tokens of prompts the passes in `reads` have."""
        return sum(batch.total_rows for p in self.reads for batch in p.batches if p.purpose != "decode")

    @cached_property
    def prediction(self) -> Prediction:
        engine, packed = self._engine, self._engine.packed
        trace = routers_of(packed.folder, packed.spec, engine.plan.sparsity)
        return with_prompts(engine.prediction, self.reads, engine.plan, engine.machine, trace)

    def answers(self) -> list[Generation]:
        """The answers. Passes run in the caller's thread. Raises as `Engine.generate`."""
        engine, session = self._engine, self._engine.session
        before = session.bytes_moved()
        clock = DecodeClock(session)
        with closing(Service.of_whole_answers(engine, threaded=False, on_pass=clock.hear)) as service:
            answers = service.generate(self._prompts, [self._params.nth(i) for i in range(len(self._prompts))])
        session.drain()
        moved: dict[str, int] = {lane: now - before.get(lane, 0) for lane, now in session.bytes_moved().items()}
        ttft_s = max(answer.ttft_s for answer in answers[: self.batch])
        for answer in answers:
            answer.batch, answer.batch_ttft_s, answer.bytes_moved = self.batch, ttft_s, moved
            answer.decode_s, answer.decode_tokens = clock.seconds, clock.tokens
            answer.decode_steps, answer.decode_disk_bytes = clock.passes, clock.disk_bytes
            answer.peak_host_bytes = session.peak_host_bytes + engine.tokenizer.peak_bytes
            answer.peak_device_bytes = session.peak_device_bytes
        engine.last = answers[-1]
        return answers

    def keep(self, answers: Sequence[Generation]) -> None:
        """Keeps the speed of this run beside its prediction (`Engine.keep`)."""
        self._engine.keep(answers[0], self.prediction, self.reads)
