"""The part `nemotron` of `bench.sparsity`: beside llama.cpp, which has no OPT.

A Nemotron with OPT-6.7B's layers (squared ReLU, no gate; 12 of 32 layers, so that a run takes a minute), all in memory,
beside llama.cpp, which computes all of it, in Q4_0: as many bytes as our int4. Weights are random; in ours 3 % of the
neurons fire, as `penstock synth --activation-rate` sets it, and predictors are stated (`bench.stated_predictors`). All
take turns in processes of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers import Worker
from bench.peers.random_gguf import bytes_per_token, load_config, write

SHAPE = Path(__file__).parent / "shapes" / "nemotron-opt-6.7b.json"
CONTEXT, TOKENS = 128, 24


def beside_llamacpp(
    make: Callable[[Path, str, str], Path], folder: Path, rounds: int, threads: int, layouts: dict[str, tuple[str, str]]
) -> dict[str, Any]:
    """Tokens a second of one stream, and over llama.cpp's in the same round. `make(folder, format, shape)`: a model.
    `layouts`: name → (format, sparsity)."""
    gguf = folder / f"{SHAPE.stem}-q4_0.gguf"
    if not gguf.exists():
        write(SHAPE, gguf)
    same = ("--threads", threads, "--context", CONTEXT)
    workers = {"llamacpp": Worker("bench.peers.llamacpp", gguf, "--config", SHAPE, *same)}
    for name, (weights, sparsity) in layouts.items():
        model = make(folder, weights, str(SHAPE))
        workers[name] = Worker("bench.peers.ours", model, *same, "--sequences", 1, "--sparsity", sparsity)
    for worker in workers.values():
        worker.ask("decode", 2)
    found: list[dict[str, float]] = []
    for i in range(rounds):
        found.append({})
        for name in sorted(workers, reverse=i % 2 == 1):
            found[-1][name] = TOKENS / workers[name].ask("decode", TOKENS)["seconds"]
        print(f"nemotron, round {i + 1}: { ({k: round(v, 2) for k, v in found[-1].items()}) }", flush=True)
    for worker in workers.values():
        worker.close()
    return {
        "bytes_per_token": bytes_per_token(load_config(SHAPE)),
        "tokens_per_s": {name: statistics.median(f[name] for f in found) for name in workers},
        "vs_llamacpp": {name: statistics.median(f[name] / f["llamacpp"] for f in found) for name in layouts},
    }
