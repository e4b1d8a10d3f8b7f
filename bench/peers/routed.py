"""`python -m bench.peers.routed MODEL`: penstock as a worker of `bench.experts`, planned for a memory limit.

What caches miss is counted beside them: from what routers were heard to say, by a rule of one line.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import Answer, Loaded, followed_ids, limited_arguments, serve, token_ids
from bench.peers.streamed import embedding_row_bytes
from penstock.graph import passes
from penstock.graph.ops import Route
from penstock.graph.tasks import Call
from penstock.planner.routing import RouterTrace
from penstock.planner.shorten import quick
from penstock.runtime import host
from penstock.serve import profiling
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.renewal import shifts
from penstock.spec.ask import Ask
from penstock.spec.model import Layer, Routed
from penstock.spec.places import DISK, HOST
from penstock.store.profile_file import keep

OUTPUT_TOKENS = 32  # that plans are made for
KEPT, SKEW = 0.5, -0.5  # of injected answers: a token keeps each expert so often, else the r-th is drawn by r^SKEW

Experts = tuple[int, ...]  # that a token goes to, upwards


class LeastUsed:
    """What a cache misses that lets the least used go: of a layer whose passes want no more than its slots. A use
    counts half after 64 tokens."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._uses: dict[int, float] = {}
        self._held: set[int] = set()
        self._ahead: set[int] = set()  # experts that a guess has loaded for the coming token

    def guess(self, likely: Experts, most: int) -> None:
        """`likely`: the likeliest expert first. At most so many are loaded."""
        for expert in [expert for expert in likely if expert not in self._held][:most]:
            if self._load(expert, likely):
                self._ahead.add(expert)

    def misses(self, wanted: Experts) -> tuple[int, int]:
        """(experts that were not there before the token came, wrong guesses)."""
        self._uses = {expert: uses * 0.5 ** (1 / 64) for expert, uses in self._uses.items()}
        for expert in wanted:
            self._uses[expert] = self._uses.get(expert, 0.0) + 1
        missing = [expert for expert in wanted if expert not in self._held]
        right = len(self._ahead.intersection(wanted))
        wrong, self._ahead = len(self._ahead) - right, set()
        for expert in missing:
            self._load(expert, wanted)
        return len(missing) + right, wrong

    def _load(self, expert: int, keep: Experts) -> bool:
        if len(self._held) == self._slots:
            may_leave = self._held.difference(keep)
            if not may_leave:
                return False
            self._held.remove(min(may_leave, key=lambda other: (self._uses.get(other, 0.0), other)))
        self._held.add(expert)
        return True


class Local:
    """Answers with locality: the same for the same seed, whatever is computed. They are drawn before they are asked
    for: to draw those of a token takes 11 ms."""

    def __init__(self, layers: Sequence[Layer], seed: int) -> None:
        self._layers, self._rng = layers, np.random.default_rng(seed)
        self._order = [self._rng.permutation(layer.routed.experts) if layer.routed else None for layer in layers]
        self._last: dict[int, set[int]] = {}
        self._drawn: dict[int, deque[list[int]]] = {i: deque() for i, layer in enumerate(layers) if layer.routed}

    def draw(self, tokens: int) -> None:
        """Draws the answers for so many tokens more."""
        for _ in range(tokens):
            for layer, drawn in self._drawn.items():
                drawn.append(self._draw(layer))

    def answer(self, call: Call) -> list[list[int]]:
        """Of a call of one row. Nobody guesses these."""
        assert isinstance(call.operands, Route)
        return [[]] if call.operands.guesses else [self._drawn[call.operands.layer].popleft()]

    def _draw(self, layer: int) -> list[int]:
        routed, order = self._layers[layer].routed, self._order[layer]
        assert routed is not None and order is not None
        chosen = {expert for expert in sorted(self._last.get(layer, ())) if self._rng.random() < KEPT}
        while len(chosen) < routed.active:
            weights = np.arange(1, routed.experts + 1) ** SKEW
            weights[[expert in chosen for expert in order]] = 0
            chosen.add(int(order[self._rng.choice(routed.experts, p=weights / weights.sum())]))
        self._last[layer] = chosen
        return sorted(chosen)


