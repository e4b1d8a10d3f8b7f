"""PowerInfer: the figures of its text and Tables 1, 3, 4, 5, 6, 8 and 9.

Batch 1 unless `batch` says otherwise (section 8.2); prompts of 8 to 128 tokens; the lengths in pictures are not in the
text. KV stays in the host's memory (section 7), activations are in FP32. OPT-7B is OPT-6.7B.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.papers.published import PC_HIGH, PC_LOW, SEVERAL, Published

_row = partial(Published, paper="PowerInfer", system="PowerInfer")
_A100 = "a100-80gb"


def _ratio(table: str, setting: str, machine: str, value: float, **facts: Any) -> Published:
    defaults: dict[str, Any] = {"model": SEVERAL, "against": "llama.cpp", "batch": 1}
    return _row(table=table, setting=setting, machine=machine, metric="speedup", value=value, **(defaults | facts))


def _speed(table: str, setting: str, machine: str, value: float, **facts: Any) -> Published:
    defaults: dict[str, Any] = {"model": SEVERAL, "batch": 1}
    return _row(table=table, setting=setting, machine=machine, metric="throughput", value=value, **(defaults | facts))


_F16: dict[str, Any] = {"weights": "float16"}
_INT4: dict[str, Any] = {"weights": "int4"}
_FALCON: dict[str, Any] = {"model": "falcon-relu-40b", "weights": "float16"}
_8_TIMES = "section 1 ascribes the 8.00 to a PC with an RTX 4090, section 8.2 to PC-Low"

_END_TO_END = [
    _speed("Figure 10, section 8.2", "mean", PC_HIGH, 8.32, **_F16),
    _speed("Figure 10, section 8.2", "most", PC_HIGH, 16.06, **_F16),
    _ratio("Figure 10, section 8.2", "mean", PC_HIGH, 7.23, **_F16),
    _ratio("Figure 10, section 8.2", "mean", PC_HIGH, 6.19, against="SpecInfer", **_F16),
    _ratio("Figure 10, section 8.2", "most", PC_HIGH, 11.69, **_FALCON),
    _ratio("Figure 11, section 8.2", "mean", PC_LOW, 4.71, **_F16),
    _ratio("Figure 11, section 8.2", "mean", PC_LOW, 5.97, against="SpecInfer", **_F16),
    _ratio("Figure 11, section 8.2", "most", PC_LOW, 7.06, **_F16),
    _ratio("Figure 11, section 8.2", "most", PC_LOW, 7.47, against="SpecInfer", **_F16),
    _ratio("section 8.2", "long prompts, answers below 8 tokens, least", SEVERAL, 1.07, **_F16),
    _ratio("section 8.2", "long prompts, answers below 8 tokens, most", SEVERAL, 4.0, **_F16),
    _speed("Figure 13, section 8.2", "mean", PC_HIGH, 13.20, **_INT4),
    _speed("Figure 13, section 8.2", "most", PC_HIGH, 29.08, **_INT4),
    _ratio("Figure 13, section 8.2", "mean", PC_HIGH, 2.89, **_INT4),
    _ratio("Figure 13, section 8.2", "most", PC_HIGH, 4.28, **_INT4),
    _ratio("Figure 13, section 8.2", "mean", PC_LOW, 5.01, **_INT4),
    _ratio("Figure 13, section 8.2", "most", PC_LOW, 8.00, note=_8_TIMES, **_INT4),
    _speed("section 8.2", "OPT-175B", PC_HIGH, 2.0, model="opt-175b", note="the text: nearly two", **_INT4),
    _ratio("section 8.2", "OPT-175B", PC_HIGH, 2.66, model="opt-175b", **_INT4),
    _ratio("Figure 14, section 8.2", "mean over batches below 32", PC_HIGH, 6.08, **(_FALCON | {"batch": None})),
    _ratio("Figure 14, section 8.2", "batch of 32", PC_HIGH, 4.38, **(_FALCON | {"batch": 32})),
]

_BAMBOO: dict[str, Any] = {"model": "bamboo-7b"}
_STEPS = (("with predictors and operators", 1.87, 3.32), ("with the hybrid engine", 2.60, 7.80),
          ("with the placement policy", 3.62, 11.69))  # fmt: skip
_BREAKDOWN = [
    _ratio("Figure 15, section 8.3.1", setting, machine, value, **facts)
    for setting, low, high in _STEPS
    for machine, value, facts in ((PC_LOW, low, _BAMBOO), (PC_HIGH, high, _FALCON))
]

# model, llama.cpp, PowerInfer (printed as ms; they are seconds), speed-up
_TABLE_4 = (
    ("relullama-13b", 49.91, 14.38, 3.47),
    ("falcon-relu-40b", 321.63, 56.48, 5.69),
    ("relullama-70b", 92.76, 37.17, 2.50),
)
_T4_NOTE = "printed as ms, must be s (256 tokens); 1.5K taken as 1536"
_70B_NOTE = (
    "; FP16 as printed, yet 138 GB less 24 on the device over 67.2 GB/s are 1.7 s a token, 430 s an answer: "
    "the row fits a 4-bit model"
)


def _long_prompts() -> list[Published]:
    found = []
    for model, llama_cpp, power_infer, ratio in _TABLE_4:
        note = _T4_NOTE + (_70B_NOTE if model == "relullama-70b" else "")
        of = partial(
            Published, paper="PowerInfer", table="Table 4", setting="long prompt", machine=PC_HIGH, model=model,
            weights="float16", prompt=1536, output=256, batch=1, note=note,
        )  # fmt: skip
        found.append(of(system="llama.cpp", metric="latency_s", value=llama_cpp))
        found.append(of(system="PowerInfer", metric="latency_s", value=power_infer))
        found.append(of(system="PowerInfer", metric="speedup", value=ratio, against="llama.cpp"))
    return found


# task: mean, 95th and 99th percentile in ms
_TABLE_5 = {
    "STEM": (38.05, 40.75, 42.33),
    "HumanEval": (36.71, 40.48, 42.37),
    "role play": (37.08, 40.61, 43.87),
    "table extraction": (37.42, 40.74, 42.93),
}
_TASKS = [
    _row(
        table="Table 5", setting=f"{task}, {which}", machine=PC_LOW, model="bamboo-7b", batch=1, metric="decode_s",
        value=ms / 1e3, note="format not stated",
    )
    for task, values in _TABLE_5.items()
    for which, ms in zip(("mean", "95th percentile", "99th percentile"), values, strict=True)
]  # fmt: skip

# machine, model, PowerInfer, llama.cpp, speed-up
_TABLE_8 = (
    (PC_HIGH, "yi-1.5-34b", 1.7, 1.0, 1.7),
    (PC_LOW, "llama-2-13b", 3.1, 2.1, 1.5),
    (PC_HIGH, "opt-30b", 12.0, 1.1, 10.9),
)
_T8_NOTE = "lengths not stated; FP16 assumed: in 4 bits the last two would fit the device, and not be as slow"
_GATED_NOTE = {"yi-1.5-34b": "; Yi-34B, of the sizes of Yi-1.5-34B", "llama-2-13b": "; the text has 1.47"}


def _silu() -> list[Published]:
    found = []
    for machine, model, power_infer, llama_cpp, ratio in _TABLE_8:
        of = partial(
            Published, paper="PowerInfer", table="Table 8", setting="SwiGLU beside ReLU", machine=machine, model=model,
            weights="float16", batch=1, note=_T8_NOTE + _GATED_NOTE.get(model, ""),
        )  # fmt: skip
        found.append(of(system="PowerInfer", metric="throughput", value=power_infer))
        found.append(of(system="llama.cpp", metric="throughput", value=llama_cpp))
        found.append(of(system="PowerInfer", metric="speedup", value=ratio, against="llama.cpp"))
    return found


_T9_NOTE = "machine and format not stated; PC-High assumed: 14 GB of FP16 in 18.54 ms is more than PC-Low's GPU reads"
_SMALL = [
    Published(
        paper="PowerInfer", table="Table 9", setting=setting, system=system, machine=PC_HIGH, model=model, batch=1,
        metric="decode_s", value=ms / 1e3, note=_T9_NOTE,
    )
    for setting, system, model, ms in (
        ("a smaller model", "not stated", "qwen1.5-4b", 10.83),
        ("sparse", "PowerInfer", "bamboo-7b", 11.85),
        ("dense", "not stated", "bamboo-7b", 18.54),
    )
]  # fmt: skip

# prompt: (llama.cpp, PowerInfer) of OPT-30B, then of Falcon-40B; None: not in the text
_FIGURE_18: dict[int, dict[str, tuple[float | None, float]]] = {
    1: {"opt-30b": (0.93, 0.18), "falcon-relu-40b": (0.92, 0.23)},
    64: {"opt-30b": (None, 0.28), "falcon-relu-40b": (None, 0.29)},
}
_SERVER = [
    Published(
        paper="PowerInfer", table="Figure 18, section 8.3.5", setting="speed missing to an A100", system=system,
        machine=PC_HIGH, model=model, weights="float16", prompt=prompt, batch=1, metric="slowdown", value=value,
        against="vLLM on an A100 (80 GB)",
    )
    for prompt, models in _FIGURE_18.items()
    for model, values in models.items()
    for system, value in zip(("llama.cpp", "PowerInfer"), values, strict=True)
    if value is not None
]  # fmt: skip

_OPT30 = partial(Published, paper="PowerInfer", table="section 2.2", model="opt-30b", weights="float16", batch=1)
_MOTIVATION = [
    _OPT30(setting="Figure 3", system="llama.cpp", machine=PC_HIGH, metric="decode_s", value=0.6,
           note="the text: around 600 ms; Table 8 has 1.1 tokens/s, which is 909 ms"),
    _OPT30(setting="all in device memory", system="not stated", machine=_A100, metric="decode_s", value=0.045),
    _OPT30(setting="weights in device memory", system="llama.cpp", machine=PC_HIGH, metric="share", value=0.37),
    _OPT30(setting="time spent by the CPU", system="llama.cpp", machine=PC_HIGH, metric="share", value=0.98),
    _OPT30(setting="time spent on the link", system="FlexGen", machine=PC_HIGH, metric="share", value=0.995),
]  # fmt: skip

_LOAD = [
    Published(
        paper="PowerInfer", table="Figure 12, section 8.2", setting="active neurons that the device computes",
        system=system, machine=machine, model=SEVERAL, metric="share", value=value, note=note,
    )
    for system, machine, value, note in (
        ("llama.cpp", PC_HIGH, 0.20, "mean"),
        ("PowerInfer", PC_HIGH, 0.70, "mean"),
        ("PowerInfer", PC_LOW, 0.42, "a model of 60 GB"),
    )
]  # fmt: skip

# Table 3 (Table 1 has OPT-30B, LLaMA2-13B and Yi-34B). SwiGLU: what may be left out with below 1% of perplexity.
_SPARSITY = (
    ("Table 1", "opt-30b", "", 0.97),
    ("Table 3", "bamboo-7b", "", 0.90),
    ("Table 3", SEVERAL, "OPT of 7B to 175B, least", 0.96),
    ("Table 3", SEVERAL, "OPT of 7B to 175B, most", 0.98),
    ("Table 3", "falcon-relu-40b", "", 0.95),
    ("Table 3", "relullama-7b", "", 0.70),
    ("Table 3", "relullama-13b", "", 0.78),
    ("Table 3", "relullama-70b", "", 0.82),
    ("Table 3", "qwen1.5-4b", "", 0.40),
    ("Table 3", "llama-2-13b", "", 0.43),
    ("Table 3", "yi-1.5-34b", "", 0.53),
)
# Share of the neurons that make 80% of the activations: in one FFN, over the model.
_HOT = {"opt-30b": (0.26, 0.17), "relullama-70b": (0.43, 0.26), "llama-2-70b": (0.69, 0.75)}
_PREDICTORS = {"opt-13b": 0.88e9, "opt-66b": 3.23e9, "falcon-relu-40b": 3.63e9, "relullama-70b": 5.66e9}
_ACTIVITY = [
    *(
        _row(table=table, setting=setting or "mean", machine=SEVERAL, model=model, metric="sparsity", value=value)
        for table, model, setting, value in _SPARSITY
    ),
    *(
        _row(
            table="Figure 4, section 3.1", setting=f"neurons with 80% of the activations, {where}", machine=SEVERAL,
            model=model, metric="share", value=value,
        )
        for model, values in _HOT.items()
        for where, value in zip(("one FFN", "the model"), values, strict=True)
    ),
    *(
        _row(table="Table 6", setting="all layers", machine=SEVERAL, model=model, metric="predictor_weights", value=n)
        for model, n in _PREDICTORS.items()
    ),
]  # fmt: skip

FIGURES: tuple[Published, ...] = (
    *_END_TO_END, *_BREAKDOWN, *_long_prompts(), *_TASKS, *_silu(), *_SMALL, *_SERVER, *_MOTIVATION, *_LOAD, *_ACTIVITY,
)  # fmt: skip
