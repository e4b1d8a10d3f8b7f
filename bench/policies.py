"""`python -m bench.policies`: hit rates of every way to keep experts, over what a trained model's routers say to text
that it has not seen, and how good guesses one layer ahead are.

The text is the held-out end of each book that tale-moe was trained on. Policies, each with so many slots a layer: `lru`
and `lfu` are those of penstock, and run here as they do there; `static` keeps the experts that another text (of the
books' training part) asked for most; `half` keeps half of its slots so and is lru in the others; `belady` knows the
future (Belady 1966), and no policy can do better. A guess is what the next layer's router says to this layer's input of
the FFN. The last line is one JSON object.
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

from bench.report import model_folder
from penstock.graph import cache, passes
from penstock.graph.cache import ExpertCache
from penstock.graph.ops import Route
from penstock.graph.tasks import Call
from penstock.kernels.reference.experts import Routes, route
from penstock.kernels.reference.matrix import Scratch, vector
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.planning import default_cache
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.store.pack import pack
from penstock.store.packed import Packed
from tools.reference_text import read_books

MODEL, BOOKS = Path("bench/tale-moe"), Path("../shared/data/books")
HALF_LIVES = (8.0, 32.0, 64.0, 128.0, 512.0)  # passes, of "lfu"
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
        with engine.session.hearing.routers(self._hear):
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
    slots_of = ExpertCache(slots - len(kept), "lfu" if policy == "lfu" else "lru")
    for token in tokens:
        others = [expert for expert in token if expert not in kept]
        slots_of.ask(others)
        missing = [expert for expert in others if slots_of.slot(expert) is None]
        found += len(others) - len(missing)
        for expert in missing:
            slots_of.admit(expert, others)
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
    """Of `lfu` with the missing ones of the guessed experts loaded one layer ahead: the share of what is wanted that is
    there or on its way (`hit_rate`), the share of the missing that was guessed, and wrong guesses a token and layer.
    The first layer is not guessed."""
    there = right = wrong = asked = 0
    for layer, tokens in said.items():
        held = ExpertCache(slots, "lfu")
        for token, guess in zip(tokens, guessed.get(layer) or [()] * len(tokens), strict=True):
            coming = {e for e in guess if held.slot(e) is None and held.guess(e, guess) is not None}
            held.ask(token)
            missing = [expert for expert in token if held.slot(expert) is None]
            there += len(token) - len(missing)
            right += len(coming.intersection(token))
            wrong += len(coming.difference(token))
            asked += len(token)
            for expert in missing:
                held.admit(expert, token)
    tokens_and_layers = sum(map(len, said.values()))
    return {
        "hit_rate": there / asked,
        "misses_guessed": right / max(1, right + asked - there),
        "wrong_per_token_and_layer": wrong / tokens_and_layers,
    }


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
        guesses.append(ahead(held_out.said, held_out.guessed, slots))
    half_lives = {
        half_life: _with_half_life(held_out.said, half_life, experts // 2) / asked for half_life in HALF_LIVES
    }
    named = [(g, s) for i, guess in held_out.guessed.items() for g, s in zip(guess, held_out.said[i], strict=False)]
    recall = sum(len(set(g) & set(s)) for g, s in named) / max(1, sum(len(s) for _, s in named))
    length = len(next(iter(held_out.said.values())))
    return {
        "tokens": length, "shares": SHARES, "hit_rates": rows, "guess_recall": recall, "ahead": guesses,
        "half_lives": half_lives,
    }  # fmt: skip


def _with_half_life(said: Said, half_life: float, slots: int) -> int:
    """Hits of "lfu" with another half-life."""
    before, cache.HALF_LIFE = cache.HALF_LIFE, half_life
    try:
        return sum(hits(tokens, slots, "lfu", ()) for tokens in said.values())
    finally:
        cache.HALF_LIFE = before


def table(found: dict[str, Any]) -> str:
    """Markdown: a line a share."""
    lines = [
        "# Which experts stay",
        "",
        f"What the routers of tale-moe (6 layers of 32 experts, 4 active) say to {found['tokens']} tokens that neither"
        " it nor its tokenizer saw in training. `make bench-policies` writes this page and docs/experts.svg.",
        "",
        "The share of the wanted experts that are in memory, by the share of the experts that fit. `lfu` is what plans"
        " use; `belady` knows the future. Look-ahead: `lfu`, and the 4 experts that the next router would take for this"
        " layer's input are loaded ahead. What it has on its way when the router asks counts as there. The last two"
        " columns are about it: the share of the missing experts that were guessed, and wrong guesses a token and"
        " layer.",
        "",
        "![hit rates](experts.svg)",
        "",
        "| experts that fit | " + " | ".join(POLICIES) + " | look-ahead | misses guessed | wrong guesses |",
        "|---" * (len(POLICIES) + 4) + "|",
    ]
    for i, share in enumerate(SHARES):
        rates = " | ".join(f"{found['hit_rates'][policy][i]:.1%}" for policy in POLICIES)
        guess = found["ahead"][i]
        lines.append(
            f"| {share:.0%} | {rates} | {guess['hit_rate']:.1%} | {guess['misses_guessed']:.1%}"
            f" | {guess['wrong_per_token_and_layer']:.2f} |"
        )
    half_lives = ", ".join(f"{n:g} passes {rate:.1%}" for n, rate in found["half_lives"].items())
    lines += ["", f"`lfu` where half of the experts fit, by the passes after which a use counts half: {half_lives}."]
    lines += ["", f"Of what the next router wants, guesses name {found['guess_recall']:.1%}."]
    return "\n".join(lines) + "\n"


def plot(found: dict[str, Any], file: Path) -> None:
    """As SVG."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    figure, axis = plt.subplots(figsize=(6.4, 4.2))
    for policy in POLICIES:
        axis.plot([100 * share for share in SHARES], [100 * rate for rate in found["hit_rates"][policy]], label=policy)
    rates = [100 * each["hit_rate"] for each in found["ahead"]]
    axis.plot([100 * share for share in SHARES], rates, "--", label="lfu, look-ahead")
    axis.set(xlabel="experts that fit, %", ylabel="hit rate, %", xlim=(10, 90), ylim=(0, 100))
    axis.grid(True, alpha=0.25)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="a checkpoint with experts")
    parser.add_argument("--books", type=Path, default=BOOKS, help="a folder of .txt files, that the model learnt")
    parser.add_argument("--tokens", type=int, default=16384, help="of each text, at most")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--table", type=Path)
    wanted = parser.parse_args()
    books = read_books(wanted.books)
    text, other = "\n".join(b.held_out for b in books), "\n".join(b.train[-len(b.held_out) :] for b in books)
    ask = Ask(context=WINDOW_TOKENS, prompt_tokens=WINDOW_TOKENS, output_tokens=1)
    with model_folder(None) as folder:
        pack(wanted.model, folder / "packed", parse_format("float32"))
        engine = Engine.load(folder / "packed", ask, Loading(cache=default_cache()))
        found = measure(engine, text, other, wanted.tokens)
        engine.close()
    print(table(found))
    if wanted.table:
        wanted.table.write_text(table(found), encoding="utf-8")
    if wanted.plot:
        plot(found, wanted.plot)
    print(json.dumps({"bench": "policies", "model": wanted.model.name, **found}))


if __name__ == "__main__":
    main()
