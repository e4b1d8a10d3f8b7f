"""Draws cases of `tests.at_size`: a real model's width with few layers, how it runs, and a schedule of passes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.kernels import cpu
from penstock.serve.shapes import locate
from penstock.spec.blocks import BLOCKS

SHAPES = (
    "llama-3.2-1b", "llama-3.1-8b", "qwen2.5-0.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-8b", "gemma-2-2b", "phi-3-mini",
    "gpt-oss-20b", "qwen3-30b-a3b", "olmoe-1b-7b", "mixtral-8x7b", "glm-4.5-air", "qwen2-57b-a14b", "opt-1.3b",
    "opt-6.7b", "relullama-7b", "mistral-nemo-12b",
)  # fmt: skip
FORMATS = ("int4", "int4", "int8", "bf16", "float16", "float32", "int4-g32", "int4-g128", "float8", *sorted(BLOCKS))
VOCABULARY = 640
CONTEXT = 1400
MOST_PROMPT = 1000
MOST_WEIGHT_BYTES = 3 << 29


@dataclass(frozen=True)
class Case:
    """`config`: of the shape, with fewer layers, experts and tokens. `share`: of the weights that stay in RAM.
    `kv_tokens`: None where each sequence has room for its whole context."""

    number: int
    shape: str
    config: dict[str, Any]
    weights: str
    kv: str | None
    isa: str
    exact: bool
    batch: int
    share: float
    chunk_rows: int
    objective: str
    kv_home: str | None
    kv_tokens: int | None

    def __str__(self) -> str:
        layers, batch = self.config["num_hidden_layers"], self.batch
        return (
            f"case {self.number}: {self.shape}, {layers} layers in {self.weights}, KV {self.kv}, {self.isa}"
            f"{', exact' if self.exact else ''}, {batch} sequences, {self.share:.0%} in RAM, {self.chunk_rows} rows, "
            f"{self.objective}{', KV on disk' if self.kv_home else ''}, KV of {self.kv_tokens or 'all'} tokens"
        )


class Rows(NamedTuple):
    """Rows of a pass: tokens `start` … of sequence `seq`."""

    seq: int
    start: int
    rows: int


def draw(number: int) -> Case:
    rng = random.Random(number)
    shape = rng.choice(SHAPES)
    config = _shortened(json.loads(locate(Path(shape)).read_text()), rng)
    weights = rng.choice(FORMATS)
    if config["model_type"] == "gpt_oss":
        weights = rng.choice((weights, "mxfp4"))
    return Case(
        number, shape, config, weights,
        kv=rng.choice((None, None, "int8", "int4", "bf16")),
        isa=rng.choice((cpu.best_isa()[0], cpu.best_isa()[0], rng.choice(cpu.available()))),
        exact=rng.random() < 0.25,
        batch=rng.choice((1, 2, 3, 5, 8, 9, 12)),
        share=rng.choice((1.0, 1.0, 0.5, 0.1)),
        chunk_rows=rng.choice((64, 200, 512, 777)),
        objective=rng.choice(("latency", "latency", "throughput")),
        kv_home=rng.choice((None, None, None, "disk")),
        kv_tokens=rng.choice((None, CONTEXT, 2 * CONTEXT)),
    )  # fmt: skip


def narrowed(case: Case) -> Case:
    """The case with hidden states of 64 numbers, as a model of Llama's: what does not depend on widths is tried in
    less time."""
    narrow = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    return replace(case, config=case.config | narrow | {"head_dim": 32, "model_type": "llama"})


def _shortened(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The config with one to three layers, few experts and few tokens."""
    layers = rng.randint(1, 3)
    config["num_hidden_layers"] = layers
    config["vocab_size"] = VOCABULARY
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    if config.get("mlp_only_layers"):
        config["mlp_only_layers"] = [0]
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if name in config:
            config[name] = min(config[name], 24)
    if "max_position_embeddings" in config:
        config["max_position_embeddings"] = max(CONTEXT, min(config["max_position_embeddings"], 4096))
    return config


def schedule(rng: random.Random, seqs: int, chunk_rows: int, rows_in_all: int) -> Iterator[list[Rows]]:
    """Passes over sequences of random lengths, in random company: rows of some sequences each, of which no pass has
    more than `chunk_rows`."""
    reached = [0] * seqs
    ends = [rng.choice((1, rng.randint(2, 40), rng.randint(2, CONTEXT))) for _ in range(seqs)]
    left = rows_in_all
    while left > 0:
        open_seqs = [seq for seq in range(seqs) if reached[seq] < ends[seq]]
        if not open_seqs:
            return
        room, now = min(chunk_rows, left), []
        for seq in rng.sample(open_seqs, rng.randint(1, len(open_seqs))):
            if not room:
                break
            most = min(room, ends[seq] - reached[seq])
            rows = rng.choice((1, min(most, rng.randint(1, 12)), rng.randint(1, most), most))
            now.append(Rows(seq, reached[seq], rows))
            reached[seq] += rows
            room -= rows
        left -= sum(each.rows for each in now)
        yield sorted(now)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts of random ids, of which some begin as an earlier one does."""
    drawn: list[list[int]] = []
    for _ in range(count):
        length = rng.choice((rng.randint(1, 40), rng.randint(1, 500), rng.randint(1, MOST_PROMPT)))
        before = rng.choice(drawn)[: rng.randint(0, length - 1)] if drawn and rng.random() < 0.4 else []
        drawn.append([*before, *(rng.randrange(VOCABULARY) for _ in range(length - len(before)))])
    return drawn
