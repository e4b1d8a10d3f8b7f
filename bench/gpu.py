"""`python -m bench.gpu`: an 8B model on a card, in the placements that a device brings, each beside its physical bound.

Resident decode beside what the card's memory gives, streaming from RAM beside what pinned copies give, streaming from
the disk beside what direct reads give, a streamed prompt beside the longer of link and arithmetic; predicted beside
measured for each. accelerate's offload of the same shape and cap runs beside it where it is installed. Ceilings are
measured in the same run, right before each setting. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.cpu import DEFAULT_SHAPES
from bench.offload_engines import tell
from bench.peers import token_ids
from bench.report import model_folder
from penstock.planner.predict import predict
from penstock.planner.reads import with_reads
from penstock.planner.solve import candidates, settle_context
from penstock.planner.solve.problem import Problem
from penstock.runtime.ceilings import disk_read_bytes_per_s
from penstock.runtime.device.choose import ChosenDevice, choose
from penstock.runtime.probe import load_or_probe
from penstock.runtime.probe_disk import probe_file
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.places import GPU, HOST
from penstock.spec.plan import Plan
from penstock.store.packed import open_packed
from penstock.store.synth import synth
from penstock.units import GIB, MIB

LINK = "device memory, link"
SECONDS = 4.0  # of decoding


@dataclass(frozen=True)
class Setting:
    """`strategy`: of the solver's candidates, None takes the best. `bound`: what the speed is compared with."""

    name: str
    weights: str
    ask: Ask
    strategy: str | None
    bound: str  # memory | link | disk | prefill


SETTINGS = (
    Setting("resident int4", "int4", Ask(context=2048), None, "memory"),
    Setting("int4 in under 2 GB", "int4", Ask(context=1024, device_memory_bytes=2 * 10**9), LINK, "link"),
    Setting(
        "int4 from the disk", "int4",
        Ask(context=1024, device_memory_bytes=2 * 10**9, resident_bytes=1600 * MIB), LINK, "disk",
    ),
    Setting(
        "prompt of 1024, int4 in 2 GB", "int4",
        Ask(context=1536, prompt_tokens=1024, device_memory_bytes=2 * 10**9), LINK, "prefill",
    ),
    Setting("the solver's choice in 3 GB", "int4", Ask(context=1024, device_memory_bytes=3 * 10**9), None, "link"),
    Setting("bfloat16 within 6 GiB", "bfloat16", Ask(context=1024, device_memory_bytes=6 * GIB), LINK, "link"),
)  # fmt: skip


