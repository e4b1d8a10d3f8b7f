"""PIPO: Tables 1 to 6 (appendices C.5 to C.8) and the figures that its text gives.

Lengths are section 4.1's (512 and 32) where a table has none; its batches are from 1 to 32, and Tables 1, 2, 4 and 5 do
not say which. KV is in the host's memory (section 3.1.1) unless `setting` says otherwise; its format is not stated.
"""

from __future__ import annotations

from functools import partial

from bench.papers.published import DESKTOP, LAPTOP, SEVERAL, Published

_row = partial(Published, paper="PIPO", prompt=512, output=32)

_TABLE_1_NOTE = "batch not stated, and above 1: one token of the batch reads "
_70B_NOTE = _TABLE_1_NOTE + "34.7 GB (4.0 bits a weight), PCIe 4.0 x16 carries 31.5 GB/s, a disk's x4 7.9"
_30B_NOTE = _TABLE_1_NOTE + "60 GB; the row repeats the first one's two figures"
_REPEATED = "; the OPT-30B row repeats these two figures"

# model, weights, where the weights are, FlexGen, PIPO, note
_TABLE_1 = (
    ("llama-3.1-70b", "int4", "weights in RAM", 1.113, 1.214, _70B_NOTE + _REPEATED),
    ("llama-3.1-70b", "int4", "weights on disk", 0.497, 1.107, _70B_NOTE),
    ("opt-30b", "float16", "weights on disk", 1.113, 1.214, _30B_NOTE),
)
_PARTIAL = "batch not stated; at batch 1 PCIe 4.0 x16 (31.5 GB/s) would allow {} tokens/s"
_TABLE_2 = (
    ("llama-3.1-70b", "int4", "weights 40% on the device, 60% in RAM", 5.454, 7.718, _PARTIAL.format(1.5)),
    ("opt-30b", "float16", "weights 45% on the device, 55% in RAM", 6.870, 8.665, _PARTIAL.format(0.96)),
)

# context, TTFT of FlexGen and PIPO, seconds a token of FlexGen and PIPO
_TABLE_3 = (
    (512, 2.120, 1.218, 2.074, 0.837),
    (1024, 2.371, 1.717, 2.027, 0.842),
    (1536, 2.686, 2.336, 2.031, 0.857),
    (2048, 3.406, 2.956, 2.266, 0.876),
)
_TABLE_3_NOTE = "int4 assumed (as Figure 10): in bfloat16 a token every 0.837 s would read 17.9 GB/s from the disk"

# where the weights are, where the KV is, FlexGen, PIPO
_TABLE_4 = (
    ("on the device", "on the device", 132.770, 130.716),
    ("on the device", "in RAM", 127.392, 128.551),
    ("in RAM", "on the device", 32.666, 32.636),
    ("in RAM", "in RAM", 31.227, 31.233),
    ("on disk", "on the device", 3.852, 16.982),
    ("on disk", "in RAM", 3.622, 16.307),
)
_TABLE_4_NOTE = (
    "format and batch not stated; at batch 1 the 16.982 from disk would read 10.5 GB/s even at 4.0 bits a weight"
)
_TABLE_5 = (
    ("in RAM", "on the device", 5.497, 6.058),
    ("in RAM", "in RAM", 5.449, 6.009),
    ("on disk", "on the device", 1.926, 4.925),
    ("on disk", "in RAM", 1.765, 4.695),
)
_TABLE_5_NOTE = (
    "int4 assumed: 16 GB of bfloat16 would not fit beside the system; batch not stated, "
    "about 4 times what Table 3 has at batch 1"
)

# where the weights are, where the KV is, system, tokens/s, GB of device memory, GB of the host's
_TABLE_6 = (
    ("on the device", "on the device", "FlexGen", 7.184, 5.424, 8.90),
    ("on the device", "on the device", "PIPO", 9.174, 5.666, 6.30),
    ("on the device", "in RAM", "FlexGen", 6.837, 5.166, 7.90),
    ("on the device", "in RAM", "PIPO", 9.172, 5.342, 7.30),
    ("in RAM", "on the device", "FlexGen", 7.089, 1.796, 16.39),
    ("in RAM", "on the device", "PIPO", 8.151, 1.904, 15.18),
    ("in RAM", "in RAM", "FlexGen", 6.460, 1.438, 16.57),
    ("in RAM", "in RAM", "PIPO", 8.028, 1.486, 16.49),
    ("on disk", "on the device", "FlexGen", 2.276, 1.896, 9.28),
    ("on disk", "on the device", "PIPO", 6.729, 2.012, 6.35),
    ("on disk", "in RAM", "FlexGen", 2.122, 1.438, 9.75),
    ("on disk", "in RAM", "PIPO", 6.428, 1.522, 7.28),
)


