"""FlexGen, from its slides, which show the paper's tables: throughput (Table 2 there), Tables 3, 4 and 8.

All generate 32 tokens for each prompt. Weights and KV are in FP16; "(c)" and `int4` mean both in 4 bits (groups). The
slides' text has lost some decimal points and signs (928 for 9.28), which stand here as their columns demand.
"""

from __future__ import annotations

from functools import partial

from bench.papers.published import T4, Published

_row = partial(Published, paper="FlexGen", machine=T4, output=32)
_MODELS = ("opt-6.7b", "opt-30b", "opt-175b")

# By prompt length, then by system, for the three models; None: out of memory.
_TABLE_2: dict[int, dict[str, tuple[float | None, ...]]] = {
    512: {
        "Accelerate": (25.12, 0.62, 0.01),
        "DeepSpeed": (9.28, 0.60, 0.01),
        "Petals": (8.25, 2.84, 0.08),
        "FlexGen": (25.26, 7.32, 0.69),
        "FlexGen (c)": (29.12, 8.70, 1.12),
    },
    1024: {
        "Accelerate": (13.01, 0.31, 0.01),
        "DeepSpeed": (4.59, 0.29, None),
        "Petals": (6.56, 1.51, 0.06),
        "FlexGen": (13.72, 3.50, 0.35),
        "FlexGen (c)": (13.18, 3.98, 0.42),
    },
}
# Where Table 4 repeats a figure of Table 2 it says the batch: 48×3 and 32×8.
_BATCHES = {("FlexGen", "opt-30b", 512): 144, ("FlexGen", "opt-175b", 512): 256}

# devices, system: with the prompts' time, then decoding alone.
_TABLE_3 = (
    (1, "FlexGen", (25.26, 7.32, 0.69), (38.28, 11.52, 0.83)),
    (4, "FlexGen", (201.12, 23.61, 2.33), (764.65, 48.94, 3.86)),
    (4, "DeepSpeed", (50.00, 6.40, 0.05), (50.20, 6.40, 0.05)),
)

# of OPT-30B and OPT-175B: tokens/s (None: out of memory), (device batch, batches, % of weights on device, % in RAM)
_TABLE_4 = (
    ("all optimisations", (7.32, (48, 3, 20, 80)), (0.69, (32, 8, 0, 50))),
    ("no policy search", (7.26, (48, 3, 0, 100)), (0.27, (32, 1, 0, 50))),
    ("no overlap", (5.86, None), (0.59, None)),
    ("no attention on the CPU", (4.03, None), (0.62, None)),
    ("no disk", (7.32, None), (None, None)),
    ("DeepSpeed's policy", (1.57, None), (0.01, None)),
)

_TABLE_8 = {
    "prefill": {"total": 2711, "compute": 2220, "weights read": 768, "KV written": 261},
    "decode": {"total": 11315, "compute": 1498, "weights read": 3047, "KV read": 7046, "KV written": 124},
}
_TABLE_8_NOTE = "batch not stated; at 256 the totals give 0.58 tokens/s, as Table 4 without overlap (0.59), not 0.69"


def _throughput() -> list[Published]:
    found = []
    for prompt, systems in _TABLE_2.items():
        for system, values in systems.items():
            fmt = "int4" if system.endswith("(c)") else "float16"
            for model, value in zip(_MODELS, values, strict=True):
                if value is None:
                    continue
                note = "rounded by the paper to one digit" if value < 0.02 else ""
                if (system, model, prompt) == ("FlexGen (c)", "opt-30b", 512):
                    note = "the public repository's later table has 8.38"
                found.append(
                    _row(
                        table="throughput (Table 2)", setting="1 device, best policy", system=system, model=model,
                        weights=fmt, kv=fmt, prompt=prompt, batch=_BATCHES.get((system, model, prompt)),
                        metric="throughput", value=value, note=note,
                    )
                )  # fmt: skip
    return found


def _devices() -> list[Published]:
    found = []
    for devices, system, whole, decoding in _TABLE_3:
        setting = "1 device" if devices == 1 else f"a pipeline of {devices} devices"
        of = partial(_row, table="Table 3", setting=setting, system=system, weights="float16", kv="float16", prompt=512)
        for metric, values in (("throughput", whole), ("decode_tokens_per_s", decoding)):
            found += [of(model=model, metric=metric, value=x) for model, x in zip(_MODELS, values, strict=True)]
    return found


def _ablation() -> list[Published]:
    found = []
    of = partial(
        _row, table="Table 4", system="FlexGen", weights="float16", kv="float16", prompt=512, metric="throughput"
    )
    for setting, *columns in _TABLE_4:
        for model, (value, policy) in zip(_MODELS[1:], columns, strict=True):
            if value is None:
                continue
            batch, note = None, ""
            if policy is not None:
                size, count, on_device, in_ram = policy
                batch = size * count
                note = f"{count} device batches of {size}; weights {on_device}% on the device, {in_ram}% in RAM"
            found.append(of(setting=setting, model=model, value=value, batch=batch, note=note))
    return found


def _breakdown() -> list[Published]:
    of = partial(
        _row, table="Table 8", system="FlexGen", model="opt-175b", weights="float16", kv="float16", prompt=512,
        metric="seconds", note=_TABLE_8_NOTE,
    )  # fmt: skip
    return [
        of(setting=f"{stage}, {part}", value=float(value))
        for stage, parts in _TABLE_8.items()
        for part, value in parts.items()  # KV read during prefill is printed as 0
    ]


_busy = partial(
    _row, table="Table 8", system="FlexGen", model="opt-175b", weights="float16", kv="float16", prompt=512,
    metric="share", note=_TABLE_8_NOTE,
)  # fmt: skip
_ratio = partial(_row, system="FlexGen", model="opt-175b", against="the best of DeepSpeed and Accelerate")
_TEXT = [
    _busy(setting="prefill, device busy", value=0.82),
    _busy(setting="decode, device busy", value=0.13),
    _ratio(
        table="Figure 1", setting="best throughput, without compression", weights="float16", kv="float16",
        metric="speedup", value=69.0, note="0.69 over 0.01, which has one digit",
    ),
    _ratio(
        table="Figure 1", setting="best throughput, compressed", weights="int4", kv="int4", metric="speedup",
        value=100.0, note="the caption does not say that this is the compressed one; 1.12 over 0.01 is",
    ),
]  # fmt: skip

# Memory example of the slides: OPT-175B at batch 512, 512 + 32 tokens, in units of 2^30 and 2^40 bytes.
EXAMPLE = {"weights_gib": 325, "kv_tib": 1.2, "kv_over_weights": 3.8, "batch": 512, "prompt": 512, "output": 32}

FIGURES: tuple[Published, ...] = (*_throughput(), *_devices(), *_ablation(), *_breakdown(), *_TEXT)
