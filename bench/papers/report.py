"""The comparison as text, as a page and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from bench.papers.compare import (
    FAR_OFF,
    ROUNDING,
    LeftOut,
    Row,
    is_unknown,
    memory_ratio_median,
    not_reproducible,
    once,
    speed_ratio_median,
    untested_causes,
)
from bench.papers.published import METRICS, Contradiction, Published
from bench.papers.traits import Trait

_INTRO = f"""# The papers' tables, predicted

Made by `make bench-papers`: for each figure that PIPO, FlexGen, ScheInfer and PowerInfer publish, the policy of the
figure's system as a plan of penstock, on the paper's machine as data (`penstock/machines/`), lowered and simulated. No
weight is loaded and nothing is run; machine files are data sheets times stated shares, a source for each figure.
What a figure does not say is assumed alike for all of its paper and stands in its note.
Where penstock has no plan of a system for a model with experts, a dense FFN as wide as the experts that are wanted
stands for them, on a machine whose products are so much faster: it reads as many bytes in the same time. No paper says
how its prompts are routed, so every row draws its experts for itself, all as likely. Three models that the spec cannot
say have stand-ins too (`bench/papers/stand_ins.py`).

Each figure is predicted twice. *As penstock* has penstock's kernels and transfers. *As built* has the same plan on the
same machine, but with what the paper's system does in its own way: its traits, listed at the end. Numbers of traits
that no paper prints are fitted by half of the paper's tables, drawn by chance, or were chosen by hand by tables that
stand beside them; the others judge.

A ratio is predicted over published. **!** marks a published figure that is better, by more than {ROUNDING:.0%}, than
physics allows on that machine; it is left out of medians. **~** marks a plan that is not what the system did, or a
figure that no policy can reproduce. Ratios as penstock beyond {FAR_OFF:g} or 1/{FAR_OFF:g} are bold and explained below
their table. A cause names traits, or what the paper does not say, such as a batch. It is tested: *undone* is the ratio
with these alone. Where that is within {FAR_OFF:g}, it is a cause. Other rows count as untested and say **cause
unknown**, since what is explained below their table, if anything is, was not shown to be why. What the paper does not
say is tried on all far-off rows of a table together. What stands for FlexGen in PIPO's tables is PIPO's measurement of
it, and so on.

Speed ratios of the summary are medians over speeds and times together, turned so that above 1 is always "promised too
fast". Memory is apart, shares are in neither, and a figure that several tables print counts once.
"""


_RUNS = """## What runs of PowerInfer and ScheInfer

No prediction: what penstock's own operators, executor and trained models did in `python -m bench.papers.runs`.
*Operators*: a product of 4096 × 4096 weights in rows of neurons over the dense kernel's on this CPU (Figure 16, a
picture; its text says that PowerInfer's is faster than dense below 10 % zeros). *Ablation*: Figure 15, each step a plan
of eight of the model's layers on the paper's machine. The executor runs its tasks with a wait for each, so the schedule
is real, and the kernels' times are the machine file's; *predicted* is the same plan simulated.
*Tokens assigned*: ScheInfer's section V-E4, prompts in the same way; as built is waited for at 64 tokens alone.
*Loads*: of the neurons
that fire for a held-out text, the share that a device computes which has room for some, the hottest by another kind of
text (Figure 12). Figure 4 says that 26 % of a layer of OPT-30B, and 43 % of one of LLaMA(ReGLU)-70B, make 0.8.

"""
_TICKS = (0.125, 0.25, 0.5, 1, 2, 4, 8)


def papers_of(rows: Iterable[Row]) -> list[str]:
    """In the order in which they come."""
    return list(dict.fromkeys(row.figure.paper for row in rows))


def by_table(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """(paper, table) → its rows."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.figure.paper, row.figure.table), []).append(row)
    return found


def text(rows: Sequence[Row]) -> str:
    """Lines grouped by paper and table."""
    lines = []
    for (paper, table), group in by_table(rows).items():
        lines.append(f"\n{paper}, {table}")
        for row in group:
            f = row.figure
            mark = "!" if not row.respects_physics else " " if row.is_policy else "~"
            lines.append(
                f"{mark} {f.system[:12]:12} {f.model[:14]:14} {f.metric:11} {_number(row.predicted):>8} "
                f"{_number(row.as_built):>8} {_number(f.value):>8} {row.ratio:6.2f} {row.built_ratio:6.2f}  "
                + _setting(f)
                + (f" ({row.note})" if row.note else "")
            )
    return "\n".join([*lines, "", _summary(rows)])


def page(
    rows: Sequence[Row], left_out: Sequence[LeftOut], contradictions: Sequence[Contradiction], traits: Sequence[Trait],
    runs: Sequence[Mapping[str, str]] = (),
) -> str:  # fmt: skip
    """docs/PAPERS.md. `runs`: the rows of `data/runs.tsv`."""
    sections = [_INTRO, _summary(rows), "![ratios](papers.svg)\n"]
    for paper in papers_of(rows):
        sections.append(f"## {paper}\n")
        mine = [row for row in rows if row.figure.paper == paper]
        sections += [f"### {table}\n\n{_table(group)}" for (_, table), group in by_table(mine).items()]
        absent = [each for each in left_out if each.figure.paper == paper]
        if absent:
            sections.append("Not predicted: " + "; ".join(dict.fromkeys(map(_absent, absent))) + ".\n")
    if runs:
        sections.append(_RUNS + _ran(runs))
    sections.append("## Where the papers contradict themselves\n\nAnd what is taken here.\n")
    for paper, those in groupby(contradictions, key=lambda each: each.paper):
        sections.append(f"**{paper}**\n\n" + "\n".join(f"- *{c.where}*: {c.says}; but {c.but}." for c in those) + "\n")
    sections.append("## What the systems do in their own way\n\n" + _traits(traits))
    return "\n".join(sections)


