"""Tiny models of every family, and their logits for the same two prompts: what tests of placement compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.graph import passes
from penstock.runtime.device import Device
from penstock.serve.session import Running, Session
from penstock.spec.format import parse_format
from penstock.spec.plan import Plan
from penstock.store.packed import Packed, open_packed
from penstock.store.synth import synth
from tests.cpu.configs import TINY_CONFIGS
from tests.plans import resident_plan, with_pages

Models = dict[str, Packed]  # by name of the tiny config
Logits = dict[tuple[str, str], np.ndarray]  # by model and format of the KV cache; float32 [rows, vocab]

PROMPTS = (23, 9)  # tokens of the two sequences; 32 rows a chunk
STEPS = 6  # the fourth and fifth are views of the third (`graph.recurring`)
KV_FORMATS = ("float32", "int8", "int4-g32")
# How far families of kernels may be from each other. Where one rounds a number of the cache up and another down, the
# logits differ by as much as a step of the format makes.
NEAR = {"float32": 1e-4, "int8": 2e-2, "int4-g32": 0.3}
FORMATS = {
    "llama": "float32",
    "qwen3": "int4",
    "gemma2": "int8",
    "falcon": "int8",
    "opt": "bfloat16",
    "qwen2_moe": "int4",
    "olmoe": "float32",
    "gpt_oss": "int4",
}
DENSE = tuple(sorted(name for name in FORMATS if name not in ("qwen2_moe", "olmoe", "gpt_oss")))  # what runs on devices


def near(name: str, kv: str) -> float:
    """How far a pass of other shapes may be: opt's learned positions stay with numpy, whose sums depend on them."""
    return NEAR[kv] if name == "opt" else NEAR["float32"]


def made(folder: Path) -> Models:
    models = {}
    for name, config in TINY_CONFIGS.items():
        source = folder / f"{name}.json"
        source.write_text(config)
        synth(source, folder / name, parse_format(FORMATS[name]))
        models[name] = open_packed(folder / name)
    return models


def serially(models: Models, **how: Any) -> Logits:
    """All in memory, one task after the other."""
    return {
        (name, kv): run(packed, resident_plan(packed.spec, packed.weights, batch_seqs=2, kv=kv), serial=True, **how)
        for name, packed in models.items()
        for kv in KV_FORMATS
    }


def run(
    packed: Packed, plan: Plan, device: Device | None = None, order: Sequence[int] = (), **how: Any
) -> np.ndarray:  # fmt: skip
    """Logits of every prompt token and of a few decode steps of both sequences, one array. `order`: of KV pages, as
    `with_pages` takes it."""
    session = Session(packed, plan, Running(**how), device=device)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, packed.spec.vocab, n).astype(np.int32) for n in PROMPTS]
    found = []
    for seq, ids in enumerate(prompts):
        for p in passes.prefill(plan, seq, len(ids), passes.DECODE if seq else None, score=True):
            batch = p.batches[0]
            rows = ids[batch.start[0] : batch.start[0] + batch.rows[0]]
            found.append(session.step(with_pages(plan, order, p), [rows])[0].copy())
    for step in range(STEPS):
        p = passes.decode(plan, (0, 1), tuple(n + step for n in PROMPTS), passes.DECODE if step + 1 < STEPS else None)
        tokens = [np.full(len(b.seqs), 7 + step, np.int32) for b in p.batches]
        found += [logits.copy() for logits in session.step(with_pages(plan, order, p), tokens)]
    session.close()
    return np.concatenate(found)


def require_near(found: np.ndarray, expected: np.ndarray, near: float) -> None:
    """Asserts that logits [rows, vocab] are near, and that the best token is the same where it is clear."""
    assert np.abs(found - expected).max() <= near
    ordered = np.sort(expected, axis=1)
    decided = ordered[:, -1] - ordered[:, -2] > 2 * near
    assert (found.argmax(axis=1) == expected.argmax(axis=1))[decided].all()
