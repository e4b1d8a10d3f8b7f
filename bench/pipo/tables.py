"""PIPO's tables of whole runs. Each takes the workshop and how much to do, prints itself and returns its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

from bench.pipo.rounds import Columns, Figures, Row, against_first, gains, in_turns, median_of, rows_of, show
from bench.pipo.session import MOST_STEPS, PipoSession
from bench.pipo.settings import FLEXGEN, OURS, Setting, Workshop
from penstock.units import GIB, MIB

ROOM = MOST_STEPS + 2  # of a context, for the steps that are measured


@dataclass(frozen=True)
class Scale:
    """How much is measured: rounds, decode steps of a figure, tokens of a prompt, …"""

    rounds: int = 3
    steps: int = 4
    least_s: float = 0.5  # … and seconds of them
    prompt: int = 512
    prompts: tuple[int, ...] = (512, 1024, 2048, 3072)
    outputs: tuple[int, ...] = (128, 256, 512, 1024)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    ablation_batch: int = 4  # as PIPO's Figure 9
    outputs_batch: int = 4  # … and 11
    overhead_batch: int = 16
    resident: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25, 0.0)

    @property
    def context(self) -> int:
        return self.prompt + ROOM


QUICK = Scale(
    rounds=1, steps=1, least_s=0.0, prompt=8, prompts=(8, 16), outputs=(2, 4), batches=(1, 2),
    ablation_batch=2, outputs_batch=2, overhead_batch=2, resident=(1.0, 0.5, 0.0),
)  # fmt: skip
DECODE: Columns = {"decode_tokens_per_s": ("decode, tokens/s", 1.0), "decode_tokens_per_s_vs": ("× the first", 1.0)}
PREFILL: Columns = {"prefill_tokens_per_s": ("prompt, tokens/s", 1.0), "prefill_tokens_per_s_vs": ("× the first", 1.0)}
MEMORY: Columns = {"host_bytes": ("memory, MiB", float(MIB))}


def ablation(shop: Workshop, scale: Scale) -> list[Row]:
    """Figure 9: FlexGen's order, and what it lacks step by step. Everything streams, through rings of one size."""
    base = replace(FLEXGEN, batch=scale.ablation_batch, prompt=scale.prompt, context=scale.context)
    settings = {
        "FlexGen's order": base,
        "+ schedule": replace(base, order="overlapped"),
        "+ transfers": replace(base, order="overlapped", plain=False),
        "+ products of 4 bits": replace(base, order="overlapped", plain=False, dequantise=False),
    }
    rows = _runs(shop, scale, settings)
    for before, row in pairwise(rows):
        row["gain_of_step"] = gains(before, row, "decode_tokens_per_s")
    steps = {"gain_of_step": ("× the step before", 1.0)}
    title = f"ablation (Figure 9): all streams, batch {scale.ablation_batch}, after {scale.prompt} tokens"
    show(title, rows, {**DECODE, **steps, **PREFILL, **MEMORY})
    return rows


def pipelines(shop: Workshop, scale: Scale) -> list[Row]:
    """§3.2.3: the order that saves memory against the one that overlaps; and FlexGen's, with our reads and products."""
    base = replace(OURS, prompt=scale.prompt, context=scale.context)
    settings = {order: replace(base, order=order) for order in ("saving", "flexgen", "overlapped")}
    rows = _runs(shop, scale, settings)
    show("pipelines (§3.2.3): all streams, batch 1", rows, {**DECODE, **PREFILL, **MEMORY})
    return rows


def homes(shop: Workshop, scale: Scale) -> list[Row]:
    """Tables 4 and 5: where weights and KV live. A prompt comes first, for a file that nobody wrote is not read."""
    base = replace(OURS, prompt=scale.prompt, context=scale.context)
    settings = {
        f"weights {weights}, KV {kv}": replace(base, resident=float(weights == "memory"), kv_home=kv)
        for weights in ("memory", "disk")
        for kv in ("memory", "disk")
    }
    rows = _runs(shop, scale, settings)
    show(f"weight home × KV home (tables 4, 5): batch 1, after {scale.prompt} tokens", rows,
         {**DECODE, **PREFILL, **MEMORY})  # fmt: skip
    return rows


