"""Models whose matrices have several number formats: one table of them in parts, plans, packed models and costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import BadRequest
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.passes import decode
from penstock.graph.resident import resident_plan
from penstock.planner.cost import Cost
from penstock.planner.predict import predict
from penstock.planner.shorten import quick, short
from penstock.planner.solve import settle_context
from penstock.planner.solve.ours import ram
from penstock.planner.solve.problem import Problem
from penstock.planner.what_if import other_formats
from penstock.spec import plan as plans
from penstock.spec.ask import Ask
from penstock.spec.format import FLOAT32, Format, Mixed, Share, kinds_name, mixture, parse_format
from penstock.spec.machine import Capacity, MachineSpec, Rate
from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec, Rope
from penstock.spec.parts import MIXED, parts
from penstock.store import manifest as manifests
from penstock.units import MIB
from tests.pure.machine import MACHINE

Q4_K, Q6_K = parse_format("q4_k"), parse_format("q6_k")
LAYER = Layer(Attention(8, 4, 64, 0.125, rope=Rope(1e4, 64)), FfnSpec(512, "silu", True))
SPEC = ModelSpec("llama", "float16", 300, 256, 256, 4096, (LAYER,) * 3, NormSpec("rms", 1e-5), True, False)


def table(spec: ModelSpec = SPEC) -> dict[str, Format]:
    """As llama.cpp's Q4_K_M has it: `v` and `down` of some layers, and the head, in q6_k."""
    found = {
        f"{part.key}.{block.name}": Q4_K
        for part in parts(spec, Q4_K) if part.kind in MIXED for block in part.blocks if block.tiled
    }  # fmt: skip
    return found | {"0.attn.v": Q6_K, "0.ffn.down": Q6_K, "2.ffn.down": Q6_K, "head.rows": Q6_K}


MIXTURE = mixture(table(), "Q4_K_M")


def test_a_mixture_is_a_table_of_blocks() -> None:
    assert isinstance(MIXTURE, Mixed) and MIXTURE.name == "q4_k_m" and MIXTURE.kind == "q4_k"
    formats = {f"{p.key}.{b.name}": b.format for p in parts(SPEC, MIXTURE) if p.kind in MIXED for b in p.blocks}
    assert formats == table()
    assert mixture(dict.fromkeys(table(), Q6_K), "q4_k_m") == Q6_K  # all alike
    assert mixture({"a.b": Q4_K, "c.d": Q4_K, "e.f": Q6_K}, "Q4_K").name == "q4_k+q6_k"  # a format has that name
    bias = replace(SPEC, layers=(replace(LAYER, attention=replace(LAYER.attention, qkv_bias=True)),))
    part = next(p for p in parts(bias, MIXTURE) if p.kind == "attn")
    assert part.block("q_bias").format == FLOAT32 and kinds_name(part.kinds()) == "q4_k+q6_k"


def test_layers_of_a_mixture_that_are_alike_are_predicted_by_few_of_them() -> None:
    """As in gpt-oss, whose experts are in another format than all else. Layers that differ are simulated themselves."""
    ffn = replace(LAYER.ffns[0], neurons=1 << 14)
    spec = replace(SPEC, layers=(replace(LAYER, ffn=ffn),) * 60)
    of_kinds = {name: Q6_K if ".ffn." in name else Q4_K for name in table(spec)}
    ask = settle_context(Ask(prompt_tokens=40, output_tokens=8, context=300, host_memory_bytes=300 * MIB), spec)
    for formats, few in ((of_kinds, True), (of_kinds | {"7.ffn.down": Q4_K}, False)):
        candidates = ram.candidates(Problem(ask, spec, mixture(formats), MACHINE), near_ring_bytes=8 * MIB)
        plan = next(each.plan for each in candidates)
        assert (len(short(plan).target.spec.layers) < 30) == few
        told, whole = quick(plan, ask, MACHINE, spread=False), predict(plan, ask, MACHINE, spread=False)
        assert told.total_s == pytest.approx(whole.total_s, rel=0.03 if few else 1e-12)


def test_a_mixture_of_nothing_is_refused() -> None:
    with pytest.raises(BadRequest, match="unknown number format 'zzz'"):
        mixture({}, "zzz")


def test_no_device_reads_a_mixture() -> None:
    """Its kernels go by the format of a part's first matrix."""
    floats = mixture({"0.attn.q": Format("float16"), "0.attn.k": FLOAT32, "0.attn.v": FLOAT32})
    assert floats.for_cpu and MIXTURE.for_cpu and Q4_K.for_cpu and not FLOAT32.for_cpu


def test_a_router_in_float32_makes_no_float32_model() -> None:
    wide = replace(SPEC, dtype="float32")
    for weights, kind in (
        (Q4_K, "float16"),
        (MIXTURE, "float16"),
        (FLOAT32, "float32"),
        (Format("int4", 64), "float32"),
    ):
        assert Problem(Ask(), wide, weights, MACHINE).kv.kind == kind


def test_no_other_format_is_recommended_for_a_quantised_file() -> None:
    ask = Ask(context=128)
    assert other_formats(Problem(ask, SPEC, MIXTURE, MACHINE)) == other_formats(Problem(ask, SPEC, Q4_K, MACHINE)) == []
    assert other_formats(Problem(ask, SPEC, Format("int4", 64), MACHINE))