def _ran(runs: Sequence[Mapping[str, str]]) -> str:
    lines = ["| what | model | published | predicted | ran | how |", "|---|---|---|---|---|---|"]
    for each in runs:
        cells = (each[name] for name in ("setting", "model", "published", "predicted", "ran", "how"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _traits(traits: Sequence[Trait]) -> str:
    lines = ["| tables of | system | what | value | | why |", "|---|---|---|---|---|---|"]
    for t in traits:
        how = t.how + (f" by {' and '.join(t.tables)}" if t.tables else "")
        lines.append(f"| {t.paper} | {t.system} | {t.kind} | {t.value:.3g} | {how} | {t.source} |")
    return "\n".join(lines) + "\n"


def _summary(rows: Sequence[Row]) -> str:
    lines = [
        "| paper | rows | speed, as built | of these, tables that judge | speed, as penstock | memory "
        "| as penstock beyond 1.5 or 1/1.5 | of these untested | of these, no policy can | better than physics |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for paper in papers_of(rows):
        mine = [row for row in rows if row.figure.paper == paper]
        far, broken = sum(row.far_off for row in once(mine)), sum(not row.respects_physics for row in mine)
        judging = [row for row in mine if row.judges]
        medians = (
            speed_ratio_median(mine, built=True), speed_ratio_median(judging, built=True),
            speed_ratio_median(mine, built=False), memory_ratio_median(mine),
        )  # fmt: skip
        cells = " | ".join("–" if median is None else f"{median:.2f}" for median in medians)
        counts = f"{far} | {untested_causes(mine)} | {not_reproducible(mine)} | {broken}"
        lines.append(f"| {paper} | {len(once(mine))} | {cells} | {counts} |")
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| system | model | setting | what | published | as penstock | ratio | as built | ratio | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    remarks: dict[str, list[str]] = {}
    for row in rows:
        f, marks = row.figure, ""
        if not row.respects_physics:
            marks += f"**!** bound {_number(row.bound or 0)} "
        if not row.is_policy:
            marks += "**~** "
        if row.note:
            same = remarks.setdefault(row.note, [str(len(remarks) + 1)])
            marks += f"({same[0]}) "
        if row.undone is not None:
            ratio = f"{row.undone / f.value:.2f}"
            marks += f"undone {ratio} " if row.cause_tested else f"undone only {ratio} "
        if is_unknown(row):
            marks += "**cause unknown**"
        lines.append(
            f"| {f.system} | {f.model} | {_setting(f)} | {_unit(f)} | {_number(f.value)} | {_number(row.predicted)} "
            f"| {'**' * row.far_off}{row.ratio:.2f}{'**' * row.far_off} | {_number(row.as_built)} "
            f"| {row.built_ratio:.2f} | {marks.strip()} |"
        )
    notes = [f"({number[0]}) {note}." for note, number in remarks.items()]
    return "\n".join([*lines, "", *("  \n".join(notes).splitlines())]) + "\n"


def _setting(f: Published) -> str:
    """With lengths, batch and limits, where the paper says them."""
    parts = [f.setting]
    parts += [f"prompt {f.prompt}"] if f.prompt else []
    parts += [f"batch {f.batch}"] if f.batch else []
    parts += [f"{f.device_memory_bytes / 2**30:g} GB of device memory"] if f.device_memory_bytes else []
    parts += [f"against {f.against}"] if f.against else []
    return ", ".join(parts)


def _unit(f: Published) -> str:
    short = {"throughput": "tokens/s", "decode_tokens_per_s": "tokens/s, decode", "ttft_s": "first token, s",
             "decode_s": "a token, s", "latency_s": "answer, s", "seconds": "s", "speedup": "times as fast",
             "device_gb": "GB of the device", "host_gb": "GB of RAM"}  # fmt: skip
    assert set(short) <= set(METRICS)
    return short.get(f.metric, f.metric.replace("_", " "))


def _absent(each: LeftOut) -> str:
    f = each.figure
    return f"{f.table}, {f.setting}" + (f" ({f.model}: {each.cause})" if each.cause else "")


def _number(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def plot(rows: Sequence[Row], file: Path) -> None:
    """Ratios as the systems were built, a line for each table; as SVG, so that it stays small and sharp. The same rows
    give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "penstock"
    tables = by_table(rows)
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.3 * len(tables)))
    axis.axvspan(1 / FAR_OFF, FAR_OFF, color="#888888", alpha=0.15, linewidth=0)
    axis.axvline(1, color="#888888", linewidth=1)
    for y, group in enumerate(tables.values()):
        for i, row in enumerate(group):
            own = row.figure.system == row.figure.paper
            color = "#1b6ca8" if own else "#e0a030"
            at = y + 0.6 * ((i + 1) / (len(group) + 1) - 0.5)
            face = color if row.respects_physics else "none"
            axis.scatter(
                row.built_ratio, at, s=16, marker="o" if own else "s", facecolors=face, edgecolors=color, linewidths=0.8
            )
    axis.set(xscale="log", xlabel="predicted as built / published", ylim=(len(tables) - 0.4, -0.6))
    axis.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axis.minorticks_off()
    axis.set_yticks(range(len(tables)), [f"{paper}: {table}" for paper, table in tables], fontsize=7)
    axis.set_title("blue: the paper's system; yellow: its peers; hollow: better than physics allows", fontsize=8)
    axis.grid(True, axis="x", which="major", alpha=0.25)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
