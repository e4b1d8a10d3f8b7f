"""`python -m bench.policies MODEL TEXT --counts OTHER`: hit rates of every way to keep experts, over what a model's
routers said to a text, and how good guesses one layer ahead are.

Policies, each with so many slots a layer: `lru` and `lfu` are those of penstock, and run here as they do there;
`static` keeps the experts that another text (OTHER) asked for most; `half` keeps half of its slots so and is lru in the
others; `belady` knows the future (Belady 1966), and no policy can do better. A guess is what the next layer's router
says to this layer's state. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.graph import passes
from penstock.graph.cache import ExpertCache
from penstock.graph.ops import Route
from penstock.graph.tasks import Call
from penstock.kernels.reference.experts import Routes, route
from penstock.kernels.reference.matrix import Scratch, vector
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.planning import default_cache
from penstock.spec.ask import Ask
from penstock.store.packed import Packed

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
POLICIES = ("static", "half", "lfu", "lru", "belady")
WINDOW_TOKENS = 512
_SCRATCH_BYTES = 64 << 20

Token = tuple[int, ...]  # the experts that it goes to, upwards
Said = dict[int, list[Token]]  # by layer, in the order of the text


class Heard:
    """What routers say while an engine reads a text, and what the routers before them would have guessed."""

    def __init__(self, engine: Engine) -> None:
        self._engine, spec = engine, engine.plan.target.spec
        self.said: Said = {i: [] for i, layer in enumerate(spec.layers) if layer.routed is not None}
        self.guessed: Said = {i: [] for i in self.said}
        self._weights = {i: _granule(engine.packed, f"{i}.router") for i in self.said}
        self._norms = {i: _norm(engine.packed, i) for i in self.said}
        self._scratch = np.empty(_SCRATCH_BYTES, np.uint8)

    def read(self, text: str, most_tokens: int) -> None:
        """In windows of 512 tokens."""
        engine, plan = self._engine, self._engine.plan
        ids = engine.tokenizer.encode(text)[:most_tokens]
        with engine.session.hearing_routers(self._hear):
            for lo in range(0, len(ids), WINDOW_TOKENS):
                window = ids[lo : lo + WINDOW_TOKENS]
                for p in passes.prefill(plan, 0, len(window), None):
                    start, rows = p.batches[0].start[0], p.batches[0].rows[0]
                    engine.session.step(p, [np.array(window[start : start + rows], np.int32)])

    def _hear(self, call: Call, answer: list[list[int]]) -> None:
        operands = call.operands
        assert isinstance(operands, Route) and call.batch is not None
        layer, rows = operands.layer, call.batch.total_rows
        self.said[layer] += [tuple(token) for token in answer]
        if layer + 1 in self.said:
            d = self._engine.plan.target.spec.d_model
            h = self._engine.session._arenas.array(operands.h, np.float32, (rows, d))
            self.guessed[layer + 1] += self._guess(layer, h)

    def _guess(self, layer: int, h: NDArray[np.float32]) -> list[Token]:
        """Of the layer after this one, for h float32 [T, D], which is normed for this one's router."""
        after = layer + 1
        routed = self._engine.plan.target.spec.layers[after].routed
        assert routed is not None
        t = len(h)
        routes = Routes(
            np.empty((t, routed.active), np.int32), np.empty((t, routed.active), np.float32), np.empty(t, np.float32)
        )
        part = self._engine.packed.parts[f"{after}.router"]
        normed = h * (self._norms[after] / self._norms[layer])
        route(self._weights[after], part, routed, normed, routes, Scratch(self._scratch))
        return [tuple(token) for token in routes.ids.tolist()]


def _granule(packed: Packed, key: str) -> NDArray[np.uint8]:
    """The only granule of a part."""
    file, offset, nbytes = packed.locate(key, 0, 1)
    return np.fromfile(file, np.uint8, nbytes, offset=offset)


def _norm(packed: Packed, layer: int) -> NDArray[np.float32]:
    """float32 [D]: what the norm before the FFN multiplies by."""
    part = packed.parts[f"{layer}.norms"]
    return vector(_granule(packed, part.key), part.block("ffn_in")) + np.float32(packed.spec.norm.offset)


