"""`python -m tests.compile_kernels cuda:80`: compiles every Triton kernel for a card that need not be there, as the ops
launch them for some layers. Prints a line for each kernel; fails where one does not compile, spills much, or takes more
shared memory than the smallest cards have."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.kernels.gpu import (
    attend_kernels,
    expert_kernels,
    neuron_kernels,
    row_kernels,
    tile_kernels,
    turn_kernels,
    widen_kernels,
)
from penstock.kernels.gpu.choose import Kernels
from penstock.spec.format import parse_format
from penstock.spec.model import FfnSpec, Routed, Router
from tests.expert_cases import ExpertCase
from tests.kernel_cases import Case
from tests.kernel_draws import FIXED, with_relu

MODULES = (attend_kernels, expert_kernels, neuron_kernels, row_kernels, tile_kernels, turn_kernels, widen_kernels)
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8"}
MOST_SHARED_BYTES = 99 * 1024  # of a processor of a GeForce card; AMD's have 64 KiB
TARGETS = {"cuda": 32, "hip": 64}  # threads of a warp


class Compiled(Case):
    """Launches nothing, so there is nothing to compare."""

    def compare(self, *_: Any, **__: Any) -> None:
        pass

    def numbers(self, blocks: np.ndarray) -> np.ndarray:
        return blocks

    def head(self) -> None:
        from penstock.kernels.gpu import dense as gpu
        from penstock.kernels.gpu.memory import TensorScratch

        part = self.parts["embed"]
        logits, best = torch.zeros(1, self.spec.vocab), torch.zeros(1)
        gpu.head(
            self.on_device["embed"], part, 0, torch.zeros(1, self.spec.d_embed), 0.0, logits, best,
            torch.zeros(1, dtype=torch.int32), True, self.kernels,
            TensorScratch(torch.empty(1 << 24, dtype=torch.uint8)),
        )  # fmt: skip


class CompiledExperts(ExpertCase):
    """The same for routers and experts."""

    def compare(self, *_: Any, **__: Any) -> None:
        pass

    def same(self, *_: Any) -> None:
        pass


def experts_like(weights: str) -> tuple[Any, ...]:
    """A layer with experts in this format, else as Qwen3-30B-A3B's with fewer and narrower experts."""
    return Routed(16, 8, FfnSpec(192, "silu", True), Router("softmax", True)), 256, 2, weights


class Launcher:
    """In the place of a kernel: compiles what it is launched with."""

    def __init__(self, kernel: Any, target: GPUTarget, done: set[tuple[Any, ...]]) -> None:
        self.kernel, self.target, self.done = kernel, target, done

    def __getitem__(self, _: Any) -> Any:
        return self.compile

    def compile(self, *args: Any, **given: Any) -> None:
        names = [p.name for p in self.kernel.params]
        constant = {p.name for p in self.kernel.params if p.is_constexpr}
        options = {name: value for name, value in given.items() if name not in names}
        found = (
            inspect.signature(self.kernel.fn).bind(*args, **{k: v for k, v in given.items() if k in names}).arguments
        )
        signature = {name: "constexpr" if name in constant else typed(found[name]) for name in names}
        constants = {(i,): found[name] for i, name in enumerate(names) if name in constant}
        unknown = constant | {p.name for p in self.kernel.params if p.do_not_specialize}
        attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
                      if name not in unknown and aligned(found[name])}  # fmt: skip
        key = (self.kernel.fn.__name__, *signature.items(), *constants.items(), *attributes, *options.items())
        if key in self.done:
            return
        self.done.add(key)
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attributes)
        made = triton.compile(source, target=self.target, options=options)
        most = MOST_SHARED_BYTES if self.target.backend == "cuda" else 64 * 1024
        print(self.kernel.fn.__name__, made.metadata.shared, flush=True)
        assert made.metadata.shared <= most, f"{self.kernel.fn.__name__}: {made.metadata.shared} bytes of shared memory"


def typed(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def aligned(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def main(target: str, cases: list[int]) -> None:
    backend, _, arch = target.partition(":")
    found = GPUTarget(backend, int(arch) if arch.isdigit() else arch, TARGETS[backend])
    done: set[tuple[Any, ...]] = set()
    for module in MODULES:
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                setattr(module, name, Launcher(kernel, found, done))
    dot = "tf32x3" if backend == "cuda" else "ieee"
    for spec, batch, weights, kv in [FIXED[i] for i in cases]:
        for few_rows in (64, 0):
            kernels = Kernels(triton=True, few_rows=few_rows, dot=dot)
            Compiled(spec, parse_format(weights), parse_format(kv), batch, kernels, torch.device("cpu"), 0).run()
            CompiledExperts(*experts_like(weights), kernels, torch.device("cpu")).run()
            by_neurons = parse_format(f"{weights}-neurons")
            Compiled(with_relu(spec), by_neurons, parse_format(kv), batch, kernels, torch.device("cpu"), 0).ffn()
    from penstock.kernels.gpu import product
    from penstock.kernels.gpu.memory import TensorScratch
    from penstock.spec.parts import Block

    # A sum that is split, as FFNs of narrow models are.
    block, scratch = (
        Block("down", 64, 64, parse_format("int4"), 0),
        TensorScratch(torch.empty(1 << 20, dtype=torch.uint8)),
    )
    product.add_up(
        torch.empty(1, 20 * 64), torch.empty(20, 4096, dtype=torch.uint8), block, torch.empty(1, 64), True,
        Kernels(triton=True), scratch,
    )  # fmt: skip
    names = {key[0] for key in done}
    wanted = {name for module in MODULES for name in vars(module) if name.endswith("_kernel")}
    assert names == wanted, f"never launched: {wanted - names}"


if __name__ == "__main__":
    main(sys.argv[1], [int(i) for i in sys.argv[2].split(",")])
