"""Every op of a random layer, by a native family and by the reference: what the tests of the op table share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from penstock.graph import ops
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Call, Pass, Slot
from penstock.kernels import cpu
from penstock.kernels.reference import experts as reference
from penstock.kernels.reference.cache import KvPool
from penstock.kernels.reference.matrix import Scratch
from penstock.runtime.arena import Arenas
from penstock.runtime.bind import Binding
from penstock.runtime.bind_native import NativeBinding, native
from penstock.spec.model import (
    ACTIVATIONS,
    SCORES,
    Attention,
    FfnSpec,
    Layer,
    ModelSpec,
    NormSpec,
    Rope,
    Routed,
    Router,
)
from penstock.spec.parts import FFNS, Part
from penstock.spec.plan import Plan
from penstock.store.quantize import encode, encode_rows
from penstock.store.random_blocks import fill_blocks

KERNELS = {(isa, threads, exact): native(isa, threads, exact) for isa in cpu.available() for threads in (1, 3)
           for exact in (True, False)}  # fmt: skip


FORMATS = ["float32", "bfloat16", "float16", "int8", "int4", "int4-g32", "int8-g8", "float32-neurons",
           "bfloat16-neurons", "float16-neurons", "int8-neurons", "int4-neurons", "int4-g32-neurons"]  # fmt: skip


# Of the largest number rounded: what int8 activations may cost an op. Half a step of 1/127 each, and weights are
# of a size that sums stay as large as their terms.
ROUNDED = 0.05


# Of the largest number of a row: what factors of 16 bits may cost attention over codes. A factor is 2^-16 off at most,
# of the largest beside it, and a score that many of them make is some 1e-4 off.
ROUNDED_WORDS = 1e-3
# The same where keys are int4: a query's number is 2^-8 off at most, of the largest beside it, and a score of 128 of
# them some 0.5 %. tests/cpu/test_rounded_attention.py holds the rule itself to 1e-3.
ROUNDED_BYTES = 2e-2


KV_FORMATS = ["float32", "float16", "bfloat16", "int8", "int4", "int8-g32", "int4-g32", "int4-g96"]


NEAR_TIE = 1e-5  # sums in another order move scores by less


# Steps between numbers of a KV cache, of the largest of them.
STEPS = {"float32": 0.0, "float16": 2**-10, "bfloat16": 2**-7, "int8": 2 / 255 + 2**-9, "int4": 2 / 15 + 2**-9}


@st.composite
def ffns(draw: st.DrawFn, most: int) -> FfnSpec:
    """Up to so many neurons."""
    gated, flag = draw(st.booleans()), st.booleans()
    activation = draw(st.sampled_from([name for name in ACTIVATIONS if gated or name != "swiglu_clamped"]))
    return FfnSpec(draw(st.integers(1, most)), activation, gated, draw(flag), draw(flag))


@st.composite
def routed(draw: st.DrawFn) -> Routed:
    """Odd experts, few and many, with whatever a router may do."""
    flag, of_group = st.booleans(), draw(st.integers(2, 6))
    groups = draw(st.integers(1, 4))
    kept, count = draw(st.integers(1, groups)), groups * of_group
    biased = draw(flag)
    router = Router(
        draw(st.sampled_from(SCORES)), draw(flag), biased, groups, kept, draw(st.sampled_from([1.0, 2.5])),
        biased and draw(flag),
    )  # fmt: skip
    shared = FfnSpec(draw(st.integers(1, 150)), "silu", True) if draw(flag) else None
    expert = draw(ffns(300))
    active = draw(st.integers(1, kept * of_group))
    return Routed(count, active, expert, router, shared, shared is not None and draw(flag))


@st.composite
def layers(draw: st.DrawFn) -> ModelSpec:
    """One odd layer, with anything that some model has."""
    flag = st.booleans()
    head_dim = draw(st.sampled_from([4, 8, 18, 32, 36, 64, 80, 128]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    rope = Rope(1e4, draw(st.integers(1, head_dim // 2)) * 2) if draw(flag) else None
    attention = Attention(
        kv_heads * group, kv_heads, head_dim, head_dim**-0.5, draw(st.sampled_from([0.0, 5.0])),
        draw(st.sampled_from([0, 1, 7, 70])), draw(flag), draw(flag), draw(flag), rope, draw(flag),
        draw(flag),
    )  # fmt: skip
    ffn: FfnSpec | Routed = draw(ffns(150))
    if draw(flag):
        ffn = draw(routed())
    layer = Layer(attention, ffn, draw(flag), draw(flag), draw(flag))
    layer = replace(layer, ordered=layer.routed is None and draw(flag))
    norm = NormSpec(draw(st.sampled_from(["rms", "layer"])), 1e-5, draw(st.sampled_from([0.0, 1.0])), draw(flag))
    d = draw(st.integers(1, 150))
    return ModelSpec(
        "llama", "float32", draw(st.integers(1, 200)), d, d, 4096, (layer,), norm, draw(flag), draw(flag),
        embed_scale=draw(st.sampled_from([1.0, 3.5, 1e-3, 30.0])), logit_softcap=draw(st.sampled_from([0.0, 2.0])),
    )  # fmt: skip


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Up to three sequences, each with some rows after some context; few of them reach over a page."""
    n = draw(st.integers(1, 3))
    rows = tuple(draw(st.sampled_from([1, 1, 2, 3, 5, 8, 9, 13, 50])) for _ in range(n))
    start = tuple(draw(st.sampled_from([0, 1, 5, 63, 64, 100])) for _ in range(n))
    wanted = draw(st.sets(st.integers(0, sum(rows) - 1), min_size=1))
    return Batch(0, tuple(range(n)), start, rows, tuple(sorted(wanted)))


