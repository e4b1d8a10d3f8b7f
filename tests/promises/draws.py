"""Draws cases of `tests.promises`: a real shape in any format, a machine with other memories, and an ask."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import penstock
from penstock.planner.firing import Firing, expected
from penstock.planner.routing import RouterTrace, stated_firing
from penstock.planner.solve import Solved, solve
from penstock.serve import shapes
from penstock.serve.planning import describe
from penstock.spec import machine as machines
from penstock.spec.ask import Ask
from penstock.spec.format import Format, mixture, parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.parts import MIXED, parts
from penstock.spec.places import GPU
from penstock.units import GIB

MACHINES = sorted((Path(penstock.__file__).parent / "machines").glob("*.json"))
FORMATS = (
    "int4", "int4", "int4", "int8", "float16", "bf16", "int4-g32", "float8", "q4_0", "q8_0", "q4_k", "q6_k", "iq4_xs",
    "mxfp4", "q4_k_m", "q4_k_m", "q5_1",
)  # fmt: skip
_AS_Q4_K_M = "q4_k_m"
CONTEXTS = (None, None, None, 300, 1024, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Case:
    """`weights`: a format, or "own" for that of the config. `device_bytes`: of device memory; 0 without a device, None
    for the machine's own. `stated`: it is taken to be known which neurons fire, as PowerInfer publishes."""

    number: int
    shape: str
    machine: str
    weights: str
    device_bytes: int | None
    stated: bool
    ask: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        device = "" if self.device_bytes is None else f", device of {self.device_bytes / GIB:.2f} GiB"
        asked = ", ".join(f"{name}={value!r}" for name, value in self.ask.items())
        known = ", firing known" if self.stated else ""
        return f"case {self.number}: {self.shape} in {self.weights} on {self.machine}{device}{known}; {asked}"


@dataclass(frozen=True)
class Setting:
    """What `solve` takes."""

    ask: Ask
    spec: ModelSpec
    weights: Format
    machine: MachineSpec
    trace: RouterTrace | None = None
    firing: Firing | None = None

    def asking(self, **changes: Any) -> Setting:
        return replace(self, ask=replace(self.ask, **changes))

    def solve(self) -> Solved:
        return solve(self.ask, self.spec, self.weights, self.machine, trace=self.trace, firing=self.firing)


def draw(number: int) -> Case:
    rng = random.Random(number)
    shape, machine = rng.choice(shapes.names()), rng.choice(MACHINES).stem
    relu = shape.startswith(("opt", "relullama"))
    context = rng.choice(CONTEXTS)
    ask: dict[str, Any] = {
        "prompt_tokens": rng.choice((1, 16, 64, 200, 512, 2000, 4000)),
        "output_tokens": rng.choice((1, 16, 64, 256, 1000)),
        "batch": rng.choice((1, 1, 1, 1, 2, 4, 8, 32)),
        "objective": rng.choice(("latency", "latency", "latency", "throughput")),
    }
    if context is not None:
        ask["context"] = context
    if rng.random() < 0.8:
        ask["host_memory_bytes"] = int(2 ** rng.uniform(29, 36))
    if rng.random() < 0.2:
        ask["kv"] = rng.choice(("int8", "int4", "float32", "bf16"))
    if rng.random() < 0.15:
        ask["kv_home"] = rng.choice(("disk", "memory"))
    if rng.random() < 0.15:
        ask["attention"] = f"top-k:{rng.choice((0.1, 0.5))}"
        ask.pop("kv_home", None)
    if rng.random() < 0.1:
        ask["resident_bytes"] = int(2 ** rng.uniform(26, 36))
    if ask["batch"] > 1 and rng.random() < 0.3:
        ask["kv_tokens"] = rng.choice((1000, 8000, 40000))
    if relu:
        ask["sparsity"] = rng.choice(("auto", "off", "exact", "predict"))
    weights = "own" if shape.startswith("gpt-oss") and rng.random() < 0.7 else rng.choice(FORMATS)
    if relu and rng.random() < 0.5:
        weights = rng.choice(("int4-neurons", "int4-records", "float16-records"))
    device = rng.choice((None, None, 0, int(rng.uniform(0.3, 24) * GIB)))
    return Case(number, shape, machine, weights, device, relu and rng.random() < 0.5, ask)


def setting(case: Case) -> Setting:
    """Raises BadRequest where the case makes no sense."""
    spec, own = _described(case.shape)
    if case.weights == "own":
        weights = own
    else:
        weights = _q4_k_m(spec) if case.weights == _AS_Q4_K_M else parse_format(case.weights)
    trace = stated_firing(spec) if case.stated else None
    firing = expected(spec) if case.stated else None
    of = with_device(_machine(case.machine), case.device_bytes)
    return Setting(Ask(**case.ask), spec, weights, of, trace, firing)


def with_device(machine: MachineSpec, device_bytes: int | None) -> MachineSpec:
    """The machine with so much device memory, if it has a device; None: as it is."""
    if device_bytes is None:
        return machine
    tiers = tuple(
        replace(tier, bytes=device_bytes or tier.bytes)
        for tier in machine.tiers
        if tier.name != GPU.executor or device_bytes > 0
    )
    return replace(machine, tiers=tiers)


@cache
def _described(shape: str) -> tuple[ModelSpec, Format]:
    return describe(Path(shape), to_plan=True)


@cache
def _machine(name: str) -> MachineSpec:
    path = next(path for path in MACHINES if path.stem == name)
    return machines.loads(path.read_text(), name)


@cache
def _q4_k_m(spec: ModelSpec) -> Format:
    """As llama.cpp's Q4_K_M: values and `down` of half of the layers, and the head, in q6_k."""
    most, better, table = parse_format("q4_k"), parse_format("q6_k"), dict[str, Format]()
    for part in parts(spec, most):
        for block in part.blocks if part.kind in MIXED else ():
            if block.tiled:
                finer = part.kind == "head" or (block.name in ("v", "down") and part.layer % 2 == 0)
                table[f"{part.key}.{block.name}"] = better if finer else most
    return mixture(table, _AS_Q4_K_M)
