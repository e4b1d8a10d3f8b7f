"""The part `placement` of `bench.sparsity`: four ways to place neurons beside a device, in emulated time.

A small OPT (8 layers, 1,024 wide, int4-records) with stated predictors that call other neurons active for each token,
those at the first places most often; an emulated device that holds a part of it, whose kernels are the CPU's and whose
link has a set speed. Each plan of `solve/powerinfer` decodes the same tokens in turns. What the figures say of a real
device is what waiting for each other costs; a device's own speed means nothing here.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.peers.within import given
from bench.stated_predictors import state_by_rates
from penstock.graph import passes
from penstock.planner.solve import powerinfer, solve
from penstock.runtime.device.choose import choose
from penstock.runtime.probe import load_or_probe
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.planning import default_cache, firing_of, routers_of
from penstock.spec.ask import Ask
from penstock.store.packed import open_packed
from penstock.store.predictors import FILE as PREDICTORS
from penstock.units import MIB

CONFIG = {
    "model_type": "opt", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "ffn_dim": 4096,
    "word_embed_proj_dim": 1024, "vocab_size": 8192, "max_position_embeddings": 512, "activation_function": "relu",
    "do_layer_norm_before": True, "tie_word_embeddings": True, "torch_dtype": "float16",
}  # fmt: skip
DEVICE_MIB = (20, 26, 32, 38)
CONTEXT, PROMPT_TOKENS, TOKENS = 128, 16, 64
WAYS = (powerinfer.MEASURED, powerinfer.NAME, powerinfer.HOTTEST, powerinfer.RANDOM)


def placements(folder: Path, rounds: int, active: float, share: float, steepness: float) -> dict[str, Any]:
    """Of each size of the device's memory, tokens a second of each way over those of hottest first, as simulated and as
    the median of what was measured."""
    config, model = folder / "placed.json", folder / "placed"
    config.write_text(json.dumps(CONFIG))
    if not (model / PREDICTORS).exists():
        command = [sys.executable, "-m", "penstock.cli", "synth", str(config), str(model), "--weights", "int4-records"]
        subprocess.run(command, check=True)
        state_by_rates(model, active, share, steepness)
    found: dict[str, Any] = {}
    for mib in DEVICE_MIB:
        of = _of_memory(model, mib * MIB, rounds)
        if of:
            found[str(mib)] = of
            print(f"placement, {mib} MiB: {of}", flush=True)
    return found


def _of_memory(model: Path, device_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    ask = Ask(
        context=CONTEXT, prompt_tokens=PROMPT_TOKENS, output_tokens=CONTEXT - PROMPT_TOKENS, sparsity="predict",
        device_memory_bytes=device_bytes, use_device=True,
    )  # fmt: skip
    how = Loading(device="emulated")
    packed = open_packed(model)
    machine = choose("emulated", load_or_probe(default_cache(), kind="int4"), device_bytes).machine
    routers, firing = routers_of(model, packed.spec, "predict"), firing_of(model, packed.spec, "predict")
    solved = solve(ask, packed.spec, packed.weights, machine, trace=routers, firing=firing, every=True)
    # Of several plans of a way the fastest. Ways may come to the same plan.
    first = {name: each for each in reversed(solved.compared) for name in each.candidate.names}
    if not set(WAYS) <= set(first):
        return {}
    engines = {way: Engine.load(model, ask, replace(how, plan=first[way].candidate.plan)) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for i in range(rounds + 1):
        for way in WAYS[:: 1 if i % 2 == 0 else -1]:
            seconds = _decode(engines[way])
            if i:
                times[way].append(seconds)
    for each in engines.values():
        each.close()
    hottest = powerinfer.HOTTEST
    simulated = {way: first[way].prediction.decode_tokens_per_s for way in WAYS}
    return {
        way: {
            "simulated": simulated[way] / simulated[hottest],
            "measured": statistics.median(b / a for a, b in zip(times[way], times[hottest], strict=True)),
        }
        for way in WAYS
    }


def _decode(engine: Engine) -> float:
    """Seconds of so many tokens, one by one."""
    session, plan, ids = engine.session, engine.plan, given(PROMPT_TOKENS + TOKENS)
    for p in passes.prefill(plan, 0, PROMPT_TOKENS, passes.DECODE):
        batch = p.batches[0]
        session.step(p, [ids[batch.start[0] : batch.start[0] + batch.rows[0]]])
    start_s = time.perf_counter()
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + TOKENS):
        session.step(passes.decode(plan, (0,), (position,), passes.DECODE), [ids[position : position + 1]])
    return time.perf_counter() - start_s
