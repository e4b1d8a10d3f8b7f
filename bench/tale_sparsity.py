"""`python -m bench.tale_sparsity`: which neurons of the trained ReLU models fire for text that they have not seen, as
PowerInfer's Figures 4 and 5 have it of OPT-30B.

The texts are the held-out ends of the books that the models learnt. A neuron fires for a token where ReLU gives it more
than 0. Figure 4: how large a share of the neurons, the hottest first, makes which share of all activations, in a layer
and in the whole model. Figure 5: how alike two kinds of text are, by the hottest fifth of each layer's neurons: on
philosophers' books and on all others. The engine computes what is counted here. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.report import model_folder
from penstock.graph import ops, passes
from penstock.graph.resident import resident_plan
from penstock.graph.tasks import Call, Task
from penstock.serve.session import Session
from penstock.serve.tokenizer import Tokenizer
from penstock.spec.format import FLOAT32
from penstock.spec.order import hot_to_cold
from penstock.spec.parts import GRANULE_ROWS, Part
from penstock.store.pack import pack
from penstock.store.packed import Packed, open_packed
from penstock.store.quantize import decode_block
from penstock.store.synth import Rated
from tools.reference_text import read_books

MODELS, BOOKS = (Path("bench/tale-opt"), Path("bench/tale-relu")), Path("../shared/data/books")
# Plato, Nietzsche and Aristotle. The other books are tales, and Shakespeare.
PHILOSOPHERS = ("pg1497", "pg1656", "pg1658", "pg1998", "pg4363", "pg8438")
WINDOW_TOKENS, HOTTEST = 512, 0.2
SHARES = (0.5, 0.8, 0.95)  # of all activations
ALL = "all"  # the row of all layers together
_CURVE = 101  # points of a plotted curve

Fires = NDArray[np.bool_]  # [T, N]: a layer's neurons for each token


def live_neurons(packed: Packed, windows: Sequence[NDArray[np.int32]]) -> list[Fires]:
    """For each layer which neurons fire for tokens int32 [T of the window]. Each window is a prompt of its own."""
    longest = max(map(len, windows))
    plan = resident_plan(packed.spec, packed.weights, kv=FLOAT32, context=longest, rows=longest)
    matrix, found = Rated.of(packed.spec).matrix, [list[Fires]() for _ in packed.spec.layers]
    session = Session(packed, plan)
    compute = session._binding.call

    def hear(call: Call) -> None:
        op = call.operands
        if isinstance(op, ops.Ffn):
            assert call.batch is not None
            part = packed.parts[f"{op.layer}.ffn"]
            h = session._arenas.array(op.h, np.float32, (call.batch.total_rows, packed.spec.d_model))
            granules = session._arenas.view(op.weights).reshape(part.granules, part.granule_bytes)
            above = [before_relu(part, granule, matrix, h) > 0 for granule in granules]
            by_place = np.hstack(above)[:, : part.rows]
            fires = np.empty_like(by_place)
            fires[:, packed.orders.get(op.layer, range(part.rows))] = by_place
            found[op.layer].append(fires)
        compute(call)

    def run(task: Task) -> None:  # call by call, where the session would run a program
        for call in task.calls:
            hear(call)

    session._binding.run = run  # type: ignore[method-assign]
    for window in windows:
        for p in passes.prefill(plan, 0, len(window), None):
            session.step(p, [window])
    session.close()
    return [np.vstack(layer) for layer in found]


def before_relu(part: Part, granule: NDArray[np.uint8], matrix: str, h: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 [T, rows of a granule]: what its neurons have before their ReLU, for h float32 [T, D]."""
    product = h @ decode_block(granule, part.block(matrix)).T
    if part.has(f"{matrix}_bias"):
        bias = part.block(f"{matrix}_bias")
        product += granule[bias.offset :][: bias.nbytes].view(np.float32)
    return np.asarray(product)


