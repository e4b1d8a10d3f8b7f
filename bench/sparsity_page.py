"""The tables of docs/SPARSITY.md that follow who fires: what leaving neurons out gains (`bench.sparsity`), beside the
figures of PowerInfer that they answer to; and the picture of its Figure 9."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.planner.solve import powerinfer

ZEROS = ("90", "50", "10")
ORDER = (
    "Operators", "OPT-6.7B's shape in RAM", "OPT-6.7B's shape within 2.4 GB", "A Nemotron beside llama.cpp",
    "Hot and cold neurons beside a device", "Predictors by sparsity and skew",
)  # fmt: skip
WAYS = (powerinfer.NAME, powerinfer.MEASURED, powerinfer.RANDOM)
_HEADING = "\n## "


def merged(page: str, result: Mapping[str, Any], picture: str) -> str:
    """The page with the sections of what was measured, in place of what it had of them. `result`: of `bench.sparsity`.
    `picture`: the file of Figure 9. A section begins with a heading "## ", and its first words name it."""
    told, makers = result.get("measured") or {}, {"ops": _operators, "ram": _ram, "disk": _disk, "nemotron": _nemotron}
    made = {part: make(result) for part, make in (makers | {"placement": _placement}).items()}
    found = [
        section + (f"\nMeasured: {told[part]}.\n" if part in told else "") for part, section in made.items() if section
    ]
    found += [section for section in (_predictors(result, picture),) if section]
    names = {_name(section) for section in found}
    first, *others = page.split(_HEADING)
    kept = [_HEADING + each for each in others if _name(_HEADING + each) not in names]
    trained = [each for each in kept if _name(each).startswith("tale-")]
    rest = {_name(each): each for each in (*kept, *found) if each not in trained}
    ordered = sorted(rest, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    sections = [first, *trained, *(rest[name] for name in ordered)]
    return "\n\n".join(section.strip("\n") for section in sections) + "\n"


def _name(section: str) -> str:
    """Of its heading what comes before figures' numbers."""
    return section.removeprefix(_HEADING).partition("\n")[0].partition(" (")[0]


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
        if found:  # else it is not installed
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


