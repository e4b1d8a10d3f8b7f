"""The tables of docs/SPARSITY.md that follow who fires: what leaving neurons out gains (`bench.sparsity`), beside the
figures of PowerInfer that they answer to; and the picture of its Figure 9."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

ZEROS = ("90", "50", "10")
BEGINS = "\n## Operators"  # of these tables


def tables(result: Mapping[str, Any], picture: str) -> str:
    """Markdown. `result`: of `bench.sparsity`; what was not measured has no table. `picture`: the file of Figure 9."""
    return _operators(result) + _ram(result) + _predictors(result, picture)


def _operators(result: Mapping[str, Any]) -> str:
    ops = result.get("ops_by_format")
    if not ops:
        return ""
    lines = [
        "\n## Operators (Figure 16)\n",
        "A product of 4096 × 4096 weights of which a share of the neurons is 0, from memory: as rows of neurons over"
        " our dense kernel of the same format; and milliseconds, with those of libraries for sparse matrices (CSR,"
        " float32, laid out before; scipy on one thread).\n",
        "| zeros | " + " | ".join(f"{p} %" for p in ZEROS) + " |",
        "|---" * 4 + "|",
    ]
    for name, found in ops.items():
        lines.append(f"| {name}, over dense | " + " | ".join(f"{found[p]:.2f} ×" for p in ZEROS) + " |")
        each = " | ".join(f"{found[p] * found['dense_ms']:.2f} ms" for p in ZEROS)
        lines.append(f"| {name} (dense {found['dense_ms']:.2f} ms) | {each} |")
    for name, found in (result.get("ops_peers") or {}).items():
        lines.append(f"| {name} | " + " | ".join(f"{found[p]:.2f} ms" for p in ZEROS) + " |")
    return "\n".join(lines) + "\n"


def _ram(result: Mapping[str, Any]) -> str:
    ram = result.get("ram") or {}
    gains, share = ram.get("gains") or {}, ram.get("predictors_share")
    if not gains:
        return ""
    rows = sorted(
        {name.rsplit("_", 1)[1] for name in gains}, key=lambda n: (not n.isdigit(), int(n) if n.isdigit() else 0)
    )
    names = sorted({name.rsplit("_", 1)[0] for name in gains})
    lines = [
        "\n## OPT-6.7B's shape in RAM (Figures 14 and 17)\n",
        "Tokens a second over those with all neurons computed, by how many sequences are decoded at once, and of"
        " a prompt. Random weights in int4; 3 % of the neurons fire (exact), predictors are stated and call 5 %"
        " active.\n",
        "| | " + " | ".join(rows) + " |",
        "|---" * (len(rows) + 1) + "|",
        *(f"| {name} | " + " | ".join(f"{gains[f'{name}_{n}']:.2f} ×" for n in rows) + " |" for name in names),
    ]
    if share is not None:
        lines.append(
            f"\nPredictors take {share:.0%} of a token's time, one sequence (Figure 17 has under 10 % on a GPU)."
        )
    return "\n".join(lines) + "\n"


def _predictors(result: Mapping[str, Any], picture: str) -> str:
    models = {name: result.get(key) for name, key in (("tale-opt", "tale_opt"), ("tale-relu", "tale_relu"))}
    if not all(models.values()):
        return ""
    lines = [
        "\n## Predictors by sparsity and skew (Figure 9)\n",
        "Each layer's predictor after training, which asks for a recall and takes the rank with which a token reads the"
        " fewest bytes. *fire*: of the layer's neurons, for a token. *make 80 %*: so many neurons, the hottest first,"
        " make 80 % of the layer's activations: the fewer, the more skewed.\n",
        f"![parameters of predictors by sparsity]({picture})\n",
        "| model, layer | fire | make 80 % | rank | parameters | recall | called active | false alarms |",
        "|---" * 8 + "|",
    ]
    for name, layer in _layers(result):
        lines.append(
            f"| {name} {layer['layer']} | {layer['fires']:.1%} | {layer['makes']:.1%} | {layer['rank']}"
            f" | {layer['weights'] / 1e3:.0f} k | {layer['recall']:.1%} | {layer['active']:.1%}"
            f" | {layer['false_alarms']:.1%} |"
        )
    for name, found in models.items():
        assert found is not None
        lines.append(
            f"\n{name}: predictors have {found['predictor_share']:.1%} of its parameters, recall {found['recall']:.1%},"
            f" perplexity {found['perplexity_ratio']:.4f} of exact (KL {found['kl']:.4f} nats, the same best token in"
            f" {found['agree']:.1%}). {found['skipped_share']:.0%} of the FFNs' bytes are left out, their own deducted."
        )
    return "\n".join(lines) + "\n"


def _layers(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(model, a layer's figures), the layers of both models."""
    found = [(name, layer) for name, key in (("tale-opt", "tale_opt"), ("tale-relu", "tale_relu"))
             for layer in (result.get(key) or {}).get("layers", ())]  # fmt: skip
    return [(name, layer) for name, layer in found if "makes" in layer]


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Figure 9: a predictor's parameters by how few of its neurons fire. A point's size is the layer's skew."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for name, marker in (("tale-opt", "o"), ("tale-relu", "s")):
        layers = [layer for model, layer in _layers(result) if model == name]
        axes.scatter(
            [1 - layer["fires"] for layer in layers], [layer["weights"] / 1e3 for layer in layers], marker=marker,
            s=[20 + 300 * (1 - layer["makes"]) ** 2 for layer in layers], alpha=0.6, label=name,
        )  # fmt: skip
    axes.set_xlabel("neurons that do not fire for a token")
    axes.set_ylabel("parameters of the predictor, thousands")
    axes.legend()
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
