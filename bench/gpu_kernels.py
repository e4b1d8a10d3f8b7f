"""`python -m bench.gpu_kernels`: how near the GPU kernels come to what the card's memory gives. For a card that torch
sees; says so in one line where there is none.

Units of an 8B shape, so many copies that no cache holds them; each measurement is one recorded graph over all copies,
replayed. Ceilings (a copy, a sum) are read before, between and after, the best of them counts. Medians, with the least
and the most. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.graph import scratch_gpu
from penstock.kernels.gpu import attention, dense
from penstock.kernels.gpu.cache import TensorKv
from penstock.kernels.gpu.choose import Kernels, choose
from penstock.kernels.gpu.memory import TensorScratch
from penstock.spec.format import Format, parse_format
from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec, Rope
from penstock.spec.parts import Part, parts
from penstock.store.quantize import encode, encode_rows
from penstock.units import MIB, format_rate, format_seconds

FORMATS = ("int4", "int8", "bfloat16")
KV_FORMATS = ("bfloat16", "int8", "int4")
CONTEXTS = (4096, 16384)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BEYOND_CACHE_BYTES = 512 * MIB  # the largest caches have some 60 (NVIDIA) to 256 MiB (AMD)
CEILING_BYTES = 1024 * MIB
REPLAYS = 15
STILL = (0.97, 0.9, 0.5, 0.1)  # shares of neurons that do not fire
DECODE_CONTEXT = 1024

Clock = Callable[[Callable[[], object]], list[float]]


def llama_8b() -> ModelSpec:
    a = Attention(32, 8, 128, 128**-0.5, rope=Rope(5e5, 128))
    layer = Layer(a, FfnSpec(14336, "silu", True))
    return ModelSpec("llama", "bfloat16", 128256, 4096, 4096, 131072, (layer,) * 32, NormSpec("rms", 1e-5), True, False)


def graph_clock(call: Callable[[], object]) -> list[float]:
    """Seconds of each replay of what `call` launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # compiles
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return found


