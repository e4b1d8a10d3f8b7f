"""`python -m bench.peers.ours MODEL`: penstock as a worker of `bench.cpu`, everything in memory, token ids in."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import PROMPT_TOKENS, Answer, Loaded, serve, token_ids
from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.ops import Attend
from penstock.graph.tasks import Call, Pass, Task
from penstock.planner.firing import Firing
from penstock.planner.solve import solve
from penstock.runtime import host
from penstock.runtime.arena import Arenas
from penstock.runtime.bind_native import NativeBinding, native
from penstock.serve.planning import firing_of
from penstock.serve.session import Running, Session
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import Capacity, MachineSpec, Rate
from penstock.spec.model import ModelSpec
from penstock.spec.places import CPU, DISK, HOST
from penstock.spec.plan import Plan
from penstock.store.packed import open_packed
from penstock.store.predictors import with_predictors

SEQUENCES = 4
BATCHES = (1, 2, 4, 8, 16, 32)
ATTEND_STEPS = 8  # decode steps timed together: one takes some 20 ms
ATTENDED = ("float16", "int8", "int4")  # formats of the KV cache
MATRIX_OPS = ("qkv", "out", "predict", "ffn", "head")


class Ours:
    """One loaded model. Sequence 0 serves what takes one sequence."""

    def __init__(
        self, folder: Path, threads: int, context: int, sequences: int = SEQUENCES, sparsity: str = "auto",
        isa: str | None = None,
    ) -> None:  # fmt: skip
        self.packed, self.threads, self.isa = open_packed(folder), threads, isa
        if sparsity == "predict":
            self.packed = with_predictors(self.packed)
        half = context // 2
        ask = Ask(batch=sequences, context=context, prompt_tokens=half, output_tokens=half, sparsity=sparsity)
        firing = firing_of(folder, self.packed.spec, sparsity)
        self.plan = resident_plan(ask, self.packed.spec, self.packed.weights, firing)
        self.session = Session(self.packed, self.plan, Running(threads=threads, kernels=isa))
        self._attention: dict[str, Attention] = {}
        self._prompted: dict[int, int] = {}  # sequence → what follows its prompt of `decode`, which its KV still has

    def facts(self) -> dict[str, Any]:
        kv = self.plan.kv[0].format.name
        return {"kernels": self.session.kernels, "kv": kv, "page_tokens": self.plan.page_tokens}

    def prefill(self, tokens: int) -> Answer:
        """A prompt into an empty sequence, to its last row's logits."""
        wanted = list(passes.prefill(self.plan, 0, tokens, None))
        self._prompted.clear()
        ids = token_ids(self.packed.spec.vocab, tokens)
        start_s = time.perf_counter()
        for p in wanted:
            batch = p.batches[0]
            (logits,) = self.session.step(p, [ids[batch.start[0] : batch.start[0] + batch.rows[0]]])
        seconds = time.perf_counter() - start_s
        assert np.isfinite(logits).all()
        return {"seconds": seconds, "flops": sum(c.flops for p in wanted for c in _calls(self.plan, p, MATRIX_OPS))}

    def decode(self, tokens: int, sequences: int = 1) -> Answer:
        """So many steps, each of one token of every sequence, the best token fed back."""
        seqs, vocab = range(sequences), self.packed.spec.vocab
        for seq in (seq for seq in seqs if seq not in self._prompted):
            self._prompted[seq] = self._prompt(seq, token_ids(vocab, PROMPT_TOKENS, seq))
        following = np.array([self._prompted[seq] for seq in seqs], np.int32)
        start_s = time.perf_counter()
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + tokens):
            p = passes.decode(self.plan, seqs, (position,) * sequences, passes.DECODE)
            (logits,) = self.session.step(p, [following])
            following = np.array([token for _, token in self.session.best[0]], np.int32)
        seconds = time.perf_counter() - start_s
        assert np.isfinite(logits).all()
        calls = _calls(self.plan, p, MATRIX_OPS)
        return {
            "seconds": seconds, "bytes": tokens * sum(c.bytes for c in calls),
            "flops": tokens * sum(c.flops for c in calls),
        }  # fmt: skip

    def linear(self, tokens: int) -> Answer:
        """The products with weights of a prompt by themselves, on what the last prompt left in the arenas."""
        self._prompted.clear()
        calls = [c for p in passes.prefill(self.plan, 0, tokens, None) for c in _calls(self.plan, p, MATRIX_OPS)]
        run = [_native_of(self.session).alone(call) for call in calls]
        start_s = time.perf_counter()
        for each in run:
            each()
        return {"seconds": time.perf_counter() - start_s, "flops": sum(call.flops for call in calls)}

    def decode_four(self, tokens: int) -> Answer:
        return self.decode(tokens, SEQUENCES)

    def fired(self, tokens: int, sequences: int = 1) -> Answer:
        """`decode`, with `share`: of the neurons of a ReLU model, how many a step computes, in the mean."""
        shares: list[float] = []
        with self.session.hearing.neurons(lambda _layer, _h, fired: shares.append(float(fired.max(axis=0).mean()))):
            answer = self.decode(tokens, sequences)
        layers = len(self.packed.spec.layers)
        return {**answer, "share": statistics.mean(shares[-tokens * layers :])}

    def predictors(self, steps: int) -> Answer:
        """All predictors of so many steps of one token, by themselves."""
        p = passes.decode(self.plan, (0,), (PROMPT_TOKENS,), None)
        run = [_native_of(self.session).alone(call) for call in _calls(self.plan, p, ("predict",))]
        start_s = time.perf_counter()
        for _ in range(steps):
            for each in run:
                each()
        return {"seconds": time.perf_counter() - start_s}

    def attend(self, tokens: int, kv: str = "float16") -> Answer:
        """Attention alone, of one row over so many positions of a cache of this format, in every layer."""
        if kv not in self._attention or self._attention[kv].tokens != tokens:
            for name in [name for name, each in self._attention.items() if name == kv or each.tokens != tokens]:
                self._attention.pop(name).close()
            self._attention[kv] = Attention(self.packed.spec, self.packed.weights, self.threads, tokens, kv, self.isa)
        return self._attention[kv].measure()

    def _prompt(self, seq: int, ids: np.ndarray[Any, np.dtype[np.int32]]) -> int:
        for p in passes.prefill(self.plan, seq, len(ids), passes.DECODE):
            batch = p.batches[0]
            (logits,) = self.session.step(p, [ids[batch.start[0] : batch.start[0] + batch.rows[0]]])
        return int(logits[0].argmax())


