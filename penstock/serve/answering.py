"""Turns prompts into answers: passes over the prompts first, then passes of one token of each live sequence."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest
from penstock.graph import passes
from penstock.graph.batch import Batch
from penstock.serve.generation import Generation
from penstock.serve.sampling import Sampler, SamplingParams
from penstock.serve.session import Session
from penstock.serve.tokenizer import StopStrings, Tokenizer
from penstock.spec.plan import Plan


def checked_ids(token_ids: Sequence[int], plan: Plan) -> NDArray[np.int32]:
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
    as it is certain, and not only at the end. `answers`: whole when `pieces` has ended."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        prompts: list[NDArray[np.int32]],
        params: SamplingParams,
        streams: bool,
    ) -> None:
        self._session, self._tokenizer, self._prompts, self._params = session, tokenizer, prompts, params
        self.answers = [Generation(len(p), len(prompts), session.plan.context) for p in prompts]
        self._samplers = [Sampler(params, p.tolist()) for p in prompts]
        self._eos = frozenset() if params.ignore_eos else tokenizer.eos_ids
        # To make text of each token takes 70 µs, and a batch has many tokens. So text is made at the end where nobody
        # wants it before.
        self._streams = [tokenizer.stream(whole=not streams and not params.stop) for _ in prompts]
        self._stops = [StopStrings(params.stop) for _ in prompts]
        # How many tokens each answer may have. The last one needs no room: it is not fed back.
        self._room = [session.plan.context - len(p) + 1 for p in prompts]

    def pieces(self) -> Iterator[tuple[int, str]]:
        """Runs all passes. Yields (sequence, text) after each token; the text is that which has become certain, often
        none. Raises as `Session.step`, and BrokenModel for logits that are not finite."""
        session = self._session
        start_s, before = time.perf_counter(), session.bytes_moved()
        last_s = [start_s] * len(self._prompts)
        seqs = range(len(self._prompts))
        following = passes.DECODE if any(self._limit(seq) > 1 for seq in seqs) else None
        for p in passes.prompts(session.plan, seqs, [len(ids) for ids in self._prompts], following):
            logits_of_batches = session.step(p, [self._rows(batch) for batch in p.batches])
            for batch, rows, likeliest in zip(p.batches, logits_of_batches, session.best, strict=True):
                for i, seq in enumerate(passes.ended(batch)):
                    piece = self._accept(seq, rows[i], likeliest[i])
                    last_s[seq] = time.perf_counter()
                    self.answers[seq].ttft_s = last_s[seq] - start_s
                    yield seq, piece
        decode_start_s, decode_steps, decode_tokens, decode_bytes = time.perf_counter(), 0, 0, 0
        while alive := [seq for seq, answer in enumerate(self.answers) if not answer.finish_reason]:
            for seq, logits, best in self._decode(alive):
                piece = self._accept(seq, logits, best)
                now_s = time.perf_counter()
                self.answers[seq].inter_token_s.append(now_s - last_s[seq])
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

    def _rows(self, batch: Batch) -> NDArray[np.int32]:
        """Token ids of a chunk of prompts, int32 [T]."""
        spans = zip(batch.seqs, batch.start, batch.rows, strict=True)
        return np.concatenate([self._prompts[seq][start : start + rows] for seq, start, rows in spans])

    def _decode(self, alive: list[int]) -> Iterator[tuple[int, NDArray[np.float32], tuple[float, int]]]:
        """One decode pass. For each live sequence: (sequence, logits float32 [V], (largest logit, its id))."""
        positions = [len(self._prompts[seq]) + len(self.answers[seq].token_ids) - 1 for seq in alive]
        more = any(len(self.answers[seq].token_ids) + 1 < self._limit(seq) for seq in alive)
        session = self._session
        p = passes.decode(session.plan, alive, positions, passes.DECODE if more else None)
        tokens = [np.array([self.answers[seq].token_ids[-1] for seq in batch.seqs], np.int32) for batch in p.batches]
        for batch, logits, best in zip(p.batches, session.step(p, tokens), session.best, strict=True):
            yield from zip(batch.seqs, logits, best, strict=True)

    def _limit(self, seq: int) -> int:
        return min(self._params.max_tokens, self._room[seq])

    def _accept(self, seq: int, logits: NDArray[np.float32], best: tuple[float, int]) -> str:
        """Samples a token from logits float32 [V] and returns the text that it makes certain. End-of-text tokens are
        not part of the text."""
        answer = self.answers[seq]
        token = self._samplers[seq].next(logits, best)
        answer.token_ids.append(token)
        stops, stream = self._stops[seq], self._streams[seq]
        piece = ""
        if token in self._eos:
            answer.finish_reason = "stop"
        else:
            piece = stops.push(stream.push(token))
            if stops.hit is not None:
                answer.finish_reason = "stop"
            elif len(answer.token_ids) >= self._limit(seq):
                answer.finish_reason = "length"
                answer.context_full = self._room[seq] < self._params.max_tokens
        if answer.finish_reason and stops.hit is None:
            piece += stops.push(stream.finish()) + stops.finish()
        answer.text += piece
        return piece