def hits(tokens: Sequence[Token], slots: int, policy: str, wanted_most: Sequence[int]) -> int:
    """Experts that were there when a token asked for them. `wanted_most`: all experts, the most wanted first."""
    if policy == "belady":
        return _belady(tokens, slots)
    kept = set(wanted_most[: {"static": slots, "half": slots // 2}.get(policy, 0)])
    found = sum(expert in kept for token in tokens for expert in token)
    if policy == "static" or len(kept) == slots:
        return found
    cache = ExpertCache(slots - len(kept), "lfu" if policy == "lfu" else "lru")
    for token in tokens:
        others = [expert for expert in token if expert not in kept]
        cache.ask(others)
        missing = [expert for expert in others if cache.slot(expert) is None]
        found += len(others) - len(missing)
        for expert in missing:
            cache.admit(expert, others)
    return found


def _belady(tokens: Sequence[Token], slots: int) -> int:
    """Who is wanted again last leaves first. All experts of a token are wanted at once."""
    coming: list[dict[int, int]] = []  # of each token: expert → the next token that wants it
    last: dict[int, int] = {}
    for i in range(len(tokens) - 1, -1, -1):
        coming.append({expert: last.get(expert, len(tokens)) for expert in tokens[i]})
        last.update(dict.fromkeys(tokens[i], i))
    held: dict[int, int] = {}  # expert → the next token that wants it
    found = 0
    for token, after in zip(tokens, reversed(coming), strict=True):
        found += sum(expert in held for expert in token)
        held |= after
        while len(held) > slots:
            others = [expert for expert in held if expert not in token] or list(held)
            del held[max(others, key=held.__getitem__)]
    return found


def ahead(said: Said, guessed: Said, slots: int) -> dict[str, float]:
    """Of `lru` with guesses loaded one layer ahead: the share of its misses that were guessed, and guesses a token and
    layer that were missing and not wanted."""
    missed = right = wrong = asked = 0
    for layer in guessed:
        cache = ExpertCache(slots, "lru")
        for token, guess in zip(said[layer], guessed[layer], strict=False):
            coming = {expert for expert in guess if cache.slot(expert) is None}
            cache.ask(token)
            missing = [expert for expert in token if cache.slot(expert) is None]
            missed, right, wrong = (
                missed + len(missing),
                right + len(coming & set(missing)),
                wrong + len(coming - set(token)),
            )
            asked += 1
            for expert in missing:
                cache.admit(expert, token)
    return {"misses_guessed": right / max(1, missed), "wrong_per_token_and_layer": wrong / max(1, asked)}


def measure(engine: Engine, text: str, other: str, most_tokens: int) -> dict[str, Any]:
    """Hit rates by policy and share of the experts, all layers together; what guesses are worth."""
    held_out, counted = Heard(engine), Heard(engine)
    counted.read(other, most_tokens)
    held_out.read(text, most_tokens)
    experts = next(layer.routed.experts for layer in engine.plan.target.spec.layers if layer.routed)
    asked = sum(len(token) for tokens in held_out.said.values() for token in tokens)
    rows: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    guesses = []
    for share in SHARES:
        slots = max(1, round(share * experts))
        for policy in POLICIES:
            total = 0
            for layer, tokens in held_out.said.items():
                counts = Counter(expert for token in counted.said[layer] for expert in token)
                order = sorted(range(experts), key=lambda expert: (-counts[expert], expert))
                total += hits(tokens, slots, policy, order)
            rows[policy].append(total / asked)
        guesses.append(ahead(held_out.said, {i: g for i, g in held_out.guessed.items() if g}, slots))
    named = [(g, s) for i, guess in held_out.guessed.items() for g, s in zip(guess, held_out.said[i], strict=False)]
    recall = sum(len(set(g) & set(s)) for g, s in named) / max(1, sum(len(s) for _, s in named))
    length = len(next(iter(held_out.said.values())))
    return {"tokens": length, "shares": SHARES, "hit_rates": rows, "guess_recall": recall, "ahead": guesses}


def table(found: dict[str, Any]) -> str:
    """Markdown: a line a share."""
    lines = ["| experts that fit | " + " | ".join(POLICIES) + " | misses guessed | wrong guesses a token and layer |"]
    lines.append("|---" * (len(POLICIES) + 3) + "|")
    for i, share in enumerate(SHARES):
        rates = " | ".join(f"{found['hit_rates'][policy][i]:.1%}" for policy in POLICIES)
        guess = found["ahead"][i]
        lines.append(
            f"| {share:.0%} | {rates} | {guess['misses_guessed']:.1%} | {guess['wrong_per_token_and_layer']:.2f} |"
        )
    return "\n".join(lines)


def plot(found: dict[str, Any], file: Path) -> None:
    """As SVG."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    figure, axis = plt.subplots(figsize=(6.4, 4.2))
    for policy in POLICIES:
        axis.plot([100 * share for share in SHARES], [100 * rate for rate in found["hit_rates"][policy]], label=policy)
    axis.set(xlabel="experts that fit, %", ylabel="hit rate, %", xlim=(10, 90), ylim=(0, 100))
    axis.grid(True, alpha=0.25)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a packed model with experts")
    parser.add_argument("text", type=Path, help="held out")
    parser.add_argument("--counts", type=Path, required=True, help="another text, whose counts `static` goes by")
    parser.add_argument("--tokens", type=int, default=16384, help="of each text, at most")
    parser.add_argument("--plot", type=Path)
    wanted = parser.parse_args()
    ask = Ask(context=WINDOW_TOKENS, prompt_tokens=WINDOW_TOKENS, output_tokens=1)
    engine = Engine.load(wanted.model, ask, Loading(cache=default_cache()))
    text, other = (file.read_text(encoding="utf-8") for file in (wanted.text, wanted.counts))
    found = measure(engine, text, other, wanted.tokens)
    engine.close()
    print(table(found))
    if wanted.plot:
        plot(found, wanted.plot)
    print(json.dumps({"bench": "policies", "model": wanted.model.name, **found}))


if __name__ == "__main__":
    main()