class Attention:
    """The attention of a decode step in a long context, without the prefill of minutes that would fill its cache: the
    calls of a real plan on a cache of random numbers, every layer its own, so that no cache holds what is read. The
    context may be longer than the model's."""

    def __init__(
        self, spec: ModelSpec, weights: Format, threads: int, tokens: int, kv: str, isa: str | None
    ) -> None:  # fmt: skip
        self.tokens = tokens
        spec = replace(spec, max_positions=max(spec.max_positions, tokens))
        plan = resident_plan(Ask(context=tokens, prompt_tokens=tokens - 1, output_tokens=1, kv=kv), spec, weights)
        plan = replace(plan, arenas=tuple(arena for arena in plan.arenas if arena.name != "host.weights"))
        self._arenas = arenas = Arenas(plan)
        self._binding = NativeBinding(plan, arenas, None, native(isa, threads, exact=False))
        calls = _calls(plan, passes.decode(plan, (0,), (tokens - 1,), None), ("attend",))
        nbytes, flops = sum(call.bytes for call in calls), sum(call.flops for call in calls)
        self._task = Task(0, (CPU,), tuple(calls), (), (), nbytes, flops, (), like=0)
        assert plan.kv[0].format.kind == kv
        normals = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
        for i, call in enumerate(calls):
            assert isinstance(call.operands, Attend)
            q, keys, values = call.operands.q, call.operands.keys, call.operands.values
            arenas.view(q).view(np.float32)[...] = normals[: q.nbytes // 4]
            for k, slot in enumerate((keys, values)):
                halves = np.roll(normals, 4096 * (2 * i + k)).astype(np.float16)
                arenas.view(slot).view(np.float16)[...] = np.resize(halves, slot.nbytes // 2)
                if kv != "float16":  # codes, and scales about 1: of those bits no number is infinite
                    arenas.view(slot)[1::2] = 0x3C

    def close(self) -> None:
        self._arenas.close()

    def measure(self) -> Answer:
        self._binding.run(self._task)  # binds it the first time
        start_s = time.perf_counter()
        for _ in range(ATTEND_STEPS):
            self._binding.run(self._task)
        seconds = time.perf_counter() - start_s
        return {"seconds": seconds, "bytes": ATTEND_STEPS * self._task.bytes}


def resident_plan(ask: Ask, spec: ModelSpec, weights: Format, firing: Firing | None = None) -> Plan:
    """The plan of a machine with memory to spare. Its rates choose between plans that stream, so any do here."""
    machine = MachineSpec(
        name="bench",
        tiers=(Capacity(HOST, 1 << 60), Capacity(DISK.tier, 1 << 60)),
        rates=(Rate(CPU, "*", "*", 1e-6, 1e-10), Rate(DISK.reads, "*", "*", 1e-4, 1e-9)),
        threads=host.usable_cpus(),
    )
    plan = solve(ask, spec, weights, machine, firing=firing).plan
    assert all(unit.home == "host" for unit in plan.units)
    return plan


def _native_of(session: Session) -> NativeBinding:
    assert isinstance(session._binding, NativeBinding), session.kernels
    return session._binding


def _calls(plan: Plan, p: Pass, ops: tuple[str, ...]) -> list[Call]:
    """The calls of a pass that are of these ops."""
    return [call for task in Lowering(plan).step(p) for call in task.calls if call.op in ops]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="the most sequences at once")
    parser.add_argument("--sparsity", default="auto")
    parser.add_argument("--isa", help="the family of kernels; default the best")
    wanted = parser.parse_args()

    def load() -> Loaded:
        ours = Ours(wanted.model, wanted.threads, wanted.context, wanted.sequences, wanted.sparsity, wanted.isa)
        commands: dict[str, Callable[[int], Answer]] = {
            "prefill": ours.prefill,
            "linear": ours.linear,
            "decode": ours.decode,
            "decode_four": ours.decode_four,
        }
        for n in (n for n in BATCHES if n <= wanted.sequences):
            commands |= {f"decode_{n}": partial(ours.decode, sequences=n)}
            commands |= {f"fired_{n}": partial(ours.fired, sequences=n)}
        commands |= {f"attend_{kv}": partial(ours.attend, kv=kv) for kv in ATTENDED}
        return ours.facts(), {**commands, "attend": ours.attend, "predictors": ours.predictors}

    serve(load)


if __name__ == "__main__":
    main()
