"""The op table: every op of random layers in every native family against the reference, call by call.

Both bindings run the same calls over arenas with the same bytes, so an error shows in the op that made it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import _native
from penstock.graph import ops
from penstock.graph.batch import Batch
from penstock.graph.resident import resident_plan
from penstock.graph.tasks import Pass
from penstock.kernels import cpu
from penstock.runtime.bind import Binding, experts_of
from penstock.spec.blocks import BLOCKS
from penstock.spec.format import Format, mixture, parse_format
from penstock.spec.model import (
    Attention,
    FfnSpec,
    Layer,
    ModelSpec,
    NormSpec,
    Routed,
    Router,
)
from penstock.spec.parts import MIXED, parts
from tests.cpu.native_pair import (
    FORMATS,
    KV_FORMATS,
    Pair,
    batches,
    ffn_ops,
    layers,
)
from tests.cpu.native_products import ALL, COMPUTE, SCRATCH, address


@pytest.mark.fuzz
@pytest.mark.parametrize("isa", cpu.available())
@given(
    layers(), batches(), st.sampled_from(FORMATS), st.sampled_from(KV_FORMATS),
    st.sampled_from([1, 3]), st.booleans(), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_every_op(
    isa: str, spec: ModelSpec, batch: Batch, name: str, kv: str, threads: int, exact: bool, seed: int
) -> None:
    a, fmt = spec.layers[0].attention, parse_format(name)
    fmt = fmt if spec.fires else fmt.in_tiles
    # A norm of few numbers divides by what may be near 0, and what was rounded with it: of 4 it made 8 % out of 5.
    exact |= a.qk_norm and a.head_dim < 32
    plan = resident_plan(
        spec, fmt, kv=parse_format(kv), context=192, rows=batch.total_rows, seqs=len(batch.seqs),
        logits_rows=len(batch.logits),
    )  # fmt: skip
    plan = replace(plan, sparsity="exact" if spec.fires and seed % 2 else "off")
    pair = Pair(plan, isa, threads, exact, seed)
    seen = pair.run(Pass("prefill", (batch,), None), np.random.default_rng(seed), not exact)
    ordered = {"order"} if spec.layers[0].ordered else set[str]()
    usual = {"gather", "embed", "norm", "qkv", "attend", "out", "merge", "head"}
    assert seen == usual | ordered | ffn_ops(spec.layers[0])
    pair.close()


@st.composite
def in_blocks(draw: st.DrawFn) -> tuple[ModelSpec, Format]:
    """A layer whose matrices have any mixture of the formats of GGUF files, or one of them."""
    spec = draw(layers())
    a, d = spec.layers[0].attention, 32 * draw(st.integers(1, 9))
    rope = None if a.rope is None else replace(a.rope, dims=32)
    a = replace(a, head_dim=32 * draw(st.integers(1, 3)), rope=rope)
    spec = replace(spec, d_model=d, d_embed=d, layers=(replace(spec.layers[0], attention=a),))
    each = parse_format(draw(st.sampled_from(list(BLOCKS))))
    names = [f"{p.key}.{b.name}" for p in parts(spec, each) if p.kind in MIXED for b in p.blocks if b.tiled]
    other = st.sampled_from([each.name, "q4_k", "q6_k", "q4_1", "q8_0"])
    return spec, mixture({name: parse_format(draw(other)) for name in names})


@pytest.mark.fuzz
@pytest.mark.parametrize("isa", cpu.available())
@given(in_blocks(), batches(), st.sampled_from([1, 3]), st.booleans(), st.integers(0, 2**32 - 1))
def test_every_op_with_formats_of_gguf_files(
    isa: str, model: tuple[ModelSpec, Format], batch: Batch, threads: int, exact: bool, seed: int
) -> None:
    spec, weights = model
    plan = resident_plan(
        spec, weights, kv=parse_format("float16"), context=192, rows=batch.total_rows, seqs=len(batch.seqs),
        logits_rows=len(batch.logits),
    )  # fmt: skip
    pair = Pair(plan, isa, threads, exact, seed)
    pair.run(Pass("prefill", (batch,), None), np.random.default_rng(seed), not exact)
    pair.close()


@st.composite
def paged(draw: st.DrawFn, batch: Batch, pages: int, page_tokens: int = 64) -> Batch:
    """The batch with pages in any order, out of so many. The whole pages before its rows may be another sequence's
    too."""
    order, given = draw(st.permutations(range(pages))), list[tuple[int, ...]]()
    for start, rows in zip(batch.start, batch.rows, strict=True):
        shared = draw(st.sampled_from(given))[: start // page_tokens] if given and draw(st.booleans()) else ()
        shared = shared[: min(batch.start) // page_tokens]  # the other one only reads them
        need = -(-(start + rows) // page_tokens) - len(shared)
        given.append((*shared, *order[:need]))
        order = order[need:]
    return Batch(*batch[:5], (), tuple(given))


@pytest.mark.fuzz
@pytest.mark.parametrize("isa", cpu.available())
@given(
    st.data(), layers(), batches(), st.sampled_from(["float32", "bfloat16", "int4"]), st.sampled_from(KV_FORMATS),
    st.sampled_from([1, 3]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_pages_may_lie_in_any_order(
    isa: str, data: st.DataObject, spec: ModelSpec, batch: Batch, name: str, kv: str, threads: int, seed: int
) -> None:
    """Sequences with consecutive pages, and the same content in pages anywhere: the same bits, natively and by the
    reference."""
    plan = resident_plan(
        spec, parse_format(name), kv=parse_format(kv), context=192, rows=batch.total_rows, seqs=len(batch.seqs),
        logits_rows=len(batch.logits),
    )  # fmt: skip
    moved = data.draw(paged(batch, len(batch.seqs) * 3))
    first, second = (Pair(plan, isa, threads, False, seed) for _ in range(2))
    for a, b in zip(first.arenas, second.arenas, strict=True):
        for held, other in zip(first.pools(a), second.pools(b), strict=True):
            content: dict[int, np.ndarray] = {}
            for s, pages in enumerate(moved.pages):
                for i, page in enumerate(pages):
                    held.blocks[3 * s + i] = content.setdefault(page, held.blocks[3 * s + i].copy())
                    other.blocks[page] = content[page]
    found = [pair.outputs(Pass("prefill", (b,), None), seed) for pair, b in ((first, batch), (second, moved))]
    for mine, other in zip(*found, strict=True):
        assert np.array_equal(mine, other)
    for a, b in zip(first.arenas, second.arenas, strict=True):
        for held, other in zip(first.pools(a), second.pools(b), strict=True):
            for s, pages in enumerate(moved.pages):
                for i, page in enumerate(pages):
                    assert np.array_equal(held.blocks[3 * s + i], other.blocks[page])
    first.close()
    second.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("isa", cpu.available())
def test_experts_called_together_give_the_bits_of_one_after_the_other(isa: str, rows: int, threads: int) -> None:
    """Many at once are shared out by fours, a single one granule by granule."""
    expert, router = FfnSpec(300, "silu", True), Router("softmax", True)
    attention = Attention(1, 1, 8, 0.35)
    layer = Layer(attention, Routed(32, 24, expert, router))
    spec = ModelSpec("llama", "float32", 50, 70, 70, 4096, (layer,), NormSpec("rms", 1e-5), True, False)
    batch = Batch(0, (0,), (0,), (rows,), (0,))
    plan = resident_plan(spec, parse_format("int4"), kv=parse_format("float16"), context=192, rows=rows)
    pair = Pair(plan, isa, threads, exact=False, seed=rows)
    part = plan.parts["0.experts"]
    assert part.expert_granules == 5 and 6 * threads <= 24 * 2  # two fours each: enough to be shared out
    call = next(pair.calls(Pass("prefill", (batch,), None), np.random.default_rng(rows), "experts"))
    op = call.operands
    pair.native.call(call)
    together = pair.arenas[1].view(op.partial).copy()
    for first, (number, slot) in enumerate(experts_of(op, part)):
        one = op._replace(weights=(slot,), first_experts=(number,), starts_sum=first == 0)
        pair.native.call(call._replace(operands=one))
    assert together.view(np.float32).any()
    assert np.array_equal(together, pair.arenas[1].view(op.partial))
    program = _native.Program(pair.native._compute)
    with pytest.raises(ValueError, match="no experts"):
        program.place([0], [0])
    placed = experts_of(op, part)
    first_op = op._replace(weights=(placed[0][1],), first_experts=(placed[0][0],), starts_sum=True)
    pair.native._experts_on(program, call, first_op, None)
    with pytest.raises(ValueError, match="weights and an id"):
        program.place([0], [0, 1])
    program.place([pair.arenas[1].address(slot) for _, slot in placed], [number for number, _ in placed])
    program.run()  # other experts than it was written down with
    assert np.array_equal(together, pair.arenas[1].view(op.partial))
    pair.close()


@pytest.mark.parametrize("rows", [14, 18, 33])
@pytest.mark.parametrize("isa", cpu.available())
def test_an_expert_as_wide_as_mixtrals_gives_the_bits_of_an_ffn(isa: str, rows: int) -> None:
    """Blocks of its granules end where fours do: no call of experts has room for a part of a four's sum. For some rows
    they ended in the middle, and the process with them."""
    expert, columns = FfnSpec(14336, "silu", True), 32
    layer = Layer(Attention(1, 1, 8, 0.35), Routed(1, 1, expert, Router("softmax", True)))
    spec = ModelSpec("llama", "float32", 50, columns, columns, 4096, (layer,), NormSpec("rms", 1e-5), True, False)
    batch = Batch(0, (0,), (0,), (rows,), (0,))
    plan = resident_plan(spec, parse_format("int4"), kv=parse_format("float16"), context=192, rows=rows)
    pair, part = Pair(plan, isa, 3, exact=False, seed=rows), plan.parts["0.experts"]
    call = next(pair.calls(Pass("prefill", (batch,), None), np.random.default_rng(rows), "experts"))
    op, arena = call.operands, pair.arenas[1]
    pair.native.call(call)
    found = arena.view(op.partial).view(np.float32).copy()
    h, wanted, pending = arena.view(op.h).copy(), np.full_like(found, np.nan), np.full_like(found, np.nan)
    COMPUTE[isa, 3].ffn(
        weights=arena.address(op.weights[0]), count=part.granules, stride=part.granule_bytes,
        shape=cpu.ffn_shape(part, expert), h=address(h), t=rows, partial=address(wanted), pending=address(pending),
        granule=0, starts_sum=True, continues_four=False, leaves_four=False, **ALL, exact=False,
        scratch=address(SCRATCH), scratch_bytes=SCRATCH.nbytes,
    )  # fmt: skip
    assert found.any() and np.array_equal(found, wanted)
    pair.close()


def test_every_op_of_the_table_has_a_tolerance_and_a_reference() -> None:
    for op in ops.OPS.values():
        assert op.tolerance >= 0
        assert callable(getattr(Binding, f"_{op.name}"))