def fill(part: Part, out: np.ndarray, rng: np.random.Generator) -> None:
    """Random granules; what pads a tail is zero, as `pack` writes it."""
    for g, granule in enumerate(out.reshape(part.granules, part.granule_bytes)):
        n = part.rows_of(g, g + 1)
        for block in part.blocks:
            values = rng.normal(size=(block.rows, block.cols)).astype(np.float32)
            if block.name.endswith("_order"):
                values[0] = rng.permutation(block.cols)
                values[0, rng.integers(block.cols)] = rng.choice([-1.0, np.nan, np.inf, block.cols, 0.5])
            if block.stride:
                values *= part.rows**-0.5 if block.name == "down" else block.cols**-0.5
                encode_rows(values[:n], block, granule)
                continue
            if block.format.in_blocks:
                raw = granule[block.offset : block.offset + block.nbytes]
                rows = n if part.kind in (*FFNS, "embed", "head") and block.name != "down" else block.rows
                bits, d = rng.integers(0, 256, len(raw), np.uint8), rng.uniform(0.5, 1.5, len(raw)).astype(np.float16)
                fill_blocks(raw, rows, block.rows, block.cols, block.format, block.cols**-0.5, bits, d)
                continue
            if block.tiled:
                values *= block.cols**-0.5
            if block.name == "down":
                values[:, n:] = 0
            elif part.kind in (*FFNS, "embed", "head") and block.rows > 1:
                values[n:] = 0
            elif part.kind in FFNS:
                values[:, n:] = 0
            raw = encode(values, block.format) if block.tiled else values.view(np.uint8).reshape(-1)
            granule[block.offset : block.offset + block.nbytes] = raw


def factors(pool: KvPool) -> np.ndarray:
    """A pool's scales and minimums, float16 [pages, K, 2, G, P]."""
    after = pool.page_tokens * pool.format.kv_codes_bytes(pool.head_dim)
    return pool.blocks[:, :, after:].view(np.float16).reshape(*pool.blocks.shape[:2], 2, -1, pool.page_tokens)


