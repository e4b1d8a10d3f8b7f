"""Models that stand for others, where a figure's system has no plan in penstock of the model itself.

**Experts.** PIPO streams experts to the device, and ScheInfer slices each expert in three: penstock's plans have
neither. A pass over a routed FFN reads the experts that its rows go to, once each, and multiplies every row by
`active` of them. A dense FFN as wide as those experts reads as many bytes, and its products take as long on a machine
that computes them so much faster (`sparing`). Routing is taken to be uniform and each row to draw for itself, since no
paper says otherwise: of E experts E · (1 - (1 - A / E)^rows) are wanted. What is lost: nothing of a layer's experts can
be brought before its router has spoken, which the stand-in's ring does.

**DeepSeek-R1** has latent attention, **Bamboo-7B** a ReLU on both gate and up: the spec cannot say either. The first
has attention of as many weights and as much KV, the second a ReLU on its gate alone and the paper's sparsity.
**Falcon(ReLU)-40B** is Falcon-40B with a ReLU, whose own config.json was not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from penstock.serve.planning import describe
from penstock.spec.machine import MachineSpec
from penstock.spec.model import FfnSpec, Layer, ModelSpec, Routed
from penstock.spec.parts import GRANULE_ROWS
from penstock.spec.places import CPU, GPU

_PRODUCTS = ("float16", "bfloat16", "int8", "int4")


def wanted(routed: Routed, rows: int) -> float:
    """Experts that so many rows go to, where all are as likely."""
    return routed.experts * (1 - (1 - routed.active / routed.experts) ** rows)


def dense(spec: ModelSpec, rows: int) -> ModelSpec:
    """The spec whose FFNs are as wide as what a pass of so many rows reads, a shared expert included. `rows` 0: all
    experts."""
    return replace(spec, layers=tuple(replace(layer, ffn=_wide(layer, rows)) for layer in spec.layers), cannot_run="")


def _wide(layer: Layer, rows: int) -> FfnSpec:
    routed = layer.routed
    if routed is None:
        assert isinstance(layer.ffn, FfnSpec)
        return layer.ffn
    experts = wanted(routed, rows) if rows else routed.experts
    neurons = round(experts * routed.expert.neurons / GRANULE_ROWS) * GRANULE_ROWS + shared_neurons(routed)
    return replace(routed.expert, neurons=neurons)


def shared_neurons(routed: Routed) -> int:
    """Of the expert that every row goes to."""
    return routed.shared.neurons if routed.shared is not None else 0


def sparing(machine: MachineSpec, spec: ModelSpec, rows: int) -> MachineSpec:
    """The machine on which the products of `dense(spec, rows)` take as long as those of the rows' own experts: most
    experts are multiplied with some rows alone. Models whose routed layers differ have the first one's share."""
    layer = next(each for each in spec.layers if each.routed is not None)
    routed = layer.routed
    assert routed is not None
    share = (routed.active * routed.expert.neurons + shared_neurons(routed)) / _wide(layer, rows).neurons
    rates = list(machine.rates)
    for lane in (GPU.kernels, CPU):
        for name in _PRODUCTS:
            counts = {rate.rows for rate in machine.rates if rate.lane == lane and rate.format == name}
            for count in sorted(counts):
                rate = machine.rate(lane, "ffn", name, count or 1 << 20)
                key = (lane, "ffn", name, count)
                rates = [each for each in rates if (each.lane, each.op, each.format, each.rows) != key]
                rates.append(replace(rate, op="ffn", format=name, rows=count, s_per_flop=rate.s_per_flop * share))
    return replace(machine, rates=tuple(rates))


def _deepseek_r1() -> ModelSpec:
    """61 layers of 7168, of which 3 are dense (18432 wide); the others have 256 experts of 2048, 8 active, and a shared
    one (DeepSeek-V3's config.json). Latent attention has 187.1e6 weights a layer, and keeps 576 numbers a token: 200
    heads of 64 with 4 KV heads are 187.2e6 and 512."""
    spec, _ = describe(Path("mixtral-8x7b"), to_plan=True)
    layer = spec.layers[0]
    routed = layer.routed
    assert routed is not None
    attention = replace(layer.attention, heads=200, kv_heads=4, head_dim=64, scale=64**-0.5, rope=None)
    expert = replace(routed.expert, neurons=2048)
    experts = replace(routed, experts=256, active=8, expert=expert, shared=expert)
    first = replace(layer, attention=attention, ffn=replace(routed.expert, neurons=18432))
    rest = replace(layer, attention=attention, ffn=experts)
    return replace(spec, vocab=129280, d_model=7168, d_embed=7168, layers=(first,) * 3 + (rest,) * 58)


def _bamboo() -> ModelSpec:
    """Mistral-7B with ReLUs (PowerInfer, section 7)."""
    spec, _ = describe(Path("mistral-7b-v0.3"), to_plan=True)
    layers = (replace(layer, ffn=replace(layer.ffns[0], activation="relu")) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def _falcon() -> ModelSpec:
    spec, _ = describe(Path(__file__).parent / "data" / "falcon-relu-40b.json", to_plan=True)
    return spec


STAND_INS: Mapping[str, Callable[[], ModelSpec]] = {
    "deepseek-r1-671b": _deepseek_r1, "bamboo-7b": _bamboo, "falcon-relu-40b": _falcon,
}  # fmt: skip
