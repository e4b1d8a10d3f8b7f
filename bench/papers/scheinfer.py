"""ScheInfer's published rows, predicted: its own policy and its peers', on its test beds.

The plans are those of `scheinfer_plans`. Rows over several models take six of the paper's seven, on each bed with 12
and 24 GB (bed C: its 11): a Qwen2-14B was never published. Two are dense, and four have experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from statistics import fmean

from bench.papers.compare import Predicted, explained
from bench.papers.published import BED_A, BED_B, BED_C, Published, device_gb
from bench.papers.scheinfer_plans import (
    OUTPUT,
    PROMPT,
    THREADS,
    Setting,
    Spent,
    best_rate,
    fiddler,
    llama_cpp,
    no_ffns,
    power_infer,
    scheinfer,
    whole_ffns,
)  # fmt: skip
from bench.papers.traits import Traits, of_system

_EXPERTS_NOTE = "experts as a dense FFN of those that a token goes to, in prompts of all"
_DENSE = (("llama-2-70b", "int4"), ("llama-2-13b", "float16"))
_LARGEST = ("mixtral-8x22b", "int4")  # used only with 24 GB (section V-C)
_EXPERTS = (("mixtral-8x7b", "int4"), _LARGEST, ("qwen2-57b-a14b", "int4"), ("phi-3.5-moe", "float16"))
_RATES = (0.0, 0.25, 0.5, 0.75)


def _step_s(spent: Spent) -> float:
    return spent.step_s


def predicted(row: Published, traits: Traits) -> Predicted:
    """The traits are ScheInfer's: its peers, of which none is stated, run with penstock's kernels."""
    in_prompts = "V-E4" in row.table or "prefill" in row.setting or "prompt" in row.setting
    traits = of_system(traits, row.paper, "ScheInfer") if in_prompts else ()  # its trait is of prompts alone
    for table, found in (
        ("V-E1", _of_threads), ("V-E2", _of_rates), ("V-E3", _of_assignment), ("V-E4", _of_tokens),
    ):  # fmt: skip
        if table in row.table:
            return _told(row, found(row, traits))
    return _told(row, _of_ranges(row, traits))


def _told(row: Published, found: Predicted) -> Predicted:
    return explained(row, found.value, found.bound, found.note)


def _of_ranges(row: Published, traits: Traits) -> Predicted:
    """Sections V-C and V-D: the least or the most over models, beds and limits."""
    phase, _, which = row.setting.partition(", ")
    seconds: dict[str, Callable[[Spent], float]] = {
        "decode": _step_s,
        "prefill": lambda spent: spent.ttft_s,
        "prompt and answer": lambda spent: spent.total_s,
    }
    if row.against == "PowerInfer":
        settings = _settings(_DENSE, (BED_A, BED_B), (12,), traits=traits)
        found = [_ratio(seconds[phase], power_infer, s) for s in settings]
    else:
        settings = _settings((*_DENSE, *_EXPERTS), (BED_A, BED_B, BED_C), (12, 24), traits=traits)
        found = [_ratio(seconds[phase], peer, s) for peer, s in product((llama_cpp, fiddler), settings)]
    value = (min if which == "least" else max)(found)
    experts = "" if row.against == "PowerInfer" else f"; {_EXPERTS_NOTE}"
    return Predicted(value, None, f"assumed: prompts of {PROMPT}, answers of {OUTPUT} tokens, 12 and 24 GB{experts}")


def _of_threads(row: Published, traits: Traits) -> Predicted:
    """Section V-E1: the mean over the same models, beds and limits."""
    threads = _threads_of(row)
    peer = fiddler if row.against == "Fiddler" else llama_cpp
    settings = _settings((*_DENSE, *_EXPERTS), (BED_A, BED_B, BED_C), (12, 24), threads, traits)
    value = fmean(_ratio(_step_s, peer, s) for s in settings)
    note = f"assumed: all models, beds and limits; a CPU's time goes as 1 / threads; {_EXPERTS_NOTE}"
    return Predicted(value, None, note)


def _of_rates(row: Published, traits: Traits) -> Predicted:
    """Section V-E2: the best r_CG where no FFN has a share on the device, and what it gains over fixed ones."""
    setting = Setting(BED_A, "llama-2-70b", "int4", 24, _threads_of(row), traits=traits)
    if row.metric == "share":
        note = "a CPU's time goes as 1 / threads; the link's 24.9 GB/s, not Table I's 38"
        return Predicted(best_rate(setting), None, note)
    gains: list[float] = []
    for each in (setting, replace(setting, model="mixtral-8x7b", limit_gb=12)):
        best_s = no_ffns(each, best_rate(each)).step_s
        gains += [no_ffns(each, rate).step_s / best_s for rate in _RATES]
    return Predicted(fmean(gains), None, f"a CPU's time goes as 1 / threads; {_EXPERTS_NOTE}")


def _of_assignment(row: Published, traits: Traits) -> Predicted:
    """Section V-E3: slices against FFNs that are whole on the device or not at all, both with the best r_CG."""
    assert row.device_memory_bytes is not None
    setting = Setting(BED_A, row.model, "int4", row.device_memory_bytes // device_gb(1), traits=traits)
    return Predicted(
        whole_ffns(setting).step_s / scheinfer(setting).step_s, None,
        f"assumed: decode after a prompt of {PROMPT} tokens; {_EXPERTS_NOTE}" if setting.is_routed
        else f"assumed: decode after a prompt of {PROMPT} tokens",
    )  # fmt: skip


def _of_tokens(row: Published, traits: Traits) -> Predicted:
    """Section V-E4: prefill with all of a chunk's tokens on the device, against none of those of CC."""
    setting = of_prompt(row, traits)
    value = scheinfer(setting, prompts=False).ttft_s / scheinfer(setting).ttft_s
    return Predicted(value, None, _EXPERTS_NOTE if setting.is_routed else "")


def of_prompt(row: Published, traits: Traits) -> Setting:
    """Of a row of section V-E4."""
    assert row.device_memory_bytes is not None and row.prompt is not None
    limit = row.device_memory_bytes // device_gb(1)
    return Setting(BED_A, row.model, "int4", limit, prompt=row.prompt, traits=traits)


def _settings(
    models: tuple[tuple[str, str], ...], beds: tuple[str, ...], limits: tuple[int, ...], threads: int = THREADS,
    traits: Traits = (),
) -> Iterator[Setting]:  # fmt: skip
    """Every model on every bed; a limit that a bed does not reach is all of its memory."""
    for bed, model, limit in product(beds, models, limits):
        if (limit == min(limits) or bed != BED_C) and (limit >= 24 or model != _LARGEST):
            yield Setting(bed, *model, limit, threads, traits=traits)


def _ratio(seconds: Callable[[Spent], float], peer: Callable[[Setting], Spent], setting: Setting) -> float:
    """How many times as fast as the peer ScheInfer is. The traits are ScheInfer's own."""
    return seconds(peer(replace(setting, traits=()))) / seconds(scheinfer(setting))


def _threads_of(row: Published) -> int:
    return int(next(word for word in row.setting.replace(",", "").split() if word.isdigit()))
