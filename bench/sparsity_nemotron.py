"""The part `nemotron` of `bench.sparsity`: beside llama.cpp, which has no OPT.

A Nemotron with OPT-6.7B's layers (squared ReLU, no gate; 12 of 32 layers, so that a run takes a minute), all in memory,
beside llama.cpp, which computes all of it, in Q4_0: as many bytes as our int4. Weights are random; in ours 3 % of the
neurons fire, as `penstock synth --activation-rate` sets it, and predictors are stated (`bench.stated_predictors`). All
take turns in processes of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from bench.offload_engines import started
from bench.peers import Worker, WorkerEnded
from bench.peers.random_gguf import bytes_per_token, load_config, write
from bench.sparsity_models import CONTEXT, NEMOTRON, Models, tell
from bench.sparsity_ram import LAYOUTS

TOKENS = 24
PEER = "llamacpp"


def beside_llamacpp(
    models: Models, rounds: int, threads: int, layouts: Sequence[str], without: Collection[str]
) -> Iterator[dict[str, Any]]:
    """After each round: tokens a second of one stream, and over llama.cpp's in the same round; None where it is among
    `without`, or does not live."""
    config = models.config(str(NEMOTRON))
    gguf = models.folder / f"{config.stem}-q4_0.gguf"
    if not gguf.exists() and PEER not in without:
        tell(f"writing {gguf.name}")
        write(config, gguf)
    ours = {name: LAYOUTS[name] for name in ("off", "exact", "predict") if name in layouts}
    packed = {name: models.make(weights, str(NEMOTRON)) for name, (weights, _) in ours.items()}
    same = ("--threads", threads, "--context", CONTEXT)
    with ExitStack() as stack:

        def start(module: str, *arguments: object) -> Worker:
            worker = stack.enter_context(started(models.folder, module, None, *arguments, *same))[0]
            worker.ask("decode", 2)
            return worker

        workers: dict[str, Worker] = {}
        if PEER not in without:
            try:
                workers[PEER] = start("bench.peers.llamacpp", gguf, "--config", config)
            except WorkerEnded as ended:
                tell(f"nemotron, {PEER}: {ended}")
        for name, model in packed.items():
            workers[name] = start("bench.peers.ours", model, "--sequences", 1, "--sparsity", ours[name][1])
        found: list[dict[str, float]] = []
        for i in range(rounds):
            found.append({})
            for name in list(workers)[:: -1 if i % 2 == 1 else 1]:
                found[-1][name] = TOKENS / workers[name].ask("decode", TOKENS)["seconds"]
            tell(f"nemotron, round {i + 1}: { ({k: round(v, 2) for k, v in found[-1].items()}) }")
            yield {
                "bytes_per_token": bytes_per_token(load_config(config)),
                "tokens_per_s": {name: statistics.median(f[name] for f in found) for name in workers},
                "vs_llamacpp": {name: _beside(found, name, PEER) for name in ours},
                "vs_off": {name: _beside(found, name, "off") for name in ours},
            }


def _beside(found: Sequence[dict[str, float]], name: str, other: str) -> float | None:
    return statistics.median(f[name] / f[other] for f in found) if other in found[0] else None
