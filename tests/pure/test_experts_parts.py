"""Granules of experts: each expert is a whole range with its own tail, and every count over any range is exact."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.spec.format import Format, parse_format
from penstock.spec.model import ACTIVATIONS, Attention, FfnSpec, Layer, ModelSpec, NormSpec, Routed, Router
from penstock.spec.part_keys import block_keys, parts_by_key
from penstock.spec.parts import FFNS, GRANULE_ROWS, PAGE_BYTES, PINNED, Part, parts

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4", "int8-g32", "int4-g32")


@dataclass(frozen=True)
class Case:
    spec: ModelSpec
    weights: Format
    expert: FfnSpec
    experts: int

    @property
    def part(self) -> Part:
        return parts_by_key(self.spec, self.weights)["0.experts"]


@st.composite
def cases(draw: st.DrawFn, most_experts: int = 12) -> Case:
    flag = st.booleans()
    neurons = draw(st.integers(1, 200) | st.sampled_from([44, 63, 64, 65, 127, 128, 129]))
    gated = draw(flag)
    activation = draw(st.sampled_from([name for name in ACTIVATIONS if gated or name != "swiglu_clamped"]))
    expert = FfnSpec(neurons, activation, gated, draw(flag))
    experts = draw(st.integers(1, most_experts))
    shared = FfnSpec(draw(st.integers(1, 150)), "silu", True) if draw(flag) else None
    router = Router(draw(st.sampled_from(["softmax", "sigmoid"])), draw(flag), draw(flag))
    routed = Routed(experts, draw(st.integers(1, experts)), expert, router, shared, shared is not None and draw(flag))
    attention = Attention(2, draw(st.sampled_from([1, 2])), 8, 1.0, norms_all_heads=draw(flag), qk_norm=draw(flag))
    dense = Layer(attention, FfnSpec(draw(st.integers(1, 150)), "silu", True))
    d = draw(st.integers(1, 150))
    spec = ModelSpec(
        "qwen2_moe", draw(st.sampled_from(["float32", "bfloat16"])), 70, d, d, 64, (Layer(attention, routed), dense),
        NormSpec("rms", 1e-5), True, draw(flag),
    )  # fmt: skip
    return Case(spec, parse_format(draw(st.sampled_from(FORMATS))), expert, experts)


def rows_by_granule(case: Case) -> list[int]:
    """Neurons of each granule, one by one."""
    tail = case.expert.neurons % GRANULE_ROWS or GRANULE_ROWS
    whole = -(-case.expert.neurons // GRANULE_ROWS) - 1
    return ([GRANULE_ROWS] * whole + [tail]) * case.experts


@given(cases(), st.data())
def test_any_range_against_counting(case: Case, data: st.DataObject) -> None:
    part, each = case.part, rows_by_granule(case)
    assert part.granules == len(each) and part.expert_granules * case.experts == len(each)
    lo = data.draw(st.integers(0, part.granules))
    hi = data.draw(st.integers(lo, part.granules))
    assert part.rows_of(lo, hi) == sum(each[lo:hi])
    matrices = 3 if case.expert.gated else 2
    biases = (matrices - 1) * case.expert.up_bias
    per_neuron = matrices * case.spec.d_model + biases
    assert part.weights_of(lo, hi) == per_neuron * sum(each[lo:hi])


@given(cases(), st.data())
def test_ranges_add_up(case: Case, data: st.DataObject) -> None:
    for part in parts(case.spec, case.weights):
        cuts = sorted(data.draw(st.sets(st.integers(0, part.granules), max_size=5)) | {0, part.granules})
        ranges = list(pairwise(cuts))
        assert sum(part.rows_of(lo, hi) for lo, hi in ranges) == part.rows_of(0, part.granules)
        assert part.rows_of(0, part.granules) == part.rows * part.experts
        assert sum(part.weights_of(lo, hi) for lo, hi in ranges) == part.weights_of(0, part.granules)
        assert all(part.rows_of(lo, lo) == part.weights_of(lo, lo) == 0 for lo in cuts)


@given(cases())
def test_an_expert_is_a_range_of_its_own(case: Case) -> None:
    """As large as an FFN of its shape in a layer of its own."""
    part = case.part
    n = part.expert_granules
    assert part.least_granules == (n if case.experts > 1 else 1)
    assert part.granules % part.least_granules == 0 and part.least_bytes == part.least_granules * part.granule_bytes
    alone = replace(case.spec, layers=(replace(case.spec.layers[0], ffn=case.expert), case.spec.layers[1]))
    ffn = parts_by_key(alone, case.weights)["0.ffn"]
    assert (ffn.blocks, ffn.granule_bytes, ffn.granules, ffn.rows) == (part.blocks, part.granule_bytes, n, part.rows)
    assert ffn.nbytes * case.experts == part.nbytes
    for e in range(case.experts):
        assert part.rows_of(e * n, (e + 1) * n) == case.expert.neurons == ffn.rows_of(0, n)
        assert part.weights_of(e * n, (e + 1) * n) == ffn.weights_of(0, n)
        for g in range(n):
            assert part.rows_of(e * n + g, e * n + g + 1) == ffn.rows_of(g, g + 1) > 0


@given(cases())
def test_nothing_is_lost_in_bytes(case: Case) -> None:
    """Blocks lie one after the other within a granule, and a granule has room for all of them and for no page more."""
    for part in parts(case.spec, case.weights):
        end = 0
        for block in part.blocks:
            assert end <= block.offset < end + 64 and block.offset % 64 == 0 and block.nbytes > 0
            end = block.offset + block.nbytes
        assert part.granule_bytes % PAGE_BYTES == 0 and 0 <= part.granule_bytes - end < PAGE_BYTES
        assert part.nbytes == part.granules * part.granule_bytes
        assert part.granules == part.experts * part.expert_granules
        assert part.experts == (case.experts if part.kind == "experts" else 1)
        assert part.least_granules == 1 or part.kind == "experts"


@given(cases())
def test_the_blocks_of_a_layer_with_experts(case: Case) -> None:
    """The router keeps the checkpoint's own format; the experts have the one that was asked for."""
    routed, by_key = case.spec.layers[0].routed, parts_by_key(case.spec, case.weights)
    assert routed is not None
    router, d = by_key["0.router"], case.spec.d_model
    shapes = {block.name: (block.rows, block.cols, block.format.name) for block in router.blocks}
    expected = {"scores": (case.experts, d, case.spec.dtype)}
    expected |= {"bias": (1, case.experts, "float32")} if routed.router.bias else {}
    expected |= {"shared_gate": (1, d, case.spec.dtype)} if routed.shared_gate else {}
    assert shapes == expected and router.granules == 1 and router.kind in PINNED
    assert case.part.kinds() == case.weights.kind and case.part.kind in FFNS
    assert ("0.shared" in by_key) == (routed.shared is not None) and "0.ffn" not in by_key
    in_layer = [part.key for part in parts(case.spec, case.weights) if part.layer == 0]
    computed = block_keys(case.spec, 0, "ffn")
    assert computed == (("0.shared", "0.experts") if routed.shared else ("0.experts",))
    assert in_layer == ["0.norms", "0.attn", "0.router", *computed]
    assert block_keys(case.spec, 1, "ffn") == ("1.ffn",) and "1.ffn" in by_key and "1.router" not in by_key


@given(cases(most_experts=4096))
def test_many_experts(case: Case) -> None:
    part, neurons = case.part, case.expert.neurons
    assert part.rows_of(0, part.granules) == neurons * case.experts
    last = part.granules - 1
    assert part.rows_of(last, part.granules) == (neurons % GRANULE_ROWS or GRANULE_ROWS)
    assert part.rows_of(0, last) + part.rows_of(last, part.granules) == neurons * case.experts