def cdf(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N]: the share of all activations that the hottest 1, 2, … neurons make."""
    made = np.sort(rates)[::-1].cumsum()
    return np.asarray(made / made[-1])


def hottest(rates: NDArray[np.float64], share: float) -> float:
    """The share of neurons, the hottest first, that makes `share` of all activations."""
    return (int(np.searchsorted(cdf(rates), share)) + 1) / len(rates)


def overlap(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The share of the hottest fifth of the neurons on one text that are in the hottest fifth on another."""
    count = max(1, round(HOTTEST * len(one)))
    first, second = (set(np.argsort(-rates, kind="stable")[:count].tolist()) for rates in (one, other))
    return len(first & second) / count


def still(fires: Fires, order: NDArray[np.int64]) -> float:
    """The share of a layer's granules of which no neuron fires for a token, if the neurons lie in this order."""
    edges = range(0, fires.shape[1], GRANULE_ROWS)
    return 1 - float(np.logical_or.reduceat(fires[:, order], edges, axis=1).mean())


def alike(fires: Fires, width: int) -> float:
    """The share of a token's live neurons that were live for the token before it too, within windows."""
    inside = np.arange(1, len(fires)) % width != 0
    after = fires[1:][inside]
    return float((after & fires[:-1][inside]).sum() / max(1, after.sum()))


def measure(packed: Packed, texts: Sequence[list[int]]) -> dict[str, Any]:
    """Of two texts, given as tokens: rows by layer of what fires on both together, and how alike the two are."""
    by_text = []
    for ids in texts:
        windows = [np.array(ids[lo : lo + WINDOW_TOKENS], np.int32) for lo in range(0, len(ids), WINDOW_TOKENS)]
        by_text.append(live_neurons(packed, windows))
    counts = [[fires.sum(0).astype(np.float64) for fires in text] for text in by_text]  # [text][layer][N]
    tokens = [len(text[0]) for text in by_text]
    rates = [(one + other) / sum(tokens) for one, other in zip(*counts, strict=True)]
    rows = []
    for i, rate in enumerate(rates):
        means = {
            "overlap": overlap(counts[0][i], counts[1][i]),
            "alike": float(np.mean([alike(text[i], WINDOW_TOKENS) for text in by_text])),
            "still": float(np.mean([still(text[i], np.arange(len(rate))) for text in by_text])),
            # Each kind of text in the order that the other one makes.
            "still_ordered": float(np.mean([still(by_text[k][i], coldest_last(counts[1 - k][i])) for k in (0, 1)])),
        }
        rows.append(_row(str(i), rate, means))
    rows.append(_row(ALL, np.concatenate(rates), {key: float(np.mean([row[key] for row in rows])) for key in means}))
    at = np.linspace(0, 1, _CURVE)
    curves = {
        name: np.interp(at, np.arange(len(r) + 1) / len(r), [0, *cdf(r)]).tolist()
        for name, r in [*((str(i), r) for i, r in enumerate(rates)), (ALL, np.concatenate(rates))]
    }
    return {"model": packed.folder.name, "tokens": tokens, "rows": rows, "curves": curves}


def coldest_last(counts: NDArray[np.float64]) -> NDArray[np.int64]:
    """The order of a layer's neurons in which `penstock pack --profile` packs them."""
    return np.array(hot_to_cold(counts.tolist()), np.int64)


