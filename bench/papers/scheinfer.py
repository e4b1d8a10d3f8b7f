"""ScheInfer: the fits of Table I, the speed-ups of section V, its ablations E1 to E4.

Figures 6 and 7 are pictures: the text gives their ranges only. Prefill is of 1024 tokens unless said otherwise;
lengths of answers and batches are not stated. Models of the ranges: LLaMA-2-70B, Qwen2-57B-A14B, Mixtral-8x7B and
8x22B in 4 bits, PhiMoE, LLaMA-2-13B and Qwen2-14B in FP16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from bench.papers.published import BED_A, BED_B, BED_C, SEVERAL, Published, device_gb


@dataclass(frozen=True, slots=True)
class Fit:
    """t = alpha_s + n · beta_s (Eq. 3). n: multiply-adds (tokens × width × hidden) of a product, bytes over the link.
    A launch has alpha_s only, and `r2` is its standard deviation in seconds."""

    machine: str
    what: str
    weights: str
    alpha_s: float
    beta_s: float
    r2: float


TABLE_I = (
    Fit(BED_A, "gpu", "float16", 1.0e-7, 3.2e-12, 0.997),
    Fit(BED_A, "gpu", "int4", 4.7e-6, 8.1e-13, 0.999),
    Fit(BED_A, "cpu", "float16", 7.4e-7, 1.6e-11, 0.988),
    Fit(BED_A, "cpu", "int4", 1.1e-5, 5.4e-12, 0.998),
    Fit(BED_A, "link", "", 3.0e-6, 2.6e-11, 0.985),
    Fit(BED_A, "launch", "", 4.4e-5, 0.0, 3.4e-6),
    Fit(BED_B, "gpu", "float16", 1.9e-7, 2.6e-12, 0.997),
    Fit(BED_B, "gpu", "int4", 4.6e-6, 6.5e-13, 0.996),
    Fit(BED_B, "cpu", "float16", 3.4e-6, 1.5e-11, 0.995),
    Fit(BED_B, "cpu", "int4", 1.3e-5, 6.5e-12, 0.998),
    Fit(BED_B, "link", "", 5.8e-6, 2.5e-11, 0.994),
    Fit(BED_B, "launch", "", 5.7e-5, 0.0, 5.9e-6),
    Fit(BED_C, "gpu", "float16", 1.4e-7, 3.6e-12, 0.988),
    Fit(BED_C, "gpu", "int4", 6.4e-6, 9.2e-13, 0.989),
    Fit(BED_C, "cpu", "float16", 1.8e-6, 2.5e-11, 0.993),
    Fit(BED_C, "cpu", "int4", 5.6e-7, 8.4e-12, 0.992),
    Fit(BED_C, "link", "", 3.7e-6, 4.1e-11, 0.999),
    Fit(BED_C, "launch", "", 5.2e-5, 0.0, 6.0e-6),
)

_BOTH = "llama.cpp and Fiddler"
_row = partial(Published, paper="ScheInfer", system="ScheInfer", metric="speedup")
_over_all = partial(_row, machine=SEVERAL, model=SEVERAL, against=_BOTH)
_DECODE = "the most is 1.80 in abstract and conclusion, 1.87 in section V-D"

_RANGES = [
    _over_all(table="abstract, section VII", setting="decode, least", value=1.11),
    _over_all(table="abstract, section VII", setting="decode, most", value=1.80, note=_DECODE),
    _over_all(table="section V-D", setting="decode, least", value=1.11),
    _over_all(table="section V-D", setting="decode, most", value=1.87, note=_DECODE),
    _over_all(table="section V-C", setting="prefill, least", value=1.69, prompt=1024),
    _over_all(table="section V-C", setting="prefill, most", value=6.33, prompt=1024),
    _over_all(table="section V-D", setting="prompt and answer, least", value=1.25),
    _over_all(table="section V-D", setting="prompt and answer, most", value=2.04),
    *(
        _row(
            table="section V-C", setting=f"prefill, {which}", machine=SEVERAL, model=SEVERAL, against="PowerInfer",
            device_memory_bytes=device_gb(12), value=value, prompt=1024,
            note="LLaMA-2-70B in 4 bits and LLaMA-2-13B in FP16 on beds A and B",
        )
        for which, value in (("least", 6.9), ("most", 19.2))
    ),
]  # fmt: skip

# threads: over Fiddler, over llama.cpp
_E1 = {16: (1.23, 1.45), 8: (1.29, 1.48), 4: (1.43, 1.63), 2: (2.4, 2.09)}
_THREADS = [
    _row(
        table="section V-E1", setting=f"decode, mean, {threads} threads of the CPU", machine=SEVERAL, model=SEVERAL,
        against=against, value=value, note="models and memory limits not stated",
    )
    for threads, values in _E1.items()
    for against, value in zip(("Fiddler", "llama.cpp"), values, strict=True)
]  # fmt: skip

# threads: mean speed-up of the best r_CG over 0, 0.25, 0.5 and 0.75; the best r_CG of LLaMA-2-70B
_E2 = {16: (1.7, 0.18), 8: (1.4, 0.25), 4: (1.6, 0.42), 2: (2.1, 0.71)}
_E2_NOTE = "r_GG = 0; Mixtral-8x7B at 12 GB and LLaMA-2-70B at 24 GB, both in 4 bits"
_R_NOTE = "r_GG = 0; at 16 threads Table I gives 0.29, and a link of 24.9 GB/s 0.21 (4.0 bits a weight) or 0.19 (4.5)"
_RATES = [
    _row(
        table="section V-E2", setting=f"decode, {threads} threads", machine=BED_A, model=SEVERAL, weights="int4",
        against="fixed r_CG of 0, 0.25, 0.5, 0.75 (mean)", value=speedup, note=_E2_NOTE,
    )
    for threads, (speedup, _) in _E2.items()
] + [
    _row(
        table="section V-E2", setting=f"best r_CG in decode, {threads} threads", machine=BED_A, model="llama-2-70b",
        weights="int4", device_memory_bytes=device_gb(24), metric="share", value=rate,
        note=_R_NOTE if threads == 16 else "r_GG = 0",
    )
    for threads, (_, rate) in _E2.items()
]  # fmt: skip

_E3 = {
    "mixtral-8x7b": {12: 1.07, 16: 1.10, 20: 1.15},
    "llama-2-70b": {24: 1.08, 28: 1.09, 32: 1.12},
}
_ASSIGNMENT = [
    _row(
        table="section V-E3", setting="greedy assignment of device memory", machine=BED_A, model=model, weights="int4",
        device_memory_bytes=device_gb(limit), against="whole layers (r_GG of 0 or 1)", value=value,
    )
    for model, limits in _E3.items()
    for limit, value in limits.items()
]  # fmt: skip

_E4 = {
    ("mixtral-8x7b", 12): {64: 1.9, 256: 5.6, 1024: 19.1},
    ("llama-2-70b", 24): {64: 6.9, 256: 27.6, 1024: 45.6},
}
_TOKENS = [
    _row(
        table="section V-E4", setting="prefill with tokens assigned (n_g)", machine=BED_A, model=model, weights="int4",
        device_memory_bytes=device_gb(limit), against="prefill with decode's slices (n_g = 0)", prompt=prompt,
        value=value,
    )
    for (model, limit), prompts in _E4.items()
    for prompt, value in prompts.items()
]  # fmt: skip

FIGURES: tuple[Published, ...] = (*_RANGES, *_THREADS, *_RATES, *_ASSIGNMENT, *_TOKENS)
