"""A made-up machine and small models for tests that compute nothing."""

from __future__ import annotations

from dataclasses import replace

from penstock.spec.machine import Capacity, MachineSpec, Rate
from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec, Rope

MACHINE = MachineSpec(
    name="test",
    tiers=(Capacity("host", 16 << 30), Capacity("disk0", 1 << 40)),
    rates=(
        Rate("host", "*", "*", 1e-6, 1 / 40e9, 1 / 1e12),
        Rate("gpu0", "*", "*", 1e-5, 1 / 400e9, 1 / 20e12),
        Rate("disk0", "*", "*", 5e-5, 1 / 2.9e9),
        Rate("h2d0", "*", "*", 1e-5, 1 / 20e9),
        Rate("d2h0", "*", "*", 1e-5, 1 / 20e9),
    ),
    threads=2,
    process_bytes=64 << 20,
)
# Its lanes have rates above; with memory it is there.
WITH_DEVICE = replace(
    MACHINE, tiers=(*MACHINE.tiers, Capacity("gpu0", 8 << 30)), device_process_bytes=512 << 20, context_bytes=300 << 20
)


def model(
    layers: int = 2, d: int = 128, heads: int = 4, kv_heads: int = 2, neurons: int = 192, **kw: object
) -> ModelSpec:
    layer = Layer(
        Attention(heads, kv_heads, d // heads, (d // heads) ** -0.5, rope=Rope(1e4, d // heads)),
        FfnSpec(neurons, "silu", gated=True),
    )
    fields: dict[str, object] = {"dtype": "float32", "vocab": 256, "max_positions": 2048, "tied": True, **kw}
    return ModelSpec(
        model_type="llama", d_model=d, d_embed=d, layers=(layer,) * layers, norm=NormSpec("rms", 1e-5), final_norm=True,
        **fields,  # type: ignore[arg-type]
    )  # fmt: skip


LLAMA_1B = model(16, 2048, 32, 8, 8192, dtype="bfloat16", vocab=128256, max_positions=131072)