def _row(name: str, rates: NDArray[np.float64], means: dict[str, float]) -> dict[str, Any]:
    return {
        "layer": name, "active": float(rates.mean()), "never": float((rates == 0).mean()),
        "makes": {str(share): hottest(rates, share) for share in SHARES}, **means,
    }  # fmt: skip


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown: a table for each model."""
    tokens = found[0]["tokens"]
    lines = [
        "# Which neurons fire",
        "",
        f"Of the trained ReLU models in bench/, on text that neither they nor their tokenizer saw in training:"
        f" {tokens[0]} tokens of philosophers' books and {tokens[1]} of others. `make bench-sparsity` writes this page"
        " and docs/sparsity.svg.",
        "",
        "A neuron fires for a token where ReLU gives it more than 0. *make 50 %*: so many neurons, the hottest first,"
        " make half of a layer's activations (PowerInfer, Figure 4; the row *all* takes the hottest of the whole"
        " model). *same hottest fifth*: so many of the hottest 20 % of a layer's neurons on one kind of text are among"
        " its hottest 20 % on the other (Figure 5 shows tasks side by side). *fired before*: so many of the neurons"
        " that fire for a token fired for the token before it. *still granules*: so many of the granules of 64 neurons"
        " have none that fires for a token, and so have what those zeros multiply left out where neurons lie in tiles;"
        " as the checkpoint has them, and hot to cold (`penstock pack --profile`) by the other kind of text. Records of"
        " single neurons leave out what does not fire, in any order. In the row *all* the last four are means.",
        "",
        "![activations by neurons](sparsity.svg)",
    ]
    for each in found:
        lines += [
            "",
            f"## {each['model']}",
            "",
            "| layer | fire for a token | never fire | make 50 % | make 80 % | make 95 % | same hottest fifth"
            " | fired before | still granules | hot to cold |",
            "|---" * 10 + "|",
        ]
        for row in each["rows"]:
            makes = " | ".join(f"{row['makes'][str(share)]:.1%}" for share in SHARES)
            lines.append(
                f"| {row['layer']} | {row['active']:.1%} | {row['never']:.1%} | {makes} | {row['overlap']:.1%}"
                f" | {row['alike']:.1%} | {row['still']:.1%} | {row['still_ordered']:.1%} |"
            )
    return "\n".join(lines) + "\n"


def plot(found: Sequence[dict[str, Any]], file: Path) -> None:
    """As SVG: a panel for each model, a line for each layer."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    figure, axes = plt.subplots(1, len(found), figsize=(4.6 * len(found), 3.9), sharey=True, squeeze=False)
    at = [100 * i / (_CURVE - 1) for i in range(_CURVE)]
    colours = plt.get_cmap("viridis")
    for axis, each in zip(axes[0], found, strict=True):
        layers = [name for name in each["curves"] if name != ALL]
        for i, name in enumerate(layers):
            curve = [100 * made for made in each["curves"][name]]
            axis.plot(at, curve, color=colours(i / max(1, len(layers) - 1)), linewidth=1, label=f"layer {name}")
        axis.plot(at, [100 * made for made in each["curves"][ALL]], "k--", label="whole model")
        axis.set(title=each["model"], xlabel="neurons, the hottest first, %", xlim=(0, 100), ylim=(0, 100))
        axis.grid(True, alpha=0.25)
    axes[0][0].set(ylabel="activations that they make, %")
    axes[0][-1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def kinds_of(books: Path) -> list[list[str]]:
    """The held-out ends of the books in a folder, of two kinds: those of philosophers, and the others."""
    read = read_books(books)
    return [[b.held_out for b in read if (Path(b.name).stem in PHILOSOPHERS) == wise] for wise in (True, False)]


@contextmanager
def packed_beside(model: Path, kinds: list[list[str]], tokens: int) -> Iterator[tuple[Packed, list[list[int]]]]:
    """A checkpoint packed in float32 in a temporary folder, and token ids of each kind of text: at most `tokens`, from
    each book alike."""
    with model_folder(None) as folder:
        packed = open_packed(pack(model, folder / model.name, FLOAT32))
        tokenizer = Tokenizer.open(packed.folder)
        yield packed, [[id for text in kind for id in tokenizer.encode(text)[: tokens // len(kind)]] for kind in kinds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, nargs="*", default=MODELS, help="checkpoints with ReLU")
    parser.add_argument("--books", type=Path, default=BOOKS, help="a folder of .txt files, that the models learnt")
    parser.add_argument("--tokens", type=int, default=16384, help="of each kind of text, at most, from each book alike")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--table", type=Path)
    wanted = parser.parse_args()
    found, kinds = [], kinds_of(wanted.books)
    for model in wanted.model:
        with packed_beside(model, kinds, wanted.tokens) as (packed, texts):
            found.append(measure(packed, texts))
    print(table(found))
    if wanted.table:
        wanted.table.write_text(table(found), encoding="utf-8")
    if wanted.plot:
        plot(found, wanted.plot)
    slim = [{key: value for key, value in each.items() if key != "curves"} for each in found]
    print(json.dumps({"bench": "tale_sparsity", "models": slim}))


if __name__ == "__main__":
    main()
