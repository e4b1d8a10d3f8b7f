"""`python -m bench.gpu_profile MODEL`: where the time of a decode step on a card goes, kernel by kernel.

MODEL: a packed or any other folder, wholly in the card's memory. The table has each kernel's share of a step, its calls
in a step and the seconds of one; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch

from penstock.runtime.device.choose import choose
from penstock.runtime.probe import load_or_probe
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache", type=Path, required=True, help="the folder that keeps the machine's figures")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=32)
    wanted = parser.parse_args()
    host = load_or_probe(wanted.cache)
    chosen = choose("cuda", host, None, wanted.cache)
    ask = Ask(context=wanted.context)
    engine = Engine.load(wanted.model, ask, Loading(machine=host, device=chosen, cache=wanted.cache))
    params = SamplingParams(max_tokens=wanted.tokens, temperature=0.0, ignore_eos=True)
    try:
        engine.generate_ids([1, 2, 3], params)  # compiles and records
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            engine.generate_ids([1, 2, 3], params)
        assert engine.last is not None
        speed = engine.last.decode_tokens_per_s
    finally:
        engine.close()
    found: defaultdict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us() / 1e6)
    steps = wanted.tokens
    rows = sorted(((sum(times), name, times) for name, times in found.items()), reverse=True)
    for total_s, name, times in rows[:25]:
        each_s, calls = total_s / len(times), len(times) / steps
        print(f"{total_s / steps * 1e6:9.1f} us a step, {calls:6.1f} calls of {each_s * 1e6:8.2f} us: {name[:90]}")
    busy_s = sum(total_s for total_s, _, _ in rows) / steps
    print(json.dumps({"bench": "gpu_profile", "decode_tokens_per_s": speed, "busy_s_per_step": busy_s}))


if __name__ == "__main__":
    main()