@dataclass
class Bench:
    spec: ModelSpec
    device: torch.device
    kernels: Kernels
    clock: Clock
    beyond_cache_bytes: int = BEYOND_CACHE_BYTES
    ceiling_bytes: int = CEILING_BYTES

    def __post_init__(self) -> None:
        self.ceilings: list[float] = []
        self.found: dict[str, Any] = {}
        self.memory = torch.zeros(8 * scratch_gpu.WIDE_BYTES, dtype=torch.uint8, device=self.device)

    # -- what is measured -----------------------------------------------------------------------------

    def ceiling(self) -> None:
        """Bytes per second of a copy (read and written) and of a sum (read)."""
        source = torch.ones(self.ceiling_bytes // 4, device=self.device)
        target, total = torch.empty_like(source), torch.empty((), device=self.device)
        copied = self.clock(lambda: target.copy_(source))
        summed = self.clock(lambda: torch.sum(source, 0, out=total))
        self.ceilings += [
            2 * self.ceiling_bytes / statistics.median(copied),
            self.ceiling_bytes / statistics.median(summed),
        ]

    def gemv(self, name: str) -> None:
        """One row times the matrices of a layer, each op by itself."""
        fmt, rows = parse_format(name), 1
        attn, ffn = self.part(fmt, "0.attn"), self.part(fmt, "0.ffn")
        h, q, partial = self.activations(rows)
        run = {
            "qkv": (attn, ("q", "k", "v"), self.qkv_call(attn, h, q, rows)),
            "out": (attn, ("o",), lambda w: attention.out(
                w, attn, 0, self.a, q, partial, True, self.kernels, self.scratch())),
            "ffn": (ffn, ("gate", "up", "down"), lambda w: dense.ffn(
                w, ffn, self.spec.layers[0].ffns[0], h, partial, True, self.kernels, self.scratch())),
        }  # fmt: skip
        for op, (part, blocks, call) in run.items():
            nbytes = part.granules * sum(part.block(b).nbytes for b in blocks)
            self.report(f"{name}_{op}", nbytes, self.over_copies(part, call))

    def switch(self, name: str) -> None:
        """An FFN of more and more rows, straight from the packed weights and by widened ones."""
        part, found = self.part(parse_format(name), "0.ffn"), {}
        for rows in ROWS:
            h, _, partial = self.activations(rows)
            each = {}
            for way, few_rows in (("packed", rows), ("widened", 0)):
                kernels = replace(self.kernels, few_rows=few_rows)

                def call(w: Tensor, kernels: Kernels = kernels, h: Tensor = h, partial: Tensor = partial) -> None:
                    dense.ffn(w, part, self.spec.layers[0].ffns[0], h, partial, True, kernels, self.scratch())

                each[way] = statistics.median(self.over_copies(part, call))
            found[rows] = each
            line = "  ".join(f"{way} {format_seconds(s)}" for way, s in each.items())
            print(f"{name} FFN, {rows:3} rows: {line}", flush=True)
        faster = [rows for rows, each in found.items() if each["widened"] < each["packed"]]
        self.found[f"{name}_switch_rows"] = min(faster, default=None)
        self.found[f"{name}_ffn_rows_s"] = found

    def attend(self, name: str, context: int) -> None:
        """One row of one sequence after `context` positions; keys and values read are counted."""
        fmt, a = parse_format(name), self.a
        room = -(-(context + 64) // 64)
        nbytes = 2 * (context + 1) * a.kv_heads * fmt.kv_bytes(a.head_dim)
        pools = [self.pool(fmt, room) for _ in range(2 * -(-self.beyond_cache_bytes // nbytes))]
        q = torch.randn(1, a.heads, a.head_dim, device=self.device)
        out, where = torch.empty_like(q), self.where(context)

        def call() -> None:
            for keys, values in zip(pools[::2], pools[1::2], strict=True):
                attention.attend(q, keys, values, a, 0, a.kv_heads, *where, out, 1, self.kernels, self.scratch())

        self.report(f"attend_{name}_{context}", nbytes, [2 * s / len(pools) for s in self.clock(call)])

    def decode(self, name: str) -> None:
        """A token through all layers, their norms, merges and cache included, without embedding and head."""
        fmt, rows = parse_format(name), 1
        norms, attn, ffn = (self.part(fmt, key) for key in ("0.norms", "0.attn", "0.ffn"))
        n = len(self.spec.layers)
        weights = [(self.granules(norms)[0], self.granules(attn), self.granules(ffn)) for _ in range(n)]
        pools = [(self.pool(parse_format("bfloat16"), DECODE_CONTEXT // 64 + 1),) * 2 for _ in range(n)]
        h, q, partial = self.activations(rows)
        x, out, where = torch.randn_like(h), torch.empty_like(q), self.where(DECODE_CONTEXT)
        turn = self.turn(where[0])
        norm, layer, k, s = self.spec.norm, self.spec.layers[0], self.kernels, self.scratch

        def call() -> None:
            for (edge, a_weights, f_weights), (keys, values) in zip(weights, pools, strict=True):
                dense.norm_in(x, edge, norms, "attn_in", self.spec, True, h, k, s())
                attention.qkv(a_weights, attn, 0, self.a, norm, edge, norms, h, turn, *where, q, keys, values, k, s())
                attention.attend(q, keys, values, self.a, 0, self.a.kv_heads, *where, out, 1, k, s())
                attention.out(a_weights, attn, 0, self.a, out, partial, True, k, s())
                dense.merge(edge, norms, "attn", layer, norm, x, [partial], k, s())
                dense.norm_in(x, edge, norms, "ffn_in", self.spec, True, h, k, s())
                dense.ffn(f_weights, ffn, layer.ffns[0], h, partial, True, k, s())
                dense.merge(edge, norms, "ffn", layer, norm, x, [partial], k, s())

        each = sum(block.nbytes for part in (attn, ffn) for block in part.blocks for _ in range(part.granules))
        self.report(f"{name}_decode", n * each, self.clock(call))

    def neurons(self, name: str) -> None:
        """One row through an FFN of ReLUs without a gate that lies neuron by neuron, of which shares do not fire: its
        time over that of the same numbers in tiles, all computed (PowerInfer, Figure 16)."""
        ffn = FfnSpec(16384, "relu", False, True)
        spec = replace(self.spec, layers=(replace(self.spec.layers[0], ffn=ffn),))
        h, _, partial = self.activations(1)

        def seconds(layout: str, still: float) -> float:
            part = next(part for part in parts(spec, parse_format(layout)) if part.key == "0.ffn")
            bias = part.block("up_bias")
            fires = torch.rand(bias.cols, generator=torch.Generator().manual_seed(0)).argsort() >= still * bias.cols
            values = torch.where(fires, 1e4, -1e4).view(torch.uint8).to(self.device)

            def call(w: Tensor) -> None:
                dense.ffn(w, part, ffn, h, partial, True, self.kernels, self.scratch(), skips=still > 0)

            def with_bias(w: Tensor) -> Tensor:
                w[:, bias.offset : bias.offset + bias.nbytes] = values
                return w

            return statistics.median(self.over_copies(part, call, with_bias))

        tiled = seconds(name, 0.0)
        for still in STILL:
            self.found[f"{name}_still_{still}"] = seconds(f"{name}-neurons", still) / tiled
        line = "  ".join(f"{still:.0%} {self.found[f'{name}_still_{still}']:.2f}" for still in STILL)
        print(f"{name} FFN by neurons, time over tiles where so many do not fire: {line}", flush=True)

    # -- what they need -------------------------------------------------------------------------------

    @property
    def a(self) -> Attention:
        return self.spec.layers[0].attention

    def scratch(self) -> TensorScratch:
        return TensorScratch(self.memory)

    def part(self, fmt: Format, key: str) -> Part:
        return next(part for part in parts(self.spec, fmt) if part.key == key)

    def granules(self, part: Part) -> Tensor:
        """uint8 [n, granule_bytes], the same random granule again and again."""
        one = np.zeros(part.granule_bytes, np.uint8)
        rng = np.random.default_rng(0)
        for block in part.blocks:
            values = rng.normal(size=(block.rows, block.cols)).astype(np.float32) * np.float32(block.cols**-0.5)
            if block.stride:
                encode_rows(values, block, one)
                continue
            raw = encode(values, block.format, tiled=block.tiled)
            one[block.offset : block.offset + block.nbytes] = raw.view(np.uint8).reshape(-1)
        return torch.from_numpy(one).to(self.device).repeat(part.granules, 1)

    def over_copies(
        self, part: Part, call: Callable[[Tensor], None], changed: Callable[[Tensor], Tensor] = lambda w: w
    ) -> list[float]:
        """Seconds of one call, over as many copies of a unit as no cache holds. `changed`: what is done to the unit
        before."""
        first = changed(self.granules(part))
        copies = [first, *(first.clone() for _ in range(self.beyond_cache_bytes // first.numel()))]
        return [s / len(copies) for s in self.clock(lambda: list(map(call, copies)))]

    def activations(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """h [T, D], q [T, H, E], partial [T, D]."""
        h = torch.randn(rows, self.spec.d_model, device=self.device)
        return h, torch.randn(rows, self.a.heads, self.a.head_dim, device=self.device), torch.zeros_like(h)

    def where(self, position: int) -> tuple[Tensor, Tensor]:
        return tuple(torch.full((1,), n, dtype=torch.int32, device=self.device) for n in (position, 0))

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = self.a.head_dim // 2
        found = (
            torch.empty(len(positions), half, device=self.device),
            torch.empty(len(positions), half, device=self.device),
        )
        attention.turns(positions, torch.linspace(1, 1e-4, half, device=self.device), 1.0, *found)
        return found

    def pool(self, fmt: Format, pages: int) -> TensorKv:
        a = self.a
        shape = (pages, a.kv_heads, 64 * fmt.kv_bytes(a.head_dim))
        # 0x2c2c: 0.0652 in float16, small in bfloat16, and codes, scales and minimums of that size.
        blocks = torch.full(shape, 0x2C, dtype=torch.uint8, device=self.device)
        table = torch.arange(pages, dtype=torch.int32, device=self.device)[None]
        return TensorKv(blocks, 64, a.head_dim, fmt, table)

    def qkv_call(self, part: Part, h: Tensor, q: Tensor, rows: int) -> Callable[[Tensor], None]:
        keys, values = (self.pool(parse_format("bfloat16"), 2) for _ in range(2))
        where, norms = self.where(5), torch.zeros(4096, dtype=torch.uint8, device=self.device)
        turn, norms_part = self.turn(where[0]), self.part(part.blocks[0].format, "0.norms")
        return lambda w: attention.qkv(
            w, part, 0, self.a, self.spec.norm, norms, norms_part, h, turn, *where, q, keys, values, self.kernels,
            self.scratch(),
        )  # fmt: skip

    def report(self, name: str, nbytes: int, seconds: Sequence[float]) -> None:
        rates = sorted(nbytes / s for s in seconds)
        self.found[name] = {
            "bytes": nbytes, "s": statistics.median(seconds), "bytes_per_s": statistics.median(rates),
            "least": rates[0], "most": rates[-1], "share": statistics.median(rates) / max(self.ceilings),
        }  # fmt: skip
        print(
            f"{name:24} {format_seconds(statistics.median(seconds)):>9}  {format_rate(statistics.median(rates))} "
            f"({format_rate(rates[0])} to {format_rate(rates[-1])}), {self.found[name]['share']:.2f} of the ceiling",
            flush=True,
        )


def measure(bench: Bench, quick: bool) -> dict[str, Any]:
    bench.ceiling()
    for name in FORMATS:
        bench.gemv(name)
    bench.ceiling()
    for name in KV_FORMATS:
        for context in CONTEXTS:
            bench.attend(name, context)
    bench.decode("int4")
    for name in ("int4", "float16"):
        bench.neurons(name)
    if not quick:
        bench.switch("int4")
        bench.switch("bfloat16")
    bench.ceiling()
    return {**bench.found, "ceilings_bytes_per_s": bench.ceilings}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="without the switch between few and many rows")
    quick = options.parse_args().quick
    if not torch.cuda.is_available():
        sys.exit("bench.gpu_kernels: torch sees no CUDA or ROCm device here, so there is nothing to measure")
    device = torch.device("cuda")
    kernels, reason = choose(device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; {reason}", flush=True)
    found = measure(Bench(llama_8b(), device, kernels, graph_clock), quick)
    found |= {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "reason": reason}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