def _disk(result: Mapping[str, Any]) -> str:
    disk = result.get("disk_2.4") or {}
    names = [name for name in ("off", "exact", "predict", "ahead") if disk.get(name)]
    if not names:
        return ""
    lines = [
        "\n## OPT-6.7B's shape within 2.4 GB\n",
        "The rest of the weights lies on the disk. *off* streams all neurons. *exact* is as the plan decides. Of"
        " *predict* the bytes are those of the records that are asked for, of the rest of their pages, and of pages"
        " between them that are read through. *ahead*: the same, with predictors that hear the layer before theirs: a"
        " layer's reads begin before its attention. *bound*: what the machine's figures say of all reads by"
        " themselves.\n",
        "| | tokens/s | over off | promised | of the bound | MB a token | records | alignment | holes | reads |",
        "|---" * 10 + "|",
    ]
    for name in names:
        of = disk[name]
        rate, vs = statistics.median(of["tokens_per_s"]), of["vs_dense"]
        sizes = (of[f"{kind}_bytes_per_token"] / 1e6 for kind in ("disk", "records", "alignment", "hole"))
        lines.append(
            f"| {name} | {rate:.2f} | {'' if vs is None else f'{vs:.2f} ×'} | {of['predicted_tokens_per_s']:.2f}"
            f" | {of['share_of_bound']:.2f} | "
            + " | ".join(f"{mb:.0f}" for mb in sizes)
            + f" | {of['reads_per_token']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def _nemotron(result: Mapping[str, Any]) -> str:
    found = result.get("nemotron") or {}
    if not found:
        return ""
    lines = [
        "\n## A Nemotron beside llama.cpp\n",
        "12 layers of OPT-6.7B's size with squared ReLU, in RAM, one stream; llama.cpp computes all, in Q4_0.\n",
        "| | tokens/s | over llama.cpp | over off |",
        "|---" * 4 + "|",
    ]
    for name, rate in found["tokens_per_s"].items():
        beside = [found[key].get(name) for key in ("vs_llamacpp", "vs_off")]
        lines.append(f"| {name} | {rate:.2f} | " + " | ".join("" if b is None else f"{b:.2f} ×" for b in beside) + " |")
    return "\n".join(lines) + "\n"


def _placement(result: Mapping[str, Any]) -> str:
    placed = result.get("placement") or {}
    large = {name: of for name, of in placed.items() if "program_s" in of}
    small = {name: of for name, of in placed.items() if name not in large}
    if not placed:
        return ""
    lines = ["\n## Hot and cold neurons beside a device\n"]
    if large:
        lines += [
            "Seconds that a placement takes, how far its answer may be from the best there is, and tokens/s over those"
            " of hottest first, simulated.\n",
            "| model and device memory | layers | program (Eqs. 1 to 8) | gap | by seconds | gap | over hottest first:"
            " program | by seconds | random |",
            "|---" * 9 + "|",
        ]
    for name, of in large.items():
        gaps = ["" if of[key] is None else f"{of[key]:.2%}" for key in ("program_gap", "seconds_gap")]
        speeds = of["simulated"] or {}
        each = ("" if speeds.get(way) is None else f"{speeds[way]:.3f}" for way in WAYS)
        lines.append(
            f"| {name.replace('_', ', ').replace('gib', ' GiB')} | {of['layers']} | {of['program_s']:.2f} s | {gaps[0]}"
            f" | {of['seconds_s']:.2f} s | {gaps[1]} | " + " | ".join(each) + " |"
        )
    if small:
        lines += [
            "\nA small OPT in emulated time: over hottest first, simulated / measured.\n",
            "| MiB of the device | program | by seconds | random |",
            "|---" * 4 + "|",
        ]
    for name, of in small.items():
        each = (f"{of[way]['simulated']:.3f} / {of[way]['measured']:.3f}" if way in of else "" for way in WAYS)
        lines.append(f"| {name} | " + " | ".join(each) + " |")
    return "\n".join(lines) + "\n"


def _predictors(result: Mapping[str, Any], picture: str) -> str:
    models = {name: result.get(key) for name, key in (("tale-opt", "tale_opt"), ("tale-relu", "tale_relu"))}
    if not all(models.values()):
        return ""
    lines = [
        "\n## Predictors by sparsity and skew (Figure 9)\n",
        "Each layer's predictor after training, which asks for a recall and takes the rank with which a token reads the"
        " fewest bytes. *fire*: of the layer's neurons, for a token. *make 80 %*: so many neurons, the hottest first,"
        " make 80 % of the layer's activations: the fewer, the more skewed. *ahead*: trained to hear the layer before"
        " (`train-predictors --ahead`), where there is one.\n",
        f"![parameters of predictors by sparsity]({picture})\n",
        "| model, layer | fire | make 80 % | rank | parameters | recall | called active | false alarms | ahead: rank"
        " | recall | called active | false alarms |",
        "|---" * 12 + "|",
    ]
    ahead = {
        (name, layer["layer"]): f"{layer['rank']} | {_calls(layer)}"
        for name, found in models.items()
        for layer in (found or {}).get("ahead", {}).get("layers", ())
    }
    for name, layer in _layers(result):
        lines.append(
            f"| {name} {layer['layer']} | {layer['fires']:.1%} | {layer['makes']:.1%} | {layer['rank']}"
            f" | {layer['weights'] / 1e3:.0f} k | {_calls(layer)} | {ahead.get((name, layer['layer']), ' | | |')} |"
        )
    rows = [(name, found) for name, found in models.items() if found is not None]
    rows += [(f"{name}, one layer ahead", found["ahead"]) for name, found in rows if "ahead" in found]
    for name, found in rows:
        lines.append(
            f"\n{name}: predictors have {found['predictor_share']:.1%} of its parameters, recall {found['recall']:.1%},"
            f" perplexity {found['perplexity_ratio']:.4f} of exact (KL {found['kl']:.4f} nats, the same best token in"
            f" {found['agree']:.1%}). {found['skipped_share']:.0%} of the FFNs' bytes are left out, their own deducted."
        )
    return "\n".join(lines) + "\n"


def _calls(layer: Mapping[str, Any]) -> str:
    return f"{layer['recall']:.1%} | {layer['active']:.1%} | {layer['false_alarms']:.1%}"


def _layers(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(model, a layer's figures), the layers of both models."""
    found = [(name, layer) for name, key in (("tale-opt", "tale_opt"), ("tale-relu", "tale_relu"))
             for layer in (result.get(key) or {}).get("layers", ())]  # fmt: skip
    return [(name, layer) for name, layer in found if "makes" in layer]


def with_skew(priced: dict[str, Any] | None, fired: dict[str, Any] | None) -> None:
    """Gives each layer of a model with predictors how few of its neurons make 80 % of its activations."""
    if not priced or not fired:
        return
    for layer, row in zip(priced["layers"], fired["rows"], strict=False):  # the last row is of all layers
        layer["makes"] = row["makes"]["0.8"]


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
