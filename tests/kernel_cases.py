"""Every op of a random layer and batch (`kernel_draws`) on torch tensors beside the reference. The tests of the GPU
kernels share it, in the interpreter and on a card. It needs no native extension.

`gpu` modules are imported late: whoever wants Triton's interpreter says so before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.graph import ops, scratch_gpu
from penstock.graph.batch import Batch
from penstock.kernels import rope
from penstock.kernels.reference import attention, cache, dense
from penstock.kernels.reference.matrix import Scratch
from penstock.spec.format import Format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import Part, parts
from tests.kernel_draws import granules_of

# Steps between numbers of a KV cache, of the largest of them.
STEPS = {"float32": 0.0, "float16": 2**-10, "bfloat16": 2**-7, "int8": 2 / 255 + 2**-9, "int4": 2 / 15 + 2**-9}
NOTHING = float("nan")  # what every output and all scratch hold before


class OnDevice:
    """Arrays as tensors of a device."""

    device: torch.device
    rng: np.random.Generator

    def put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)

    def random(self, *shape: int) -> tuple[np.ndarray, torch.Tensor]:
        found = self.rng.normal(size=shape).astype(np.float32)
        return found, self.put(found)

    def blank(self, *shape: int) -> tuple[np.ndarray, torch.Tensor]:
        found = np.full(shape, NOTHING, np.float32)
        return found, self.put(found)

    def scratch(self, nbytes: int) -> Any:
        from penstock.kernels.gpu import memory

        nan = torch.full((nbytes,), 255, dtype=torch.uint8, device=self.device)  # in any float
        return memory.TensorScratch(nan)


@dataclass
class Case(OnDevice):
    """One layer with random weights and a filled cache, whose pages lie in any order; `run` does every op of a pass by
    both families."""

    spec: ModelSpec
    weights: Format
    kv: Format
    batch: Batch
    kernels: Any  # gpu.choose.Kernels
    device: torch.device
    seed: int
    context: int = 192
    page_tokens: int = 64
    near: float = 1.0  # times the op table's tolerance

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.layer = self.spec.layers[0]
        self.parts = {part.key: part for part in parts(self.spec, self.weights)}
        self.packed = {key: granules_of(part, self.rng) for key, part in self.parts.items()}
        # A unit's granules lie in the middle of an arena: what is before and after is not theirs.
        self.on_device = {key: self.put(np.pad(found, ((1, 1), (0, 0)), constant_values=255))[1:-1]
                          for key, found in self.packed.items()}  # fmt: skip
        self.pages_per_seq = -(-self.context // self.page_tokens)
        pages = len(self.batch.seqs) * self.pages_per_seq
        self.table = self.rng.permutation(pages).astype(np.int32).reshape(-1, self.pages_per_seq)
        self.pools = [self.fill_pool() for _ in range(2)]
        starts = zip(self.batch.start, self.batch.rows, strict=True)
        self.at = np.concatenate([np.arange(s, s + n) for s, n in starts])
        self.positions = self.put(self.at.astype(np.int32))
        self.sequence = self.put(np.repeat(np.arange(len(self.batch.rows)), self.batch.rows).astype(np.int32))
        self.t = self.batch.total_rows

    # -- data -----------------------------------------------------------------------------------------

    def fill_pool(self) -> np.ndarray:
        """uint8 [pages, K, bytes]: numbers around 1, what no row should see included."""
        a, p = self.layer.attention, self.page_tokens
        pages = len(self.batch.seqs) * self.pages_per_seq
        blocks = np.zeros((pages, a.kv_heads, p * self.kv.kv_bytes(a.head_dim)), np.uint8)
        pool = cache.KvPool(blocks, p, a.head_dim, self.kv)
        for page in range(pages):
            for head in range(a.kv_heads):
                pool.store(page, head, 0, self.rng.normal(size=(p, a.head_dim)).astype(np.float32))
        return blocks

    def pool_pair(self, which: int) -> tuple[cache.KvPool, Any]:
        from penstock.kernels.gpu.cache import TensorKv

        e, blocks = self.layer.attention.head_dim, self.pools[which]
        ours = TensorKv(self.put(blocks), self.page_tokens, e, self.kv, self.put(self.table))
        return cache.KvPool(blocks.copy(), self.page_tokens, e, self.kv), ours

    def units(self, part: Part) -> list[tuple[int, int]]:
        """The part cut in two, where it can be."""
        cut = int(self.rng.integers(0, part.granules))
        return [(lo, hi) for lo, hi in ((0, cut), (cut, part.granules)) if lo < hi]

    # -- comparing ------------------------------------------------------------------------------------

    def compare(self, op: str, want: np.ndarray, got: torch.Tensor, size: float = 0.0, extra: float = 0.0) -> None:
        found, near = got.cpu().numpy(), ops.OPS[op].tolerance * self.near + extra
        error = np.abs(want - found).max()
        assert error <= near * max(np.abs(want).max(), size) + 1e-30, f"{op} differs by {error} of {np.abs(want).max()}"

    def numbers(self, blocks: np.ndarray) -> np.ndarray:
        """All of a pool as float32."""
        pool = cache.KvPool(blocks, self.page_tokens, self.layer.attention.head_dim, self.kv)
        room = Scratch(np.empty(1 << 18, np.uint8))
        return np.stack([
            pool.load(page, head, self.page_tokens, room).copy() for page in range(blocks.shape[0])
            for head in range(blocks.shape[1]) if not room.rewind(0)
        ])  # fmt: skip

    # -- ops ------------------------------------------------------------------------------------------

    def run(self) -> None:
        with np.errstate(all="ignore"):
            self.embedding()
            self.norms()
            self.qkv()
            for share in (1.0, 0.3):
                self.attend(share)
            self.out()
            self.ffn()
            self.merges()
            self.head()

    def embedding(self) -> None:
        from penstock.kernels.gpu import dense as gpu

        spec, part, edges = self.spec, self.parts["embed"], self.parts["edges"]
        tokens = self.rng.integers(0, spec.vocab, self.t).astype(np.int32)
        rows, got_rows = self.blank(self.t, spec.d_embed)
        dense.gather(self.packed["embed"], part, tokens, rows)
        gpu.gather(self.on_device["embed"], part, self.put(tokens), got_rows, self.kernels)
        self.compare("gather", rows, got_rows)
        x, got = self.blank(self.t, spec.d_model)
        dense.embed(rows, self.packed["edges"][0], edges, spec, self.at, x, Scratch(np.empty(1 << 20, np.uint8)))
        scratch = self.scratch(scratch_gpu.embed_bytes(edges, spec, self.t))
        gpu.embed(
            self.put(rows), self.on_device["edges"][0], edges, spec, self.positions, got, self.kernels, scratch
        )  # fmt: skip
        self.compare("embed", x, got)

    def norms(self) -> None:
        from penstock.kernels.gpu import dense as gpu

        spec, edges, part = self.spec, self.parts["edges"], self.parts["0.norms"]
        x, on_device = self.random(self.t, spec.d_model)
        room = Scratch(np.empty(1 << 20, np.uint8))
        chosen = self.put(np.array(self.batch.logits, np.int32))
        for key, which, present in (("0.norms", "attn_in", self.layer.norm_in), ("edges", "final", spec.final_norm)):
            final, where = which == "final", part if key == "0.norms" else edges
            shape = (len(self.batch.logits), spec.d_embed) if final else (self.t, spec.d_model)
            h, got = self.blank(*shape)
            dense.norm_in(
                x, self.packed[key][0], where, which, spec, present, h, room, self.batch.logits if final else None
            )  # fmt: skip
            scratch = self.scratch(scratch_gpu.norm_bytes(edges, spec, self.t))
            gpu.norm_in(
                on_device, self.on_device[key][0], where, which, spec, present, got, self.kernels, scratch,
                chosen if final else None,
            )  # fmt: skip
            self.compare("norm", h, got)

    def turn(self) -> tuple[Any, Any]:
        """cos and sin, for the reference and on the device."""
        from penstock.kernels.gpu import attention as gpu

        turning = self.layer.attention.rope
        if turning is None:
            return None, None
        inverse, factor = rope.frequencies(turning, self.context)
        cos, sin = (torch.full((self.t, len(inverse)), NOTHING, device=self.device) for _ in range(2))
        gpu.turns(self.positions, self.put(inverse), factor, cos, sin)
        return rope.tables(inverse, factor, self.at), (cos, sin)

    def tables(self) -> list[np.ndarray]:
        return list(self.table.astype(np.int64))

    def qkv(self) -> None:
        from penstock.kernels.gpu import attention as gpu

        a, part, key = self.layer.attention, self.parts["0.attn"], "0.attn"
        h, on_device = self.random(self.t, self.spec.d_model)
        q, got_q = self.blank(self.t, a.heads, a.head_dim)
        (keys, got_keys), (values, got_values) = (self.pool_pair(i) for i in range(2))
        turn, got_turn = self.turn()
        for lo, hi in self.units(part):
            attention.qkv(
                self.packed[key][lo:hi], part, lo, a, self.spec.norm, self.packed["0.norms"][0], self.parts["0.norms"],
                h, turn, self.batch, self.tables(), q, keys, values, Scratch(np.empty(1 << 23, np.uint8)),
            )  # fmt: skip
            gpu.qkv(
                self.on_device[key][lo:hi], part, lo, a, self.spec.norm, self.on_device["0.norms"][0],
                self.parts["0.norms"], on_device, got_turn, self.positions, self.sequence, got_q, got_keys, got_values,
                self.kernels, self.scratch(scratch_gpu.qkv_bytes(part, a, hi - lo, self.t)),
            )  # fmt: skip
        size = float(np.abs(h).max())
        self.compare("qkv", q, got_q, size)
        for want, got in ((keys, got_keys), (values, got_values)):
            found = torch.from_numpy(self.numbers(got.blocks.cpu().numpy()))
            self.compare("qkv", self.numbers(want.blocks), found, size, STEPS[self.kv.kind])

    def attend(self, share: float) -> None:
        from penstock.kernels.gpu import attention as gpu

        a, part = self.layer.attention, self.parts["0.attn"]
        sinks = got_sinks = None
        if a.sinks:
            block = self.parts["0.norms"].block("sinks")
            sinks = self.packed["0.norms"][0][block.offset : block.end].view(np.float32)
            got_sinks = self.put(sinks)
        q, on_device = self.random(self.t, a.heads, a.head_dim)
        want, got = self.blank(self.t, a.heads, a.head_dim)
        (keys, got_keys), (values, got_values) = (self.pool_pair(i) for i in range(2))
        for pool in (got_keys, got_values):  # beyond what a sequence has seen there may be anything
            seen = zip(self.batch.start, self.batch.rows, strict=True)
            for s, (start, rows) in enumerate(seen):
                pages = -(-(start + rows) // self.page_tokens)
                pool.blocks[self.put(self.table[s, pages:].astype(np.int64))] = 255
        for lo, hi in ((part.granule_rows * edge for edge in unit) for unit in self.units(part)):  # of KV heads
            attention.attend(
                q, keys, values, a, lo, hi, self.batch, self.tables(), want, Scratch(np.empty(1 << 22, np.uint8)),
                sinks, share,
            )  # fmt: skip
            gpu.attend(
                on_device, got_keys, got_values, a, lo, hi, self.positions, self.sequence, got, max(self.batch.rows),
                self.kernels, self.scratch(scratch_gpu.attend_bytes(a, hi - lo, self.t)), got_sinks, share,
            )  # fmt: skip
        self.compare("attend", want, got)

    def out(self) -> None:
        from penstock.kernels.gpu import attention as gpu

        a, part = self.layer.attention, self.parts["0.attn"]
        heads, on_device = self.random(self.t, a.heads, a.head_dim)
        want, got = self.blank(self.t, self.spec.d_model)
        for lo, hi in self.units(part):
            attention.out(
                self.packed["0.attn"][lo:hi], part, lo, a, heads, want, lo == 0, Scratch(np.empty(1 << 23, np.uint8))
            )  # fmt: skip
            gpu.out(
                self.on_device["0.attn"][lo:hi], part, lo, a, on_device, got, lo == 0, self.kernels,
                self.scratch(scratch_gpu.out_bytes(part, hi - lo, self.t)),
            )  # fmt: skip
        self.compare("out", want, got, float(np.abs(heads).max()))

    def ffn(self) -> None:
        from penstock.kernels.gpu import dense as gpu

        part = self.parts["0.ffn"]
        h, on_device = self.random(self.t, self.spec.d_model)
        want, got = self.blank(self.t, self.spec.d_model)
        pending = np.zeros_like(want)
        units = self.units(part)
        for lo, hi in units:
            into = dense.FfnSum(want, pending, lo == 0, lo > 0, hi < part.granules)
            room = Scratch(np.empty(1 << 23, np.uint8))
            dense.ffn(self.packed["0.ffn"][lo:hi], part, lo, self.layer.ffns[0], h, into, room)
            gpu.ffn(
                self.on_device["0.ffn"][lo:hi], part, self.layer.ffns[0], on_device, got, lo == 0, self.kernels,
                self.scratch(scratch_gpu.ffn_bytes(part, hi - lo, self.t)), bool(self.seed % 2),
            )  # fmt: skip
        self.compare("ffn", want, got, (1 + float(np.abs(h).max())) ** 3)  # relu² times up; biases are about 1

    def merges(self) -> None:
        from penstock.kernels.gpu import dense as gpu

        spec, part = self.spec, self.parts["0.norms"]
        for block in ("attn", "ffn"):
            x, got = self.random(self.t, spec.d_model)
            partials = [self.random(self.t, spec.d_model) for _ in range(int(self.rng.integers(1, 7)))]
            dense.merge(
                self.packed["0.norms"][0], part, block, self.layer, spec.norm, x, [p[0] for p in partials],
                Scratch(np.empty(1 << 20, np.uint8)),
            )  # fmt: skip
            gpu.merge(
                self.on_device["0.norms"][0], part, block, self.layer, spec.norm, got, [p[1] for p in partials],
                self.kernels, self.scratch(scratch_gpu.merge_bytes(spec, self.t)),
            )  # fmt: skip
            self.compare("merge", x, got)

    def head(self) -> None:
        from penstock.kernels.gpu import dense as gpu

        spec = self.spec
        key = "embed" if spec.tied else "head"
        part, n = self.parts[key], len(self.batch.logits)
        h, on_device = self.random(n, spec.d_embed)
        logits, got = self.blank(n, spec.vocab)
        best, ids = np.full(n, NOTHING, np.float32), np.full(n, 7, np.int32)
        got_best, got_ids = self.put(best), self.put(ids)
        for lo, hi in self.units(part):
            dense.head(
                self.packed[key][lo:hi], part, lo, h, spec.logit_softcap, logits, best, ids, lo == 0,
                Scratch(np.empty(1 << 22, np.uint8)),
            )  # fmt: skip
            gpu.head(
                self.on_device[key][lo:hi], part, lo, on_device, spec.logit_softcap, got, got_best, got_ids, lo == 0,
                self.kernels, self.scratch(scratch_gpu.head_bytes(part, hi - lo)),
            )  # fmt: skip
        size = max(float(np.abs(h).max()), spec.logit_softcap)
        self.compare("head", logits, got, size)
        self.compare("head", best, got_best, size)
        # The same token, or one whose logit is as large but for the tolerance.
        near = 2 * self.near * ops.OPS["head"].tolerance * max(np.abs(logits).max(), size) + 1e-30
        assert (logits[np.arange(n), got_ids.cpu().numpy()] >= logits.max(axis=1) - near).all()
