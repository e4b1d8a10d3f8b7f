"""Requests to passes: plans, loads, and generates. `LLM` is the same under the names that people know."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest, DamagedModel, DoesNotFit
from penstock.graph import passes
from penstock.graph.check_plan import check_plan
from penstock.graph.tasks import Batch
from penstock.planner.predict import predict
from penstock.planner.solve import Solved, settle_context, solve
from penstock.planner.solve.ours.ram import require_minimum
from penstock.runtime import host
from penstock.runtime.device import Device, uses_device
from penstock.runtime.device.choose import Chosen, choose
from penstock.runtime.probe import load_or_probe, machine_file
from penstock.serve.generation import Generation
from penstock.serve.history import note_run
from penstock.serve.planning import default_cache
from penstock.serve.sampling import Sampler, SamplingParams
from penstock.serve.session import Progress, Session
from penstock.serve.tokenizer import StopStrings, Tokenizer
from penstock.serve.turns import Turns
from penstock.spec.ask import Ask
from penstock.spec.machine import PROCESS_BYTES, MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.plan import DEVICE, Plan
from penstock.store.packed import Packed, open_packed
from penstock.units import MIB, format_bytes, format_mib_up, round_up

if TYPE_CHECKING:
    from penstock.serve.source import Source


class Engine:
    """One model, planned and loaded. `solved` has the plan, what it promises, and the reasons.

    Threads may share it: a call waits until the calls and streams of other threads have ended. The thread that holds
    an open stream gets BadRequest from every other call until that stream is read to its end, closed or collected.
    """

    def __init__(self, packed: Packed, solved: Solved, session: Session) -> None:
        self.packed, self.solved, self.session = packed, solved, session
        self.plan, self.prediction = solved.plan, solved.prediction
        self._turns = Turns()
        self._tokenizer: Tokenizer | None = None
        self._opening_tokenizer = threading.Lock()
        self._limit_bytes: int | None = None  # of the host's memory, if the user has set one
        self._machine_file: Path | None = None  # whose predictions this engine's runs put to the test
        self.last: Generation | None = None
        self.notes: tuple[str, ...] = ()  # what a user should know of the device, a line each
        self.machine: MachineSpec | None = None  # whose figures the plan was made with
        self._source: Source | None = None

    @classmethod
    def open(cls, source: Source, ask: Ask, **how: Any) -> Engine:
        """`load` of what `serve.source.resolve` found, which stays where it is until `close`. A copy in the cache that
        loading finds damaged is packed again and loaded; one that a pass finds damaged, when it is next wanted."""
        try:
            engine = cls.load(source.folder, ask, **how)
        except DamagedModel as error:
            source = source.again(error)
            engine = cls.load(source.folder, ask, **how)
        engine._source = source
        engine.session.on_damage = source.mark_damaged
        return engine

    @classmethod
    def load(
        cls,
        folder: Path,
        ask: Ask,
        *,
        machine: MachineSpec | None = None,
        device: str | Chosen = "auto",
        cache: Path | None = None,
        plan: Plan | None = None,
        threads: int | None = None,
        kernels: str | None = None,
        exact: bool = False,
        serial: bool = False,
        verify: bool = True,
        tokenizer: Tokenizer | None = None,
        on_progress: Progress | None = None,
    ) -> Engine:
        """Plans (or takes `plan`), then loads; `device`: auto, cuda, none, emulated, or chosen already; `threads` to
        `serial` are a Session's; `verify`: every byte is compared with what was packed when it is read first;
        `tokenizer`: the model's, where it is open already. Raises DoesNotFit before anything is loaded, DamagedModel
        here and in later passes, and BadRequest for a `plan` that makes no sense or is for another model."""
        packed = open_packed(folder, verify)
        _check_limit(ask)
        if plan is not None:
            check_plan(plan, packed.spec, packed.weights)
        if plan is None and ask.host_memory_bytes is not None:  # before a probe that takes seconds
            settled = settle_context(ask, packed.spec)
            require_minimum(settled, packed.spec, packed.weights, PROCESS_BYTES, ask.host_memory_bytes)
        kept = None
        if machine is None:
            folder_kept = cache or default_cache()
            machine = load_or_probe(folder_kept, folder_kept, on_progress)
            kept = machine_file(folder_kept)
        chosen = device
        if isinstance(chosen, str):
            chosen = choose(chosen, machine, ask.device_memory_bytes, cache or default_cache(), on_progress)
        machine = chosen.machine
        if plan is not None and uses_device(plan) and chosen.open is None:
            raise BadRequest(f"this plan computes on a device (--device says which); {chosen.reason}")
        if plan is None:
            solved = solve(ask, packed.spec, packed.weights, machine, packed.part_disks)
        else:
            _check_room(plan, ask, machine, packed.spec)
            solved = Solved(plan, predict(plan, settle_context(ask, packed.spec), machine), ("as given",))
        taken = _open_device(chosen, solved.plan, ask)
        # What is emulated lies in the host's memory too.
        _check_free(solved.plan, solved.plan.tier_bytes().get(DEVICE, 0) if chosen.name == "emulated" else 0)
        session = Session(
            packed,
            solved.plan,
            threads=threads,
            kernels=kernels,
            exact=exact,
            serial=serial,
            kv_folder=(cache or default_cache()) if "disk0" in solved.plan.tier_bytes() else None,
            device=taken,
            on_progress=on_progress,
        )
        why = (session.kernels, *([taken.description] if taken else [chosen.reason] if device != "auto" else []))
        engine = cls(packed, replace(solved, reasons=(*solved.reasons, *why)), session)
        engine.notes, engine.machine = _notes(chosen, taken, ask), machine
        engine._tokenizer, engine._limit_bytes = tokenizer, ask.host_memory_bytes
        if kept is not None and threads is None and not exact and kernels is None and not serial and taken is None:
            engine._machine_file = kept
        return engine

    @property
    def tokenizer(self) -> Tokenizer:
        with self._opening_tokenizer:
            if self._tokenizer is None:
                verify = self.packed.sums is not None
                self._tokenizer = Tokenizer.open(self.packed.folder, self._limit_bytes, verify)
            return self._tokenizer

    @property
    def peak_host_bytes(self) -> int:
        """Of this process and the tokenizer's."""
        return self.session.peak_host_bytes + (self._tokenizer.peak_bytes if self._tokenizer else 0)

    def close(self) -> None:
        """Frees the model. An answer under way in another thread ends with BadRequest at its next token."""
        self.session.close()
        if self._source is not None:
            self._source.close()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits of every position, float32 [T, V]. The ask must have been one with `score`."""
        rows = list(self.score(token_ids))
        return np.concatenate(rows)

    def score(self, token_ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Logits chunk by chunk, float32 [n, V] each, all positions in order."""
        return self._turns.stream(self._scored(self._checked(token_ids)))

    def _scored(self, ids: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
        for p in passes.prefill(self.plan, 0, len(ids), None, score=True):
            batch = p.batches[0]
            chunk = ids[batch.start[0] : batch.start[0] + batch.rows[0]]
            yield self.session.step(p, [chunk])[0].copy()

    def generate_ids(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        return self.generate([prompt_ids], params)[0].token_ids

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Generation]:
        """Answers in the order of the prompts, as many at a time as the plan has sequences."""
        at_once = self.plan.batch_seqs * self.plan.batches_per_pass
        answers: list[Generation] = []
        with self._turns.turn():
            for lo in range(0, len(prompts), at_once):
                run = _Run(self, prompts[lo : lo + at_once], params, streams=False)
                for _ in run.pieces():
                    pass
                answers += run.answers
        if answers:
            self.last = answers[-1]
        return answers

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[str]:
        """Pieces of the answer's text as they become certain; afterwards `last` is the whole Generation."""
        return self._turns.stream(self._streamed(prompt_ids, params))

    def _streamed(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[str]:
        run = _Run(self, [prompt_ids], params, streams=True)
        for _, piece in run.pieces():
            if piece:
                yield piece
        self.last = run.answers[0]

    def keep(self, generation: Generation) -> None:
        """Notes predicted beside measured, for the error band of later predictions (`serve.history`)."""
        if self._machine_file is not None:
            assert self.machine is not None, "load sets both"
            note_run(self._machine_file, self.machine, self.plan, self.prediction, generation)

    def _checked(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Ids as int32 [T]. Raises BadRequest for none, unknown ones, or more than the plan's context."""
        if not len(token_ids):
            raise BadRequest("the prompt is empty: it has no tokens")
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise BadRequest("token ids should be a list of whole numbers of 64 bits")
        if ids.min() < 0 or ids.max() >= self.plan.target.spec.vocab:
            bad = int(ids.max() if ids.max() >= self.plan.target.spec.vocab else ids.min())
            raise BadRequest(f"token id {bad} is outside the vocabulary of {self.plan.target.spec.vocab}")
        if len(ids) > self.plan.context:
            most = self.plan.target.spec.max_positions
            way_out = "raise --context" if self.plan.context < most else "more the model does not hold"
            raise BadRequest(f"the prompt has {len(ids)} tokens, the context room for {self.plan.context}: {way_out}")
        return ids.astype(np.int32)


class _Run:
    """A group of sequences that decode together."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, streams: bool) -> None:
        """`streams`: somebody wants each piece of text as soon as it is certain."""
        self._engine, self._params = engine, params
        self._prompts = [engine._checked(prompt) for prompt in prompts]
        self.answers = [Generation(len(p), len(prompts), engine.plan.context) for p in self._prompts]
        self._samplers = [Sampler(params, p.tolist()) for p in self._prompts]
        self._eos = frozenset() if params.ignore_eos else engine.tokenizer.eos_ids
        # A decode for each token is 70 µs, of which a batch has many: it is decoded at its end, where that will do.
        self._streams = [engine.tokenizer.stream(whole=not streams and not params.stop) for _ in prompts]
        self._stops = [StopStrings(params.stop) for _ in prompts]
        # A sequence may fill its context: its last token is then not fed back.
        self._room = [engine.plan.context - len(p) + 1 for p in self._prompts]

    def pieces(self) -> Iterator[tuple[int, str]]:
        """(sequence, text) as text becomes certain."""
        session = self._engine.session
        start_s, before = time.perf_counter(), session.bytes_moved()
        last_s = [start_s] * len(self._prompts)
        seqs = range(len(self._prompts))
        following = passes.DECODE if any(self._limit(seq) > 1 for seq in seqs) else None
        for p in passes.prompts(self._engine.plan, seqs, [len(ids) for ids in self._prompts], following):
            found = session.step(p, [self._rows(batch) for batch in p.batches])
            for batch, rows, likeliest in zip(p.batches, found, session.best, strict=True):
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
            answer.peak_host_bytes = self._engine.peak_host_bytes
            answer.peak_device_bytes = session.peak_device_bytes

    def _rows(self, batch: Batch) -> NDArray[np.int32]:
        """Token ids of a chunk of prompts, int32 [T]."""
        spans = zip(batch.seqs, batch.start, batch.rows, strict=True)
        return np.concatenate([self._prompts[seq][start : start + rows] for seq, start, rows in spans])

    def _decode(self, alive: list[int]) -> Iterator[tuple[int, NDArray[np.float32], tuple[float, int]]]:
        """One token of every live sequence: its logits, and the largest with its id."""
        positions = [len(self._prompts[seq]) + len(self.answers[seq].token_ids) - 1 for seq in alive]
        more = any(len(self.answers[seq].token_ids) + 1 < self._limit(seq) for seq in alive)
        p = passes.decode(self._engine.plan, alive, positions, passes.DECODE if more else None)
        tokens = [np.array([self.answers[seq].token_ids[-1] for seq in batch.seqs], np.int32) for batch in p.batches]
        session = self._engine.session
        for batch, logits, best in zip(p.batches, session.step(p, tokens), session.best, strict=True):
            yield from zip(batch.seqs, logits, best, strict=True)

    def _limit(self, seq: int) -> int:
        return min(self._params.max_tokens, self._room[seq])

    def _accept(self, seq: int, logits: NDArray[np.float32], best: tuple[float, int]) -> str:
        """Samples a token, and says what text it makes certain. End-of-text tokens are not part of the text."""
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


def _check_limit(ask: Ask) -> None:
    """A limit beyond what the machine has would be a promise that the system breaks by killing us."""
    most = host.memory_limit_bytes()
    if ask.host_memory_bytes is not None and ask.host_memory_bytes > most:
        raise BadRequest(
            f"--host-memory {format_bytes(ask.host_memory_bytes)} is more than the {format_bytes(most)} "
            "that this process may have"
        )


def _check_room(plan: Plan, ask: Ask, machine: MachineSpec, spec: ModelSpec) -> None:
    """A given plan keeps the same limit as one that is made here, also where it says little of the process."""
    process = round_up(machine.process_bytes + spec.tokenizer_bytes, MIB)
    need = plan.tier_bytes()["host"] + max(0, process - plan.process_bytes)
    have = machine.tier("host").bytes if ask.host_memory_bytes is None else ask.host_memory_bytes
    if need > have:
        raise DoesNotFit(
            f"host memory of {format_bytes(have)} is too little for this plan: it needs {format_bytes(need)}"
            f" (--host-memory {format_mib_up(need)}, or a plan for less)",
            tier="host",
            need_bytes=need,
            have_bytes=have,
            minimum_bytes=need,
        )


def _open_device(chosen: Chosen, plan: Plan, ask: Ask) -> Device | None:
    """The device, where the plan computes on it: with a cap of what the user said, or of what it has."""
    if not uses_device(plan):
        return None
    assert chosen.open is not None, "a machine without a device has no such plan"
    limit = chosen.machine.tier(DEVICE).bytes
    return chosen.open(limit if ask.device_memory_bytes is None else min(limit, ask.device_memory_bytes))


def _notes(chosen: Chosen, taken: Device | None, ask: Ask) -> tuple[str, ...]:
    if taken is not None:
        return tuple(line for line in (taken.description, taken.note) if line)
    if chosen.open is not None:
        return (f"{chosen.reason}, but is left alone: the CPU by itself is as fast",)
    if ask.device_memory_bytes is not None and chosen.name == "none":
        return (f"--device-memory limits nothing: {chosen.reason}",)
    return ()


def _check_free(plan: Plan, beside_bytes: int = 0) -> None:
    """Memory may have gone to others since the plan was made; arenas are filled at once, and a system that has none
    left kills somebody instead of saying no."""
    need, have = plan.tier_bytes()["host"] + beside_bytes, host.available_bytes()
    if need > have:
        raise DoesNotFit(
            f"the plan takes {format_bytes(need)} of memory, and now only {format_bytes(have)} are free: end what took "
            f"the rest, or plan for less (--host-memory {format_mib_up(have * 9 // 10)})",
            tier="host",
            need_bytes=need,
            have_bytes=have,
            minimum_bytes=need,
        )