def prompts(shop: Workshop, scale: Scale) -> list[Row]:
    """Figure 10: prompts of 512 to 3,072 tokens, everything streaming, batch 1; a plan for each length."""
    settings = {str(n): replace(OURS, prompt=n, context=n + ROOM) for n in scale.prompts}
    rows = _runs(shop, scale, settings)
    first = {"first_token_s": ("first token, s", 1.0), "chunk_rows": ("chunk, rows", 1.0)}
    show("prompt length (Figure 10): all streams, batch 1", rows, {**first, **PREFILL, **DECODE, **MEMORY})
    return rows


def outputs(shop: Workshop, scale: Scale) -> list[Row]:
    """Figure 11: 128 to 1,024 tokens of four sequences. Not all steps are taken but some at the start and at the end of
    each stretch, and what lies between is taken to cost their mean: a step's time grows evenly with its position."""
    batch, longest = scale.outputs_batch, max(scale.outputs)
    setting = replace(OURS, batch=batch, prompt=scale.prompt, context=scale.prompt + longest + ROOM)
    marks = (0, *scale.outputs)
    with _opened(shop, {"ours": setting}) as sessions:

        def turn() -> Figures:
            at = [sessions["ours"].step_s(scale.prompt + mark, scale.steps, scale.least_s, batch) for mark in marks]
            figures, taken_s = {}, 0.0
            for i in range(1, len(marks)):
                taken_s += (marks[i] - marks[i - 1]) * (at[i - 1] + at[i]) / 2
                figures[str(marks[i])] = batch * marks[i] / taken_s
            return figures

        found = in_turns({"ours": turn}, scale.rounds)["ours"]
    names = {str(n): [{"decode_tokens_per_s": figures[str(n)]} for figures in found] for n in scale.outputs}
    rows = rows_of(names, against_first(names))
    show(f"output length (Figure 11): all streams, batch {batch}, from sampled steps", rows, DECODE)
    return rows


def batches(shop: Workshop, scale: Scale) -> list[Row]:
    """Figure 5: sequences at once, with everything in memory, everything streaming, and streaming as FlexGen does."""
    most = max(scale.batches)
    kinds = {"flexgen": FLEXGEN, "disk": OURS, "memory": replace(OURS, resident=1.0)}
    settings = {kind: replace(s, batch=most, prompt=scale.prompt, context=scale.context) for kind, s in kinds.items()}
    with _opened(shop, settings) as sessions:
        turns = {
            f"{kind}-{n}": lambda kind=kind, n=n: _decoded(sessions[kind], scale, n)
            for n in scale.batches
            for kind in kinds
        }
        for n in scale.batches:  # not counted: programs are bound, pages touched
            sessions["memory"].step_s(scale.prompt, 1, 0, n)
        found = in_turns(turns, scale.rounds)
    against = {f"{kind}-{n}": f"flexgen-{n}" if kind != "flexgen" else None for n in scale.batches for kind in kinds}
    rows = rows_of(found, against)
    show(f"batch (Figure 5): after {scale.prompt} tokens; × against FlexGen's order of that batch", rows, DECODE)
    return rows