class RoutedModel:
    """One loaded engine, as a user would load it, that follows a text token by token."""

    def __init__(self, folder: Path, ask: Ask, cache: Path) -> None:
        self._folder = folder
        self.ask, self.engine = ask, Engine.load(folder, ask, Loading(cache=cache))
        self.plan, self._session = self.engine.plan, self.engine.session
        self._layers = self.plan.target.spec.layers
        assert all(cache.policy == "lfu" for cache in self.plan.caches)
        self._caches = {cache.layer: LeastUsed(cache.slots) for cache in self.plan.caches}
        self._answers: dict[int, list[Experts]] = {i: [] for i, layer in enumerate(self._layers) if layer.routed}
        self._guesses: dict[int, list[Experts]] = {i: [] for i in self._answers}
        self._said: list[tuple[Call, list[list[int]]]] = []  # that was not counted yet
        self._followed = 0  # tokens
        self._misses: list[int] = []  # by token and layer, since the last command began
        self._wrong = 0  # guesses, since then
        self._local = Local(self._layers, seed=3)

    def facts(self) -> dict[str, Any]:
        plan, predicted = self.plan, self.engine.prediction
        use = predicted.experts
        return {
            "dense_bytes": self._dense_bytes(),
            "expert_bytes": self._expert_bytes,
            "active": self._routed.active,
            "routed_layers": len(self._answers),
            "slots": [cache.slots for cache in plan.caches],
            "policies": sorted({cache.policy for cache in plan.caches}),
            "guesses": max((cache.guesses for cache in plan.caches), default=0),
            "planned_host_bytes": plan.tier_bytes()[HOST],
            "predicted_tokens_per_s": predicted.decode_tokens_per_s,
            "predicted_cold_s": use.cold_s if use else None,
            "predicted_hit_rate": use.hit_rate if use else None,
            "predicted_ttft_s": predicted.ttft_s,
            "reasons": list(self.engine.solved.reasons),
        }

    def follow(self, tokens: int) -> Answer:
        """So many steps along the text that all engines read, on from where the last call ended."""
        return self._along(tokens, nullcontext())

    def follow_local(self, tokens: int) -> Answer:
        """The same with injected answers."""
        self._local.draw(tokens)
        return self._along(tokens, self._session.hearing.answered_by(self._local.answer, every_pass=False))

    def predicted(self, _: int) -> Answer:
        """What is predicted of routers that say what they were heard to say: by the machine's figures, and with what
        disk and RAM gave when the model was loaded."""
        said, guessed = (
            tuple(tuple(of.get(i, ())) for i in range(len(self._layers))) for of in (self._answers, self._guesses)
        )
        trace = RouterTrace(said, "heard", guessed)
        found = quick(self.plan, self.ask, self.engine.machine, trace=trace)
        rate = found.experts.hit_rate if found.experts else 1.0
        machine = self.engine.machine
        for shift in shifts(self._session, machine):
            machine = machine.faster(shift.moves, shift.times)
        today = quick(self.plan, self.ask, machine, trace=trace).decode_tokens_per_s
        return {"tokens_per_s": found.decode_tokens_per_s, "today_tokens_per_s": today, "hit_rate": rate}

    def profile(self, tokens: int) -> Answer:
        """Keeps beside the model what its routers say to other random tokens, as `penstock profile` does."""
        ids = np.random.default_rng(17).integers(0, self.plan.target.spec.vocab, tokens)
        keep(profiling.profile_ids(self.engine, ids.tolist(), "random tokens", ""), self._folder)
        return {"seconds": 0.0}

    def prefill(self, tokens: int) -> Answer:
        """A prompt, to its last row's logits."""
        ids = token_ids(self.plan.target.spec.vocab, tokens)
        before = self._read_bytes()
        start_s = time.perf_counter()
        for p in passes.prefill(self.plan, 0, tokens, None):
            batch = p.batches[0]
            (logits,) = self._session.step(p, [ids[batch.start[0] : batch.start[0] + batch.rows[0]]])
        seconds = time.perf_counter() - start_s
        assert np.isfinite(logits).all()
        self._followed = 0
        read = self._read_bytes() - before
        return {"seconds": seconds, "disk_bytes": read, "peak_host_bytes": host.peak_rss_bytes()}

    def _along(self, tokens: int, answers: AbstractContextManager[None]) -> Answer:
        ids = followed_ids(self.plan.target.spec.vocab, self._followed, tokens)
        positions = range(self._followed, self._followed + tokens)
        self._followed += tokens
        self._misses, self._wrong = [], 0
        steps = [passes.decode(self.plan, (0,), (at,), passes.DECODE) for at in positions]
        before = self._read_bytes()
        with answers, self._session.hearing.answers(self._heard):
            start_s = time.perf_counter()
            for i, p in enumerate(steps):
                (logits,) = self._session.step(p, [ids[i : i + 1]])
            seconds = time.perf_counter() - start_s
        self._count()
        assert np.isfinite(logits).all()
        read, missed = self._read_bytes() - before, sum(self._misses)
        expected = (
            (missed + self._wrong) * self._expert_bytes + tokens * self._streamed_bytes() + self._embedding_bytes(ids)
        )
        wanted = tokens * len(self._answers) * self._routed.active
        by_misses = [self._misses.count(n) for n in range(self._routed.active + 1)]
        return {
            "seconds": seconds,
            "disk_bytes": read,
            "exact": read == expected,
            "missed": missed,
            "wrong_guesses": self._wrong,
            "hit_rate": 1 - missed / wanted,
            "by_misses": by_misses,  # how often a layer of a token missed 0, 1, …
            "peak_host_bytes": host.peak_rss_bytes(),
        }

    def _heard(self, call: Call, said: list[list[int]]) -> None:
        """Notes an answer. It is counted when the clock has stopped."""
        self._said.append((call, said))

    def _count(self) -> None:
        """Counts what the answers since the last time made caches miss."""
        for call, said in self._said:
            assert isinstance(call.operands, Route)
            layer = call.operands.layer
            for row in map(tuple, said):
                if call.operands.guesses:
                    self._guesses[layer].append(row)
                    self._caches[layer].guess(row, call.operands.guesses)
                else:
                    self._answers[layer].append(row)
                    misses, wrong = self._caches[layer].misses(row)
                    self._misses.append(misses)
                    self._wrong += wrong
        self._said.clear()

    def _read_bytes(self) -> int:
        self._session.drain()
        return self._session.bytes_moved()[DISK.reads]

    @property
    def _routed(self) -> Routed:
        return next(layer.routed for layer in self._layers if layer.routed)

    @property
    def _expert_bytes(self) -> int:
        return next(part.least_bytes for part in self.plan.parts.values() if part.kind == "experts")

    def _dense_bytes(self) -> int:
        """What a token reads of memory beside its experts."""
        table = set() if self.plan.target.spec.tied else {"embed"}
        parts = [part for part in self.plan.parts.values() if part.kind != "experts" and part.key not in table]
        return sum(part.granules * part.granule_bytes for part in parts)

    def _streamed_bytes(self) -> int:
        """What each token reads of the disk whatever it asks for."""
        cached = {f"{cache.layer}.experts" for cache in self.plan.caches}
        table = set() if self.plan.target.spec.tied else {"embed"}
        units = [u for u in self.plan.units if u.home == "disk0" and u.part not in cached | table]
        return sum(self.plan.unit_bytes(u) for u in units)

    def _embedding_bytes(self, ids: np.ndarray[Any, np.dtype[np.int32]]) -> int:
        return len(ids) * embedding_row_bytes(self.plan)


def main() -> None:
    parser = limited_arguments(__doc__)
    parser.add_argument("--prompt", type=int, default=1, help="tokens that the plan is made for")
    wanted = parser.parse_args()

    def load() -> Loaded:
        lengths = {"prompt_tokens": wanted.prompt, "output_tokens": OUTPUT_TOKENS, "context": wanted.context}
        ours = RoutedModel(wanted.model, Ask(batch=1, host_memory_bytes=wanted.limit, **lengths), wanted.cache)
        commands = {
            "follow": ours.follow, "follow_local": ours.follow_local, "predicted": ours.predicted,
            "prefill": ours.prefill, "profile": ours.profile,
        }  # fmt: skip
        return ours.facts(), commands

    serve(load)


if __name__ == "__main__":
    main()
