"""Routers and experts on torch tensors beside the reference: what the tests of the GPU kernels share, in the
interpreter and on a card. Needs no native extension.

`gpu` modules are imported late: whoever wants Triton's interpreter says so before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.graph import ops, scratch_gpu
from penstock.kernels.reference import dense, experts
from penstock.kernels.reference.matrix import Scratch
from penstock.spec.format import parse_format
from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec, Routed, Router
from penstock.spec.parts import parts
from tests.kernel_cases import NOTHING, OnDevice
from tests.kernel_draws import granules_of

# (what is routed, d_model, rows, weights). An expert has one granule or two, and a tail; several tiles of 16 rows. One
# has more slots than a launch, more groups than are kept, a bias that decides, and experts that nobody wants.
FIXED = [
    (
        Routed(7, 3, FfnSpec(72, "silu", True), Router("softmax", True), FfnSpec(64, "silu", True), shared_gate=True),
        40, 5, "int4",
    ),
    (Routed(12, 2, FfnSpec(20, "silu", True), Router("sigmoid", True, True, 4, 2, 2.5)), 33, 3, "bfloat16"),
    (Routed(5, 1, FfnSpec(64, "relu", False, True), Router("softmax", False)), 24, 2, "int8-g8"),
    (
        Routed(
            9, 4, FfnSpec(40, "swiglu_clamped", True, True, True), Router("softmax", True, bias=True, bias_scored=True)
        ),
        70, 7, "int4",
    ),
    (Routed(3, 3, FfnSpec(9, "gelu_tanh", True), Router("softmax", False, groups=1, scale=0.5)), 17, 18, "float16"),
]  # fmt: skip


@dataclass
class ExpertCase(OnDevice):
    """A layer's router and experts with random weights. `run` does every op by both families."""

    routed: Routed
    d: int
    rows: int
    weights: str
    kernels: Any  # gpu.choose.Kernels
    device: torch.device
    seed: int = 0
    near: float = 1.0  # times the op table's tolerance

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.layer, self.norm = Layer(Attention(1, 1, 4, 0.5), self.routed), NormSpec("rms", 1e-5)
        spec = ModelSpec("llama", "float32", 20, self.d, self.d, 64, (self.layer,), self.norm, True, True)
        self.parts = {part.kind: part for part in parts(spec, parse_format(self.weights))}
        self.h = self.rng.normal(size=(self.rows, self.d)).astype(np.float32)

    def answer(self) -> tuple[experts.Routes, Any]:
        """An answer in which nothing is written yet, for the reference and on the device."""
        from penstock.kernels.gpu import experts as gpu

        t, a = self.rows, self.routed.active
        ours = experts.Routes(np.full((t, a), -1, np.int32), np.full((t, a), NOTHING, "f4"), np.full(t, NOTHING, "f4"))
        room = torch.full((self.routed.routes_bytes(t),), 255, dtype=torch.uint8, device=self.device)
        return ours, gpu.routes_of(room, t, a)

    def compare(self, op: str, want: np.ndarray, got: torch.Tensor, size: float = 0.0) -> None:
        found = got.cpu().numpy()
        assert (np.isnan(want) == np.isnan(found)).all(), f"{op}: not where the reference has NaN"
        want, found = np.nan_to_num(want), np.nan_to_num(found)
        error, most = np.abs(want - found).max(), max(np.abs(want).max(), size)
        assert error <= ops.OPS[op].tolerance * self.near * most + 1e-30, f"{op} differs by {error} of {most}"

    def same(self, want: torch.Tensor, got: torch.Tensor) -> None:
        """Of the experts that are chosen, and of bits that do not depend on where experts lie."""
        assert torch.equal(want, got)

    def run(self) -> None:
        with np.errstate(all="ignore"):
            routes, on_device = self.route()
            self.experts(routes, on_device)
            if self.routed.expert.down_bias:
                self.merge(routes, on_device)

    def route(self, damaged: bool = False) -> tuple[experts.Routes, Any]:
        from penstock.kernels.gpu import experts as gpu

        part, (want, got) = self.parts["router"], self.answer()
        packed, h = granules_of(part, self.rng), self.h.copy()
        h[-1] = np.nan if damaged else h[-1]
        experts.route(packed[0], part, self.routed, h, want, Scratch(np.empty(1 << 22, np.uint8)))
        scratch = self.scratch(scratch_gpu.route_bytes(part, self.rows))
        gpu.route(self.put(packed[0]), part, self.routed, self.put(h), got, self.kernels, scratch)
        self.same(torch.from_numpy(want.ids), got.ids.cpu())
        self.compare("route", want.factors, got.factors)
        self.compare("route", want.shared, got.shared)
        return want, got

    def experts(self, routes: experts.Routes, on_device: Any) -> None:
        """All experts in one slot and in several, added at once and kept apart: with the same bits where one way is
        chosen by rows alone."""
        from penstock.kernels.gpu import experts as gpu

        part, n, routed = self.parts["experts"], self.parts["experts"].expert_granules, self.routed
        packed, room = granules_of(part, self.rng), Scratch(np.empty(1 << 22, np.uint8))
        before = self.rng.normal(size=(self.rows, self.d)).astype(np.float32)
        one = [packed[e * n : (e + 1) * n] for e in range(routed.experts)]
        # Slots in another order than the experts, with bytes between them that are nobody's.
        order = self.rng.permutation(routed.experts)
        arena = np.full((len(order), n + 1, part.granule_bytes), 255, np.uint8)
        for place, expert in enumerate(order):
            arena[place, :n] = one[expert]
        there, whole, h = self.put(arena), self.put(packed), self.put(self.h)
        slots = [there[int(np.flatnonzero(order == e)[0]), :n] for e in range(routed.experts)]
        size = (1 + float(np.abs(self.h).max())) ** 3
        nbytes = scratch_gpu.experts_bytes(part, routed.active, self.rows)
        every = range(routed.experts)
        want, found = before.copy(), list[torch.Tensor]()
        experts.experts(one, every, part, routed, self.h, routes, want, None, False, room)
        cut = max(1, routed.experts // 2)
        for ways in ([([whole], [0])], [(slots[:cut], every[:cut]), (slots[cut:], every[cut:])]):
            partial = self.put(before)
            for weights, first in ways:
                gpu.experts(
                    weights, first, part, routed, h, on_device, partial, None, False, self.kernels,
                    self.scratch(nbytes),
                )  # fmt: skip
            self.compare("experts", want, partial, size)
            found.append(partial)
        kept, got = (self.put(np.full((self.rows, routed.active, self.d), NOTHING, "f4")) for _ in range(2))
        outputs = np.full((self.rows, routed.active, self.d), NOTHING, np.float32)
        experts.experts(one, every, part, routed, self.h, routes, want, outputs, False, room)
        for some in (every[-1:], [int(e) for e in order if e != every[-1]]):  # in any order, one alone
            gpu.experts(
                [slots[e] for e in some], some, part, routed, h, on_device, got, kept, True, self.kernels,
                self.scratch(nbytes),
            )  # fmt: skip
        self.compare("experts", outputs, kept, size)
        for starts in (True, False):
            total, partial = before.copy(), self.put(before)
            experts.combine(routes, outputs, total, starts)
            gpu.combine(on_device, kept, partial, starts, self.kernels)
            self.compare("combine", total, partial, size)
        for other in found:
            self.same(partial, other)
        experts.gate(routes, total)
        gpu.gate(on_device, partial)
        self.compare("gate", total, partial, size)

    def merge(self, routes: experts.Routes, on_device: Any) -> None:
        """The biases of each row's experts, times their factors."""
        from penstock.kernels.gpu import dense as gpu

        part = self.parts["norms"]
        packed = granules_of(part, self.rng)[0]
        x, partial = (self.rng.normal(size=(self.rows, self.d)).astype(np.float32) for _ in range(2))
        got, here = self.put(x), (part, "ffn", self.layer, self.norm)
        dense.merge(packed, *here, x, [partial], Scratch(np.empty(1 << 20, np.uint8)), routes[:2])
        gpu.merge(
            self.put(packed), *here, got, [self.put(partial)], self.kernels, self.scratch(1 << 20), on_device[:2]
        )  # fmt: skip
        self.compare("merge", x, got)