def _desktop() -> list[Published]:
    found = []
    for table, lines in (("Table 1", _TABLE_1), ("Table 2", _TABLE_2)):
        for model, weights, setting, flexgen, pipo, note in lines:
            of = partial(_row, table=table, setting=setting, machine=DESKTOP, model=model, weights=weights, note=note)
            found += [of(system=who, metric="throughput", value=x) for who, x in (("FlexGen", flexgen), ("PIPO", pipo))]
    return found


def _latency() -> list[Published]:
    of = partial(
        Published, paper="PIPO", table="Table 3", setting="weights on disk", machine=LAPTOP, model="llama-3.1-8b",
        weights="int4", batch=1, note=_TABLE_3_NOTE,
    )  # fmt: skip
    found = []
    for context, *values in _TABLE_3:
        places = (("FlexGen", "ttft_s"), ("PIPO", "ttft_s"), ("FlexGen", "decode_s"), ("PIPO", "decode_s"))
        for (who, metric), value in zip(places, values, strict=True):
            found.append(of(system=who, metric=metric, value=value, prompt=context))
    return found


def _homes() -> list[Published]:
    found = []
    for table, lines, model, weights, note in (
        ("Table 4", _TABLE_4, "llama-3.2-1b", None, _TABLE_4_NOTE),
        ("Table 5", _TABLE_5, "llama-3.1-8b", "int4", _TABLE_5_NOTE),
    ):
        of = partial(_row, table=table, machine=LAPTOP, model=model, weights=weights, metric="throughput", note=note)
        for home, kv_home, flexgen, pipo in lines:
            setting = f"weights {home}, KV {kv_home}"
            found += [of(setting=setting, system=who, value=x) for who, x in (("FlexGen", flexgen), ("PIPO", pipo))]
    return found


def _memory() -> list[Published]:
    of = partial(
        Published, paper="PIPO", table="Table 6", machine=LAPTOP, model="opt-6.7b", weights="int4", prompt=256,
        output=32, batch=4,
    )  # fmt: skip
    found = []
    for home, kv_home, who, speed, device, host in _TABLE_6:
        for metric, value in (("throughput", speed), ("device_gb", device), ("host_gb", host)):
            found.append(of(setting=f"weights {home}, KV {kv_home}", system=who, metric=metric, value=value))
    return found


_laptop = partial(_row, machine=LAPTOP, system="PIPO")
_ratio = partial(_laptop, metric="speedup", against="FlexGen")
_ablation = partial(
    _ratio, table="Figure 9, appendix C.2", model="opt-13b", weights="int4", batch=4,
)  # fmt: skip
_TEXT = [
    _ratio(table="section 4.2", setting="mean over homes and batches", model="opt-1.3b", value=2.03),
    _ratio(table="section 4.2", setting="weights on disk, most", model=SEVERAL, value=3.10, note="6.7B or 8B models"),
    _ratio(table="section 4.2", setting="INT4 models, mean", model=SEVERAL, weights="int4", value=1.97),
    _ratio(table="section 4.2", setting="INT4 models, most", model=SEVERAL, weights="int4", value=3.04),
    _ratio(table="section 4.2", setting="transfers from disk to device alone", model=SEVERAL, value=1.26),
    _ablation(setting="weights on disk: the pipeline alone", value=1.97, note="the factor is in section 4.2"),
    _ablation(setting="weights on disk: with the transfer suite", value=2.41),
    _ablation(setting="weights on disk: with the kernels as well", value=2.66),
    _laptop(table="section 4.2", setting="device's utilisation", model=SEVERAL, metric="share", value=0.97),
    _row(
        table="section 4.2", setting="device's utilisation", machine=LAPTOP, model=SEVERAL, system="FlexGen",
        metric="share", value=0.36,
    ),
    _laptop(
        table="appendix C.4", setting="weights on disk, KV on the device", model="mixtral-8x7b", weights="int4",
        metric="throughput", value=12.482, note="the best of Figure 12; its batch is not in the text",
    ),
    _laptop(
        table="appendix C.4", setting="weights on disk", model="deepseek-r1-671b", metric="throughput", value=0.13,
        note="format, lengths and batch not stated for this one",
    ),
]  # fmt: skip

FIGURES: tuple[Published, ...] = (*_desktop(), *_latency(), *_homes(), *_memory(), *_TEXT)