class Pair:
    """The same plan and the same bytes twice: for the reference and for native kernels."""

    def __init__(self, plan: Plan, isa: str, threads: int, exact: bool, seed: int) -> None:
        self.plan, self.lowering = plan, Lowering(plan)
        self.arenas = Arenas(plan), Arenas(plan)
        rng = np.random.default_rng(seed)
        for i, slot in self.lowering.layout.weights.items():
            fill(plan.parts[plan.units[i].part], self.arenas[0].view(slot), rng)
        self.fill_cache(rng)
        for arena in plan.arenas:
            self.arenas[1].whole(arena.name)[...] = self.arenas[0].whole(arena.name)
        self.reference = Binding(plan, self.arenas[0], None)
        self.native = NativeBinding(plan, self.arenas[1], None, KERNELS[isa, threads, exact])

    def fill_cache(self, rng: np.random.Generator) -> None:
        """What came before the batch, and what no row should see. Integers: codes with scales and minimums that make
        them numbers around 1."""
        kv = self.arenas[0].whole("host.kv")
        kv[0::2], kv[1::2] = rng.integers(0, 256, len(kv[0::2])), 0x3C
        for pool in self.pools(self.arenas[0]):
            if pool.format.is_quantised:
                _, g, p = factors(pool).shape[-3:]
                factors(pool)[..., 0, :, :] = rng.uniform(0, 4 / 2**pool.format.bits, (g, p))
                factors(pool)[..., 1, :, :] = rng.uniform(-2, 0, (g, p))

    def pools(self, arenas: Arenas) -> list[KvPool]:
        """Keys and values of the layer."""
        plan, layout = self.plan, self.lowering.layout
        a, seqs = plan.target.spec.layers[0].attention, tuple(range(plan.batch_seqs))
        slots = layout.kv.slots(0, Batch(0, seqs, (0,) * len(seqs), (1,) * len(seqs), ()))
        pages = len(seqs) * layout.kv.pages_per_seq
        return [
            KvPool(arenas.view(s).reshape(pages, a.kv_heads, -1), plan.page_tokens, a.head_dim, plan.kv[0].format)
            for s in slots
        ]

    def run(self, p: Pass, rng: np.random.Generator, rounded: bool) -> set[str]:
        batch = p.batches[0]
        tokens = rng.integers(0, self.plan.target.spec.vocab, batch.total_rows).astype(np.int32)
        for arenas in self.arenas:
            slot = self.lowering.layout.act("host", 0, "tokens", 4 * batch.total_rows)
            arenas.view(slot).view(np.int32)[...] = tokens
        self.reference.begin()
        self.native.begin()
        seen = set()
        for task in self.lowering.step(p):
            for call in task.calls:
                with np.errstate(all="ignore"):
                    self.reference.call(call)
                self.native.call(call)
                self.compare(call, rounded)
                seen.add(call.op)
        return seen

    def outputs(self, p: Pass, seed: int) -> list[np.ndarray]:
        """The logits of a pass by the reference and by native kernels, as bytes."""
        tokens = np.random.default_rng(seed).integers(0, self.plan.target.spec.vocab, p.batches[0].total_rows)
        found, layout = [], self.lowering.layout
        tasks = list(self.lowering.step(p))
        for arenas, binding in zip(self.arenas, (self.reference, self.native), strict=True):
            arenas.view(layout.act("host", 0, "tokens", 4 * len(tokens))).view(np.int32)[...] = tokens
            binding.begin()
            with np.errstate(all="ignore"):
                for task in tasks:
                    binding.run(task)
            found.append(arenas.view(layout.act("host", 0, "logits")).copy())
        return found

    def calls(self, p: Pass, rng: np.random.Generator, name: str) -> Iterator[Call]:
        """Runs a pass natively, and stops before each call of this op."""
        self.native.begin()
        slot = self.lowering.layout.act("host", 0, "tokens", 4 * p.batches[0].total_rows)
        view = self.arenas[1].view(slot).view(np.int32)
        view[...] = rng.integers(0, self.plan.target.spec.vocab, len(view))
        for call in (call for task in self.lowering.step(p) for call in task.calls):
            if call.op == name:
                yield call
            self.native.call(call)

    def compare(self, call: Call, rounded: bool) -> None:
        operands = call.operands
        near, size = ops.OPS[call.op].tolerance, 0.0
        if isinstance(operands, ops.WithUnit):  # terms may be larger than their sum
            source = operands.a if isinstance(operands, ops.Out) else operands.h
            size = float(np.abs(self.arenas[0].view(source).view(np.float32)).max())
            if isinstance(operands, ops.Ffn | ops.Experts):  # relu² times up; biases are about 1
                size = (1 + size) ** 3
            if call.op == "head":
                size = max(size, self.plan.target.spec.logit_softcap)
            near = ROUNDED if rounded else near
        elif call.op == "attend" and rounded and self.plan.kv[0].format.is_quantised:
            near = ROUNDED_BYTES if self.plan.kv[0].format.kind == "int4" else ROUNDED_WORDS
        for operand, slot in ops.slots_of(operands):
            if operand.mode not in ("w", "+"):
                continue
            name = operand.name
            if isinstance(operands, ops.Ffn) and name == "pending" and not operands.leaves_four:
                continue  # nothing is left for a next call
            want, got = (self.numbers(arenas, name, slot) for arenas in self.arenas)
            if name == "routes":
                self.compare_routes(want, got, call)
            elif name == "best":
                self.compare_best(call, want, got, near, size)
            else:
                kept = near
                if name in ("keys", "values"):  # and one step of the cache's own format
                    kept += STEPS[self.plan.kv[0].format.kind]
                error = np.abs(want - got).max()
                assert error <= kept * max(np.abs(want).max(), size) + 1e-30, f"{call.op}: {name} differs by {error}"
            self.arenas[1].view(slot)[...] = self.arenas[0].view(slot)  # errors do not add up

    def numbers(self, arenas: Arenas, name: str, slot: Slot) -> np.ndarray:
        if name not in ("keys", "values"):
            return arenas.view(slot).view(np.float32)
        pool = self.pools(arenas)[name == "values"]
        return np.concatenate([
            pool.load(page, head, pool.page_tokens, Scratch(np.empty(1 << 18, np.uint8))).reshape(-1)
            for page in range(len(pool.blocks)) for head in range(pool.blocks.shape[1])
        ])  # fmt: skip

    def compare_routes(self, want: np.ndarray, got: np.ndarray, call: Call) -> None:
        """The same experts, and nearly the same weights. Where scores nearly tie, another choice may be right too."""
        assert call.batch is not None and isinstance(call.operands, ops.Route)
        routed, t = self.plan.target.spec.layers[0].routed, call.batch.total_rows
        assert routed is not None
        ids = want.view(np.int32)[: t * routed.active].reshape(t, -1)
        assert (np.diff(ids, axis=1) > 0).all() and (ids >= 0).all() and (ids < routed.experts).all()
        chosen = got.view(np.int32)[: t * routed.active].reshape(t, -1)
        same = (ids == chosen).all(axis=1)
        if not same.all():
            for scores, experts in zip(self.scores(call.operands, routed)[~same], chosen[~same], strict=True):
                assert nearly_best(scores, routed, experts.tolist())
        for lo, hi in ((t * routed.active, 2 * t * routed.active), (2 * t * routed.active, len(want))):
            weights, found = (each[lo:hi].reshape(t, -1)[same] for each in (want, got))
            if weights.size:
                assert np.abs(weights - found).max() <= ops.OPS["route"].tolerance * max(1.0, np.abs(weights).max())

    def scores(self, route: ops.Route, routed: Routed) -> np.ndarray:
        """What a router goes by when it chooses, float32 [T, X]."""
        scored = routed.router.bias_scored
        # It chooses all of them, and their weights are scores.
        every = Router(routed.router.score, normalised=False, bias=scored, bias_scored=scored)
        h = self.arenas[0].view(route.h).view(np.float32).reshape(-1, self.plan.target.spec.d_model)
        part, weights = self.plan.parts["0.router"], self.arenas[0].view(route.weights)
        ids, found = (np.empty((len(h), routed.experts), kind) for kind in (np.int32, np.float32))
        answer = reference.Routes(ids, found, np.empty(len(h), np.float32))
        reference.route(
            weights, part, replace(routed, active=routed.experts, router=every), h, answer,
            Scratch(np.empty(1 << 22, np.uint8)),
        )  # fmt: skip
        return found + reference.vector(weights, part.block("bias")) if routed.router.bias and not scored else found

    def compare_best(self, call: Call, want: np.ndarray, got: np.ndarray, near: float, size: float) -> None:
        """The same token, or one whose logit is as large but for the tolerance."""
        assert isinstance(call.operands, ops.Head)
        logits = self.arenas[0].view(call.operands.logits).view(np.float32).reshape(len(want) // 2, -1)
        ids = got.view(np.int32)[1::2]
        size = near * max(np.abs(logits).max(), size) + 1e-30
        assert (np.abs(want[0::2] - got[0::2]) <= size).all()
        assert (logits[np.arange(len(logits)), ids] >= logits.max(axis=1) - 2 * size).all()

    def close(self) -> None:
        for arenas in self.arenas:
            arenas.close()


def nearly_best(scores: np.ndarray, routed: Routed, experts: list[int]) -> bool:
    """Whether a router with scores float32 [X] that differ from these by NEAR_TIE may choose these experts."""
    rng, router = np.random.default_rng(0), routed.router
    for _ in range(1000):
        moved = scores + rng.choice([-NEAR_TIE, NEAR_TIE], len(scores)) * max(1.0, float(np.abs(scores).max()))
        grouped = moved.reshape(router.groups, -1)
        best_two = np.sort(grouped, axis=1)[:, -2:].sum(axis=1)
        grouped[np.argsort(-best_two, kind="stable")[router.groups_kept :]] = -np.inf
        if sorted(np.argsort(-moved, kind="stable")[: routed.active].tolist()) == experts:
            return True
    return False


def ffn_ops(layer: Layer) -> set[str]:
    if layer.routed is None:
        return {"ffn"}
    shared = {"ffn"} if layer.routed.shared else set[str]()
    return {"route", "experts"} | shared | ({"gate"} if layer.routed.shared_gate else set[str]())