def overhead(shop: Workshop, scale: Scale) -> list[Row]:
    """C.7: what is lost, of the speed with all in memory, for the memory saved; per GiB of it too."""
    many = scale.overhead_batch
    base = replace(OURS, batch=many, prompt=scale.prompt, context=scale.context)
    settings = {f"{share:.0%} in memory": replace(base, resident=share) for share in scale.resident}
    with _opened(shop, settings) as sessions:

        def turn(session: PipoSession) -> Figures:
            alone, together = _decoded(session, scale, 1), _decoded(session, scale, many)
            prompt = scale.prompt / session.prefill_s(scale.prompt)
            return {
                "decode_tokens_per_s": alone["decode_tokens_per_s"],
                f"decode_{many}_tokens_per_s": together["decode_tokens_per_s"],
                "prefill_tokens_per_s": prompt,
            }

        turns = {name: lambda session=session: turn(session) for name, session in sessions.items()}
        for session in sessions.values():  # not counted: programs are bound, pages touched
            session.prefill_s(min(16, scale.prompt))
            for seqs in (1, many):
                session.step_s(scale.prompt, 1, 0, seqs)
        facts = {name: {"host_bytes": session.host_bytes} for name, session in sessions.items()}
        rows = rows_of(in_turns(turns, scale.rounds), against_first(turns), facts)
    full = rows[0]["host_bytes"]
    figures = ("decode", f"decode_{many}", "prefill")
    for row in rows[1:]:
        saved_bytes = full - row["host_bytes"]
        row["saved_share"] = saved_bytes / full
        for name in figures:
            row[f"{name}_lost"] = 1 - median_of(row, f"{name}_tokens_per_s_vs")
            row[f"{name}_lost_per_gib_saved"] = row[f"{name}_lost"] / (saved_bytes / GIB) if saved_bytes else None
    saved = {**MEMORY, "saved_share": ("saved, %", 0.01)}
    titles = dict(zip(figures, ("decode × 1", f"decode × {many}", "prompt"), strict=True))
    speeds = {f"{name}_tokens_per_s": (f"{title}, tokens/s", 1.0) for name, title in titles.items()}
    show("speed for memory (C.7)", rows, saved | speeds)
    lost: Columns = {}
    for name, title in titles.items():
        lost |= {f"{name}_lost": (f"{title}, % lost", 0.01), f"{name}_lost_per_gib_saved": ("per GiB saved", 0.01)}
    show("speed lost for memory saved (C.7)", rows[1:], saved | lost)
    return rows


def _decoded(session: PipoSession, scale: Scale, seqs: int) -> Figures:
    return {"decode_tokens_per_s": seqs / session.step_s(scale.prompt, scale.steps, scale.least_s, seqs)}


def _runs(shop: Workshop, scale: Scale, settings: Mapping[str, Setting]) -> list[Row]:
    """A prompt of one sequence and then decode steps of all, for each setting in turns; ratios against the first."""
    with _opened(shop, settings) as sessions:

        def turn(name: str) -> Figures:
            session, setting = sessions[name], settings[name]
            dropped_s = session.plain.drop_s if session.plain else 0.0
            first_s = session.prefill_s(setting.prompt)
            step_s = session.step_s(setting.prompt, scale.steps, scale.least_s, setting.batch)
            figures = {
                "decode_tokens_per_s": setting.batch / step_s,
                "prefill_tokens_per_s": setting.prompt / first_s,
                "first_token_s": first_s,
            }
            if session.plain:
                figures["cache_drop_s"] = session.plain.drop_s - dropped_s
            return figures

        for name, session in sessions.items():  # not counted: the first pass after loading is slower
            session.prefill_s(min(16, settings[name].prompt))
        turns = {name: lambda name=name: turn(name) for name in settings}
        facts = {
            name: {"host_bytes": s.host_bytes, "chunk_rows": s.plan.chunk_rows, "ring_bytes": s.plan.ring_bytes}
            for name, s in sessions.items()
        }
        return rows_of(in_turns(turns, scale.rounds), against_first(turns), facts)


@contextmanager
def _opened(shop: Workshop, settings: Mapping[str, Setting]) -> Iterator[dict[str, PipoSession]]:
    """All at once, so that they can take turns."""
    with ExitStack() as stack:
        sessions = {}
        for name, setting in settings.items():
            sessions[name] = shop.open(setting)
            stack.callback(sessions[name].close)
        yield sessions
