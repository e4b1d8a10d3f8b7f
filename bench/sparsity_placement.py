"""The part `placement` of `bench.sparsity`: four ways to place neurons beside a device, in emulated time.

A small OPT (8 layers, 1,024 wide, int4-records) with stated predictors that call other neurons active for each token,
those at the first places most often; an emulated device that holds a part of it, whose kernels are the CPU's and whose
link has a set speed. Each plan of `solve/powerinfer` decodes the same tokens in turns. What the figures say of a real
device is what waiting for each other costs; a device's own speed means nothing here.

Beside that, placements of 80 layers beside a card, and of models for which waiting for the CPU binds, all simulated:
how long each program takes, and how far from the best there is its answer may be.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import penstock
from bench.peers.within import given
from bench.sparsity_models import STATED_ACTIVE, STATED_SHARE, STEEPNESS, Models, run_penstock, tell
from bench.stated_predictors import state_by_rates
from penstock.graph import passes
from penstock.planner.activity import published
from penstock.planner.programs import neuron_choice, neurons, placement
from penstock.planner.programs.neurons import NeuronProgram
from penstock.planner.shorten import quick
from penstock.planner.solve import powerinfer, settle_context, solve
from penstock.planner.solve.problem import Problem
from penstock.runtime.device.choose import choose
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.planning import describe, firing_of, routers_of
from penstock.spec import machine as machines
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import MachineSpec
from penstock.store.packed import open_packed
from penstock.store.predictors import FILE as PREDICTORS
from penstock.units import GIB, MIB

CONFIG = {
    "model_type": "opt", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "ffn_dim": 4096,
    "word_embed_proj_dim": 1024, "vocab_size": 8192, "max_position_embeddings": 512, "activation_function": "relu",
    "do_layer_norm_before": True, "tie_word_embeddings": True, "torch_dtype": "float16",
}  # fmt: skip
DEVICE_MIB = (20, 26, 32, 38)
CONTEXT, PROMPT_TOKENS, TOKENS = 128, 16, 64
WAYS = (powerinfer.MEASURED, powerinfer.NAME, powerinfer.HOTTEST, powerinfer.RANDOM)


# (model, machine, GiB of its device), where waiting for the CPU costs more than the room for whole layers would hold.
LARGE, CARD = ("relullama-70b", 20), "pc-rtx4090-192gb"
BINDING = (("opt-13b", "pc-rtx4090-64gb", 5), ("opt-30b", "pc-rtx4090-64gb", 13))


def placements(models: Models, machine: MachineSpec, rounds: int) -> Iterator[dict[str, Any]]:
    """80 layers first, then cases that bind, then size after size of the emulated device's memory: tokens a second of
    each way over those of hottest first, as simulated and as the median of what was measured."""
    found: dict[str, Any] = {}
    for name, card, gib in ((LARGE[0], CARD, LARGE[1]), *BINDING):
        found[f"{name}_{gib}gib"] = _simulated(name, card, gib)
        tell(f"placement, {name} beside {gib} GiB of {card}: {found[f'{name}_{gib}gib']}")
        yield found
    config, model = models.folder / "placed.json", models.folder / "placed"
    config.write_text(json.dumps(CONFIG))
    if not (model / PREDICTORS).exists():
        run_penstock("synth", config, model, "--weights", "int4-records")
        state_by_rates(model, STATED_ACTIVE, STATED_SHARE, STEEPNESS, Loading(cache=models.cache))
    for mib in DEVICE_MIB:
        of = _of_memory(model, machine, mib * MIB, rounds)
        if of:
            found[str(mib)] = of
            tell(f"placement, {mib} MiB: {of}")
            yield found


def _simulated(name: str, card: str, gib: int) -> dict[str, Any]:
    """Of both programs (`programs/neurons`, `programs/placement`): seconds that an answer takes, and how far it may be
    from the best there is. And tokens a second of each way over those of hottest first."""
    spec, _ = describe(Path(name))
    machine = machines.loads((Path(penstock.__file__).parent / "machines" / f"{card}.json").read_text(), card)
    ask = Ask(prompt_tokens=300, output_tokens=64, context=512, device_memory_bytes=gib * GIB)
    problem = Problem(settle_context(ask, spec), spec, parse_format("int4"), machine)
    profile, seen = published(spec), list[tuple[NeuronProgram, Sequence[placement.TokenTimes]]]()
    assert profile is not None

    def noted(program: NeuronProgram, rates: Sequence[placement.TokenTimes]) -> neuron_choice.ChosenNeurons | None:
        seen.append((program, rates))
        return neuron_choice.hottest(program, rates)

    for _ in powerinfer.with_profile(problem, profile, (noted,)):
        pass
    program, rates = seen[-1]
    start_s = time.perf_counter()
    by_program = neurons.solve(program)
    program_s = time.perf_counter() - start_s
    by_seconds = placement.fastest(program, rates)
    seconds_s = time.perf_counter() - start_s - program_s
    speeds = {
        each.strategy: quick(each.plan, problem.ask, machine, spread=False).decode_tokens_per_s
        for each in powerinfer.candidates(problem)
    }
    hottest = speeds.get(powerinfer.HOTTEST)
    return {
        "layers": len(spec.layers), "groups": sum(len(layer.impacts) for layer in program.layers),
        "program_s": program_s, "program_gap": by_program and by_program.gap,
        "seconds_s": seconds_s, "seconds_gap": by_seconds and by_seconds.gap,
        "simulated": {way: speed / hottest for way, speed in speeds.items()} if hottest else None,
    }  # fmt: skip


def _of_memory(model: Path, of: MachineSpec, device_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    ask = Ask(
        context=CONTEXT, prompt_tokens=PROMPT_TOKENS, output_tokens=CONTEXT - PROMPT_TOKENS, sparsity="predict",
        device_memory_bytes=device_bytes, use_device=True,
    )  # fmt: skip
    how = Loading(device="emulated")
    packed = open_packed(model)
    machine = choose("emulated", of, device_bytes).machine
    routers, firing = routers_of(model, packed.spec, "predict"), firing_of(model, packed.spec, "predict")
    solved = solve(ask, packed.spec, packed.weights, machine, trace=routers, firing=firing, every=True)
    # Of several plans of a way the fastest. Ways may come to the same plan.
    first = {name: each for each in reversed(solved.compared) for name in each.candidate.names}
    if not set(WAYS) <= set(first):
        return {}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        engines = {way: Engine.load(model, ask, replace(how, plan=first[way].candidate.plan)) for way in WAYS}
        for each in engines.values():
            stack.callback(each.close)
        for i in range(rounds + 1):
            for way in WAYS[:: 1 if i % 2 == 0 else -1]:
                seconds = _decode(engines[way])
                if i:
                    times[way].append(seconds)
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