class Card:
    """The device's ceilings, now."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._there = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        self._here = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)

    def memory_bytes_per_s(self) -> float:
        """Reading: the sum of a gibibyte of float32. Integers, which torch widens first, take six times as long."""
        numbers = self._there.view(self._torch.float32)
        return int(self._there.numel()) / self._seconds(lambda: numbers.sum())

    def link_bytes_per_s(self) -> float:
        there = self._there[: self._here.numel()]
        return int(self._here.numel()) / self._seconds(lambda: there.copy_(self._here, non_blocking=True))

    def flops_per_s(self) -> float:
        """Products as our prompts have them: float32 in TF32."""
        torch = self._torch
        a, b = (torch.empty(4096, 4096, device="cuda") for _ in range(2))
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return 2 * 4096**3 / self._seconds(lambda: a @ b)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    def _seconds(self, work: Callable[[], object]) -> float:
        work()
        found = []
        for _ in range(7):
            begun, ended = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            work()
            ended.record()
            ended.synchronize()
            found.append(begun.elapsed_time(ended) / 1e3)
        return float(statistics.median(found))


def ceilings(folder: Path) -> dict[str, float]:
    """What card, link and the folder's disk give now. In a process of its own: buffers and workspaces that torch keeps
    would count against the cap of what is measured next."""
    command = [sys.executable, "-m", "bench.gpu", "--ceilings", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured_ceilings(folder: Path) -> dict[str, float]:
    card = Card()
    found = {
        "memory_bytes_per_s": card.memory_bytes_per_s(),
        "link_bytes_per_s": card.link_bytes_per_s(),
        "flops_per_s": card.flops_per_s(),
    }
    with probe_file(folder) as file:
        found["disk_bytes_per_s"] = disk_read_bytes_per_s(file)
    return found


def chosen_plan(setting: Setting, model: Path, machine: MachineSpec) -> Plan:
    packed = open_packed(model)
    ask = settle_context(replace(setting.ask, use_device=True), packed.spec)
    found = [
        c for c in candidates(Problem(ask, packed.spec, packed.weights, machine)) if GPU.executor in c.plan.tier_bytes()
    ]
    if setting.strategy is not None:
        found = [c for c in found if c.strategy == setting.strategy]
    if not found:
        sys.exit(f"{setting.name}: no such plan fits here")
    best = max(found, key=lambda c: predict(c.plan, ask, machine, spread=False).decode_tokens_per_s)
    return with_reads(best.plan, machine)[0]


def measure(
    setting: Setting, model: Path, host: MachineSpec, chosen: ChosenDevice, cache: Path, repeats: int
) -> dict[str, Any]:
    """One setting: decode (or the first token) beside prediction and bound. `host`: the machine without its device."""
    limits = ceilings(model.parent)
    plan = chosen_plan(setting, model, chosen.machine)
    engine = Engine.load(model, setting.ask, Loading(machine=host, device=chosen, plan=plan, cache=cache))
    vocab, prompt = plan.target.spec.vocab, setting.ask.prompt_tokens
    ids = token_ids(vocab, prompt).tolist()
    try:
        tokens = max(8, min(256, int(SECONDS * engine.prediction.decode_tokens_per_s)))
        engine.generate_ids(ids, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))  # kernels compile
        answers = []
        for _ in range(repeats):
            engine.generate_ids(ids, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
            assert engine.last is not None
            answers.append(engine.last)
    finally:
        engine.close()
    decode = [answer.decode_tokens_per_s for answer in answers]
    ttft = [answer.ttft_s for answer in answers]
    speed, first_s = statistics.median(decode), statistics.median(ttft)
    there = sum(plan.unit_bytes(u) for u in plan.units if u.home == GPU.executor and u.decode == GPU.executor)
    crosses = sum(
        plan.unit_bytes(u)
        for u in plan.units
        if u.home != GPU.executor and u.decode == GPU.executor and u.part != "embed"
    )
    read = sum(plan.unit_bytes(u) for u in plan.units if u.home.startswith("disk") and u.part != "embed")
    flops = 2 * prompt * sum(p.weights_of(0, p.granules) for p in plan.parts.values() if p.kind in ("attn", "ffn"))
    bounds = {
        "memory": limits["memory_bytes_per_s"] / max(1, there + crosses),
        "link": limits["link_bytes_per_s"] / max(1, crosses),
        "disk": limits["disk_bytes_per_s"] / max(1, read),
        "prefill": 1 / max(crosses / limits["link_bytes_per_s"], flops / limits["flops_per_s"]),
    }
    measured = 1 / first_s if setting.bound == "prefill" else speed
    predicted = engine.prediction
    return {
        "setting": setting.name,
        "share_of_bound": measured / bounds[setting.bound],
        "bound": setting.bound,
        "decode_tokens_per_s": [speed, min(decode), max(decode)],
        "ttft_s": [first_s, min(ttft), max(ttft)],
        "predicted_decode_tokens_per_s": predicted.decode_tokens_per_s,
        "predicted_ttft_s": predicted.ttft_s,
        "decode_error": abs(predicted.decode_tokens_per_s / speed - 1),
        "peak_device_bytes": answers[-1].peak_device_bytes,
        "planned_device_bytes": plan.tier_bytes()[GPU.executor],
        "peak_host_bytes": answers[-1].peak_host_bytes,
        "planned_host_bytes": plan.tier_bytes()[HOST],
        "bytes_there": there,
        "bytes_lifted": crosses,
        "ceilings": limits,
    }


def accelerate_beside(setting: Setting) -> dict[str, Any] | str:
    """What transformers with accelerate does of the same shape, with the same cap on the card."""
    if importlib.util.find_spec("accelerate") is None:
        return "not installed"
    cap = str(setting.ask.device_memory_bytes)
    command = [sys.executable, "-m", "bench.peers.accelerate_gpu", str(DEFAULT_SHAPES["8b"]), "--device-bytes", cap]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    except subprocess.TimeoutExpired:
        return "took more than 90 s"
    if done.returncode:
        return (done.stderr.strip() or "failed").splitlines()[-1]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keeps the models here (20 GB); default a temporary folder")
    parser.add_argument("--only", nargs="+", help="settings by the beginnings of their names")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the CPU is measured in haste")
    parser.add_argument("--ceilings", type=Path, metavar="FOLDER", help="print the ceilings alone, as one JSON object")
    wanted = parser.parse_args()
    if wanted.ceilings is not None:
        print(json.dumps(measured_ceilings(wanted.ceilings)))
        return
    with model_folder(wanted.folder) as folder:
        start_s, rows = time.perf_counter(), []
        host = load_or_probe(folder, whole=not wanted.quick)
        chosen = choose("cuda", host, None, folder)
        if chosen.name != "cuda":
            sys.exit(f"bench.gpu: {chosen.reason}")
        tell(f"probed after {time.perf_counter() - start_s:.0f} s")
        for setting in SETTINGS:
            if wanted.only and not setting.name.startswith(tuple(wanted.only)):
                continue
            model = folder / f"llama-3.1-8b-{setting.weights}"
            if not model.exists():
                synth(DEFAULT_SHAPES["8b"], model, parse_format(setting.weights))
            try:
                row = measure(setting, model, host, chosen, folder, wanted.repeats)
                if setting.weights == "bfloat16":
                    row["accelerate"] = accelerate_beside(setting)
            except Exception as error:  # the next setting may do
                row = {"setting": setting.name, "error": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            rows.append(row)
            tell(json.dumps(row))
        print(json.dumps({"bench": "gpu", "took_s": time.perf_counter() - start_s, "rows": rows}))


if __name__ == "__main__":
    main()
