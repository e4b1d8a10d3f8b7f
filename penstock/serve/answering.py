"""Turns prompts into answers: passes over the prompts first, then passes of one token of each live sequence."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest
from penstock.graph import passes
from penstock.graph.batch import Batch
from penstock.graph.tasks import Pass
from penstock.serve.generation import Generation
from penstock.serve.guides import Guide
from penstock.serve.reply import Reply
from penstock.serve.sampling import SamplingParams
from penstock.serve.session import Session
from penstock.serve.tokenizer import Tokenizer
from penstock.spec.plan import Plan


def checked_ids(token_ids: Sequence[int] | NDArray[np.int32], plan: Plan) -> NDArray[np.int32]:
    """Ids as int32 [T]. Raises BadRequest for no ids, ids beyond the vocabulary, and more ids than the plan's
    context."""
    if not len(token_ids):
        raise BadRequest("the prompt is empty: it has no tokens")
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BadRequest("token ids should be a list of whole numbers of 64 bits")
    if ids.min() < 0 or ids.max() >= plan.target.spec.vocab:
        bad = int(ids.max() if ids.max() >= plan.target.spec.vocab else ids.min())
        raise BadRequest(f"token id {bad} is outside the vocabulary of {plan.target.spec.vocab}")
    if len(ids) > plan.context:
        most = plan.target.spec.max_positions
        way_out = "raise --context" if plan.context < most else "more the model does not hold"
        raise BadRequest(f"the prompt has {len(ids)} tokens, the context room for {plan.context}: {way_out}")
    return ids.astype(np.int32)


class Answering:
    """A group of sequences that decode together. `prompts`: int32 [T] each. `streams`: whether text is wanted as soon
    as it is certain, and not only at the end. `starts[i]`: tokens of its prompt that sequence i holds already; () for
    none. `guides[i]`: holds answer i to a JSON schema; () for none. `answers`: whole when `pieces` has ended."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        prompts: list[NDArray[np.int32]],
        params: SamplingParams,
        streams: bool,
        starts: Sequence[int] = (),
        guides: Sequence[Guide | None] = (),
    ) -> None:
        self._session, self._tokenizer, self._starts = session, tokenizer, starts
        self._scores = params.prompt_logprobs is not None
        if self._scores:
            self._starts = ()  # every token goes through the model
        about = {"batch": len(prompts), "context": session.plan.context}
        self._replies = [
            Reply(tokenizer, prompt, params, **about, streams=streams, guide=guide)
            for prompt, guide in zip(prompts, guides or [None] * len(prompts), strict=True)
        ]

    @property
    def answers(self) -> list[Generation]:
        return [reply.answer for reply in self._replies]

    def pieces(self) -> Iterator[tuple[int, str]]:
        """Runs all passes. Yields (sequence, text) after each token; the text is that which has become certain, often
        none. Raises as `Session.step`, and BrokenModel for logits that are not finite."""
        session, replies = self._session, self._replies
        start_s, before = time.perf_counter(), session.bytes_moved()
        last_s = [start_s] * len(replies)
        seqs = range(len(replies))
        for reply, start in zip(replies, self._starts, strict=False):
            reply.answer.cached_tokens = start
        for p in self._prompts():
            logits_of_batches = session.step(p, [self._rows(batch) for batch in p.batches])
            for reply in replies if session.was_ahead else ():
                reply.answer.read_ahead = True
            for batch, rows, likeliest in zip(p.batches, logits_of_batches, session.best, strict=True):
                if self._scores:
                    replies[batch.seqs[0]].hear(batch.start[0], rows)
                    rows, likeliest = rows[-1:], likeliest[-1:]
                for i, seq in enumerate(passes.ended(batch)):
                    if self._scores and batch.start[0] + batch.rows[0] < len(replies[seq].prompt):
                        continue
                    piece = replies[seq].accept(rows[i], likeliest[i])
                    last_s[seq] = time.perf_counter()
                    replies[seq].answer.ttft_s = last_s[seq] - start_s
                    yield seq, piece
        decode_start_s, decode_steps, decode_tokens, decode_bytes = time.perf_counter(), 0, 0, 0
        while alive := [seq for seq in seqs if not replies[seq].finished]:
            for seq, logits, best in self._decode(alive):
                piece = replies[seq].accept(logits, best)
                now_s = time.perf_counter()
                replies[seq].answer.inter_token_s.append(now_s - last_s[seq])
                last_s[seq] = now_s
                yield seq, piece
            decode_steps += 1
            decode_tokens += len(alive)
            decode_bytes += session.consumed_bytes
        decode_s = time.perf_counter() - decode_start_s
        session.drain()
        batch_ttft_s = max(answer.ttft_s for answer in self.answers)
        for answer in self.answers:
            answer.batch_ttft_s = batch_ttft_s
            answer.decode_s, answer.decode_tokens = decode_s if decode_tokens else 0.0, decode_tokens
            answer.decode_steps = decode_steps
            answer.decode_disk_bytes = decode_bytes
            answer.bytes_moved = {lane: now - before.get(lane, 0) for lane, now in session.bytes_moved().items()}
            answer.peak_host_bytes = session.peak_host_bytes + self._tokenizer.peak_bytes
            answer.peak_device_bytes = session.peak_device_bytes

    def _prompts(self) -> Iterator[Pass]:
        """The passes of the prompts: together, or one prompt after the other where all their logits are wanted."""
        following = passes.DECODE if any(reply.limit > 1 for reply in self._replies) else None
        lengths = [len(reply.prompt) for reply in self._replies]
        if not self._scores:
            yield from passes.prompts(self._session.plan, range(len(lengths)), lengths, following, self._starts)
            return
        for seq, length in enumerate(lengths):
            then = following if seq + 1 == len(lengths) else passes.scored(self._session.plan, lengths[seq + 1])
            yield from passes.prefill(self._session.plan, seq, length, then, score=True)

    def _rows(self, batch: Batch) -> NDArray[np.int32]:
        """Token ids of the rows of a batch, int32 [T]."""
        spans = zip(batch.seqs, batch.start, batch.rows, strict=True)
        return np.concatenate([self._replies[seq].rows(start, rows) for seq, start, rows in spans])

    def _decode(self, alive: list[int]) -> Iterator[tuple[int, NDArray[np.float32], tuple[float, int]]]:
        """One decode pass. For each live sequence: (sequence, logits float32 [V], (largest logit, its id))."""
        session = self._session
        more = any(self._replies[seq].wants_more for seq in alive)
        positions = [self._replies[seq].position for seq in alive]
        p = passes.decode(session.plan, alive, positions, passes.DECODE if more else None)
        tokens = [self._rows(batch) for batch in p.batches]
        for batch, logits, best in zip(p.batches, session.step(p, tokens), session.best, strict=True):
            yield from zip(batch.seqs, logits, best, strict=True)