def test_bytes_are_those_of_each_format() -> None:
    by_key = {part.key: part for part in parts(SPEC, MIXTURE)}
    assert by_key["0.attn"].block("v").nbytes == 64 * 210 and by_key["1.attn"].block("v").nbytes == 64 * 144
    assert by_key["1.attn"].block("o").nbytes == 256 * 76  # 128 columns of a KV head: 4.75 bits a weight
    # 4.5 bits a weight, as in the file.
    assert by_key["1.ffn"].granule_rows == 256 and by_key["1.ffn"].block("down").nbytes == 256 * 144


def test_plans_and_packed_models_keep_the_table() -> None:
    plan = resident_plan(SPEC, MIXTURE, kv=Format("float16"), context=64)
    again = plans.loads(plans.dumps(plan), "plan.json")
    assert again == plan and again.target.weights == MIXTURE
    listed = tuple(manifests.describe(part, "model-00001.safetensors", 0) for part in parts(SPEC, MIXTURE))
    assert manifests.formats(manifests.Manifest(MIXTURE.name, 0, listed)) == MIXTURE
    alike = tuple(manifests.describe(part, "model-00001.safetensors", 0) for part in parts(SPEC, Q4_K))
    assert manifests.formats(manifests.Manifest("q4_k", 0, alike)) == Q4_K
    with pytest.raises(BadRequest, match="unknown number format 'q4_k_m'"):
        manifests.formats(manifests.Manifest("q4_k_m", 0, alike))


def test_a_call_costs_the_sum_over_its_formats() -> None:
    def rate(kind: str, s_per_byte: float, s_per_flop: float) -> Rate:
        return Rate("host", "*", kind, 1e-6, s_per_byte, s_per_flop)

    rates = (
        rate("q4_k", 1e-9, 1e-12),
        rate("q6_k", 3e-9, 5e-12),
        rate("*", 1e-9, 0.0),
        Rate("disk0", "*", "*", 0, 1e-9),
    )
    cost = Cost(MachineSpec("m", (Capacity("host", 1 << 30), Capacity("disk0", 1 << 30)), rates, 2))
    plan = resident_plan(SPEC, MIXTURE, kv=Format("float16"), context=64)
    (task,) = Lowering(plan).step(decode(plan, (0,), (3,), None))
    call = next(call for call in task.calls if call.op == "ffn")
    part = plan.parts["0.ffn"]
    down = part.block("down").nbytes
    share = down / sum(part.block(name).nbytes for name in ("gate", "up", "down"))
    assert call.format == (Share("q4_k", pytest.approx(1 - share), pytest.approx(2 / 3)), Share("q6_k", share, 1 / 3))
    q6_bytes = part.granules * down
    want_s = 1e-9 * (call.bytes - q6_bytes) + 3e-9 * q6_bytes
    assert sum(cost.call_parts_s("host", call)) == pytest.approx(1e-6 + want_s)
    assert sum(seconds for _, seconds in cost.by_figure("host", task)) == pytest.approx(cost.seconds(task))


def test_a_format_that_nobody_measured_is_like_int4() -> None:
    rates = (
        Rate("host", "ffn", "int4", 1e-6, 2e-9, 1e-12),
        Rate("host", "*", "*", 0, 1e-9),
        Rate("disk0", "*", "*", 0, 1e-9),
    )
    tiers = (Capacity("host", 1 << 30), Capacity("disk0", 1 << 30))
    machine = MachineSpec("m", tiers, rates, 2)
    for kind, more in (("q4_k", 1.3), ("q6_k", 1.5)):
        assert machine.rate("host", "ffn", kind) == replace(rates[0], s_per_flop=more * 1e-12)
        assert machine.rate("disk0", "load", kind) == rates[2]
    measured = replace(machine, rates=(*rates, Rate("host", "ffn", "q4_k", 0, 5e-9)))
    assert measured.rate("host", "ffn", "q4_k").s_per_byte == 5e-9


def test_what_no_matrix_can_have_is_refused_by_name() -> None:
    odd = replace(SPEC, layers=(replace(LAYER, attention=Attention(2, 2, 80, 0.1)),))
    with pytest.raises(
        BadRequest, match=r"0\.attn\.o has 80 columns in a granule, and q4_k cuts rows into groups of 32"
    ):
        parts(odd, Q4_K)
    mixed = mixture({**table(), "1.attn.k": FLOAT32})
    with pytest.raises(BadRequest, match=r"1\.attn has q in q4_k, k in float32, v in q4_k"):
        parts(SPEC, mixed)
    plan = resident_plan(SPEC, MIXTURE, kv=Format("float16"), context=64)
    there = replace(plan, units=tuple(replace(unit, decode="gpu0") for unit in plan.units))
    with pytest.raises(BadRequest, match="a device has no kernels for weights in q4_k_m"):
        check_plan(there, SPEC, MIXTURE)
    for others in ((), (("b", Q6_K), ("a", Q6_K))):
        with pytest.raises(BadRequest, match="mixture"):
            Mixed("q4_k", 32, label="x", others=others)
