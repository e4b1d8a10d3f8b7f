"""Random models, machines and asks that FlexGen's policy search is tried on."""

from __future__ import annotations

import os
import random
from math import exp, log

from bench.papers.flexgen import kv_bytes, weight_bytes
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import Capacity, MachineSpec, Rate, Sharing
from penstock.spec.model import ModelSpec
from penstock.spec.places import GPU
from penstock.units import MIB, TIB
from tests.pure.machine import model

FP16 = Format("float16")
FUZZ = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
CASES = 1000 if FUZZ else 100

Case = tuple[Ask, ModelSpec, Format, MachineSpec]


def between(r: random.Random, low: float, high: float) -> float:
    """Log-uniform."""
    return exp(r.uniform(log(low), log(high)))


def random_machine(r: random.Random, weights: float, kv: float, device: bool) -> MachineSpec:
    """Any rates from a slow laptop's to a server's. RAM has room for 0.1 to 1 of weights and 0 to 1 of KV, the device
    for 0 to 0.7 of each: so that there is something to place."""

    def rate(lane: str, op: str, bytes_per_s: float, flops_per_s: float = 0.0, alpha_s: float = 3e-6) -> Rate:
        s_per_flop = 1 / flops_per_s if flops_per_s else 0.0
        return Rate(lane, op, "*", alpha_s * between(r, 1 / 3, 3), 1 / bytes_per_s, s_per_flop)

    def processor(lane: str, bytes_per_s: tuple[float, float], flops_per_s: tuple[float, float]) -> list[Rate]:
        overhead = Rate(lane, "task", "*", between(r, 1e-6, 2e-5), 0.0)
        ops = (rate(lane, op, between(r, *bytes_per_s), between(r, *flops_per_s)) for op in ("*", "attend"))
        return [*ops, overhead]

    rates = [
        *processor("host", (5e9, 200e9), (5e10, 5e12)),
        Rate("host", "call", "*", between(r, 1e-6, 1e-5), 0.0),
        Rate("host", "pass", "*", between(r, 1e-5, 3e-4), 0.0),
        rate("disk0", "*", between(r, 0.3e9, 10e9), alpha_s=5e-5),
        rate("disk_write0", "*", between(r, 0.3e9, 5e9), alpha_s=5e-5),
    ]
    base = 150 * MIB
    tiers = [Capacity("host", int(base + weights * r.uniform(0.1, 1) + kv * r.uniform(0, 1))), Capacity("disk0", TIB)]
    if device:
        rates += processor(GPU.executor, (50e9, 2000e9), (2e12, 100e12))
        rates += [rate(lane, "*", between(r, 2e9, 60e9)) for lane in ("h2d0", "d2h0")]
        tiers.append(Capacity(GPU.executor, int(base + weights * r.uniform(0, 0.7) + kv * r.uniform(0, 0.7))))
    shared = [Sharing("host", lane, r.uniform(1, 1.5)) for lane in ("disk0", "h2d0", "d2h0")]
    return MachineSpec(
        "random",
        tuple(tiers),
        tuple(rates),
        8,
        process_bytes=64 * MIB,
        sharing=tuple(shared if r.random() < 0.5 else ()),
    )


def random_case(seed: int, **fields: bool) -> Case:
    """A small model, but not a tiny one: where a layer's bytes take no longer than a move's fixed part, cutting it into
    units is what costs, and plans of this solver are none that anybody needs."""
    r = random.Random(seed)
    d = r.choice((1024, 2048, 3072))
    heads = d // 128
    kv_heads = r.choice((heads, max(1, heads // 4)))
    spec = model(
        r.choice((12, 16, 24)), d, heads, kv_heads, 4 * d, dtype="float16", max_positions=4096,
        vocab=r.choice((2048, 8192)),
    )  # fmt: skip
    fmt = r.choice((FP16, parse_format("int4")))
    prompt, output, batch = r.choice((32, 64, 128, 256)), r.choice((16, 32, 64)), r.choice((4, 8, 12, 16, 24))
    ask = Ask(prompt, output, batch, prompt + output, "throughput")
    kv = kv_bytes(spec, FP16, batch, prompt + output)
    device = fields.get("device", r.random() < 0.7)
    return ask, spec, fmt, random_machine(r, weight_bytes(spec, fmt), kv, device)
