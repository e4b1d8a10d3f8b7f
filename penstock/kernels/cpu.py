"""Chooses the family of native kernels, and describes parts to them. Shapes are made once per part. Operands of calls
are addresses. `kernels/reference` defines the results of every op.

With `exact` activations stay float32. Otherwise activations are rounded to int8 before integer weights multiply them,
with one scale per group: beside int4, and beside the formats of GGUF files, whose makers round them too. docs/LOG.md
has the cost of that. Float weights, float8 and int8 are multiplied exactly.
"""

from __future__ import annotations

from dataclasses import replace

from penstock import _native
from penstock.graph.records import Records
from penstock.spec.format import Format
from penstock.spec.model import Attention, FfnSpec, NormSpec, Routed
from penstock.spec.parts import Block, Part

ISAS = ("avx512", "avxvnni", "avx2", "i8mm", "dotprod", "neon", "portable")  # the fastest of a processor first
UNPROVEN_ISAS = ("amx",)  # have never run on a processor that has them, so they are taken only where they are named


def available() -> tuple[str, ...]:
    """Families of kernels that this processor and build have, the fastest first, without unproven ones."""
    return tuple(isa for isa in ISAS if _exists(isa))


def nameable() -> tuple[str, ...]:
    """Families that a user may name here: the available ones, and unproven ones that this processor has."""
    return (*available(), *(isa for isa in UNPROVEN_ISAS if _exists(isa)))


def best_isa() -> tuple[str, str]:
    """(the family to use, the reason for the user)."""
    isas = available()
    return isas[0], f"{isas[0]} kernels: the best of {', '.join(isas)} here"


def chosen_isa(isa: str | None) -> tuple[str, str]:
    """(the family to use: `isa`, or with None the best, the reason for the user)."""
    return best_isa() if isa is None else (isa, f"{isa} kernels: asked for")


def rounds_activations(weights: Format) -> bool:
    """Whether activations are rounded to int8 unless the user wants them exact. That costs int4 weights 0.06 % of
    perplexity. It would cost int8 weights 0.15 % (stories-260k), as much as their own rounding, so for those
    activations stay exact. Formats of GGUF files were chosen by what they cost with activations rounded: of 32 columns
    here, of 32 or 256 in llama.cpp. Those of GPTQ and AWQ are rounded like int4. Beside float8 activations stay exact:
    its codes are no integers."""
    return weights.kind == "int4" or (weights.in_blocks and weights.kind != "float8")


def all_exact(part: Part, blocks: tuple[str, ...]) -> bool:
    """Whether these matrices of a part, which one op multiplies, are to have exact activations whatever the user
    wants: where one of them is int8."""
    return any(b.format.is_quantised and not rounds_activations(b.format) for b in part.blocks if b.name in blocks)


def _exists(isa: str) -> bool:
    try:
        _native.Compute(isa, 1)
    except ValueError:
        return False
    return True


def matrix(block: Block) -> _native.Matrix:
    return _native.Matrix(block.rows, block.cols, block.format.kind, block.format.group, block.offset, block.stride)


def _offset(part: Part, name: str) -> int:
    """Byte offset of a bias in its granule, 0 where there is none (a granule begins with a matrix)."""
    return part.block(name).offset if part.has(name) else 0


def ffn_shape(part: Part, ffn: FfnSpec) -> _native.FfnShape:
    gate = matrix(part.block("gate")) if part.has("gate") else None
    up, down = matrix(part.block("up")), matrix(part.block("down"))
    gate_bias, up_bias = _offset(part, "gate_bias"), _offset(part, "up_bias")
    return _native.FfnShape(gate, up, down, ffn.activation, gate_bias, up_bias)


def kept_shape(part: Part, ffn: FfnSpec) -> _native.FfnShape:
    """An FFN of which only what is activated lies in a granule (`graph.records`)."""
    records = Records.of(part)

    def kept(offset: int) -> int:
        return offset if offset < records.head else offset - records.tail + records.head

    gate = matrix(part.block("gate")) if part.has("gate") else None
    up, down = matrix(part.block("up")), matrix(part.block("down"))
    biases = (kept(_offset(part, name)) for name in ("gate_bias", "up_bias"))
    return _native.FfnShape(gate, up, down, ffn.activation, *biases)


def picked_shape(part: Part, ffn: FfnSpec) -> _native.FfnShape:
    """An FFN of which only the pages with records lie in a granule (`graph.records`). Its biases were added already."""
    first = Records.of(part).first
    moved = {
        block.name: replace(block, offset=block.offset - first) if block.stride else block for block in part.blocks
    }
    gate = matrix(moved["gate"]) if part.has("gate") else None
    return _native.FfnShape(gate, matrix(moved["up"]), matrix(moved["down"]), ffn.activation, 0, 0)


def qkv_shape(part: Part, a: Attention, norm: NormSpec) -> _native.QkvShape:
    q, k, v = (matrix(part.block(name)) for name in ("q", "k", "v"))
    q_bias, k_bias, v_bias = (_offset(part, name) for name in ("q_bias", "k_bias", "v_bias"))
    return _native.QkvShape(
        q, k, v, q_bias, k_bias, v_bias, norm.eps, a.rope.dims if a.rope else 0, a.qk_norm and a.norms_all_heads
    )


def router_shape(part: Part, routed: Routed, address: int) -> _native.RouterShape:
    """The router in a part whose granule lies at `address`."""
    router, gate = routed.router, matrix(part.block("shared_gate")) if routed.shared_gate else None
    return _native.RouterShape(
        matrix(part.block("scores")), gate, address + part.block("bias").offset if router.bias else 0,
        router.bias_scored, router.score == "softmax", router.normalised, router.groups, router.groups_kept,
        router.scale, routed.active,
    )  # fmt: skip


def attention_shape(a: Attention, lo: int, hi: int) -> _native.AttentionShape:
    """The shape of attention over KV heads lo..hi."""
    return _native.AttentionShape(a.heads, a.kv_heads, a.head_dim, lo, hi, a.scale, a.softcap, a.window)


def norm(shape: NormSpec | None, part: Part, name: str, address: int) -> _native.Norm:
    """The norm `name` of a part whose granule lies at `address`. `shape` None: no norm, x itself."""
    if shape is None:
        return _native.Norm("none", 0.0, 0.0, 0, 0)
    weight = address + part.block(name).offset if part.has(name) else 0
    bias = address + part.block(f"{name}_bias").offset if part.has(f"{name}_bias") else 0
    return _native.Norm(shape.kind, shape.eps, shape.offset, weight, bias)


def cache_shape(a: Attention, page_tokens: int, fmt: Format) -> _native.CacheShape:
    return _native.CacheShape(fmt.kind, fmt.group, a.kv_heads, page_tokens, a.head_dim)
