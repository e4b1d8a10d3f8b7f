"""`python -m bench.fit`: Llama-3.2-1B's shape in bfloat16 (2.5 GB) within 1500 MiB, the whole process, in a cgroup.

Checks what the memory contract promises: the peak, the use of the limit, the bytes read per token, and that the
minimum named by a refusal is the minimum. Weights are random. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.report import model_folder
from penstock.store.synth import synth
from penstock.units import MIB, format_bytes
from tests.cpu.memory_cgroup import memory_cgroup, run_inside

CONFIG = Path(__file__).parent / "shapes" / "llama-3.2-1b.json"
LIMIT_BYTES = 1500 * MIB
TOO_LITTLE_BYTES = 60 * MIB
PROMPT = "The quick brown fox jumps over the lazy dog."


def penstock(cache: Path, *arguments: object, limit_bytes: int | None = None) -> tuple[int, dict[str, Any], float]:
    """(exit code, JSON object, seconds) of a command, in a cgroup of `limit_bytes` where given."""
    command = [sys.executable, "-m", "penstock.cli", *map(str, arguments), "--json", "--cache", str(cache)]
    start_s = time.perf_counter()
    if limit_bytes is None:
        done = run_inside(None, command)
    else:
        with memory_cgroup(limit_bytes) as cgroup:
            if cgroup is None:
                print("no cgroup can be made here: the limit is checked by the process's own peak alone")
            done = run_inside(cgroup, command)
    took_s = time.perf_counter() - start_s
    if not done.stdout.strip():
        sys.exit(f"{' '.join(command)} printed nothing:\n{done.stderr}")
    return done.returncode, json.loads(done.stdout.strip().splitlines()[-1]), took_s


def measure(folder: Path, tokens: int) -> dict[str, Any]:
    model, cache = folder / "model", folder / "cache"
    if not model.exists():
        print(f"writing {CONFIG.stem} with random weights to {model}")
        synth(CONFIG, model, None)
    penstock(cache, "probe")
    flags = ("--max-tokens", tokens, "--ignore-eos")
    code, run, _ = penstock(cache, "run", model, PROMPT, "--host-memory", LIMIT_BYTES, *flags, limit_bytes=LIMIT_BYTES)
    assert code == 0, run
    work = ("--prompt-tokens", run["prompt_tokens"], "--output-tokens", tokens)
    _, planned, _ = penstock(cache, "plan", model, "--host-memory", LIMIT_BYTES, *work)
    plan = planned["plan"]
    strides = {p["key"]: p["granule_bytes"] for p in json.loads((model / "penstock.json").read_text())["parts"]}
    streamed = sum((u["hi"] - u["lo"]) * strides[u["part"]] for u in plan["units"] if u["home"] == "disk0")
    used = sum(arena["bytes"] for arena in plan["arenas"]) + plan["process_bytes"]
    refused_code, refused, refused_s = penstock(cache, "run", model, PROMPT, "--host-memory", TOO_LITTLE_BYTES, *flags)
    minimum = refused["error"]["minimum_bytes"]
    below_code, _, _ = penstock(cache, "run", model, PROMPT, "--host-memory", minimum - MIB, *flags)
    least_code, least, _ = penstock(
        cache, "run", model, PROMPT, "--host-memory", minimum, "--max-tokens", 2, "--ignore-eos", limit_bytes=minimum
    )
    return {
        "limit_bytes": LIMIT_BYTES,
        "peak_host_bytes": run["peak_host_bytes"],
        "within_limit": run["peak_host_bytes"] <= LIMIT_BYTES,
        "planned_share_of_limit": used / LIMIT_BYTES,
        "ring_bytes": plan["ring_bytes"].get("host", 0),
        "disk_bytes_per_token": run["disk_bytes_per_token"],
        "streamed_bytes": streamed,
        "disk_bytes_exact": run["disk_bytes_per_token"] == streamed,
        "decode_tokens_per_s": run["decode_tokens_per_s"],
        "predicted_tokens_per_s": run["predicted"]["decode_tokens_per_s"],
        "refused_exit_code": refused_code,
        "refused_s": refused_s,
        "minimum_bytes": minimum,
        "below_minimum_exit_code": below_code,
        "minimum_exit_code": least_code,
        "minimum_peak_host_bytes": least.get("peak_host_bytes"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keeps the model here; default a temporary folder")
    parser.add_argument("--tokens", type=int, default=6)
    wanted = parser.parse_args()
    with model_folder(wanted.folder) as folder:
        found = measure(folder, wanted.tokens)
    print(f"peak {format_bytes(found['peak_host_bytes'])} of {format_bytes(LIMIT_BYTES)}", end="; ")
    print(f"{found['planned_share_of_limit']:.1%} of the limit in use", end="; ")
    print(f"{format_bytes(found['disk_bytes_per_token'])} read per token")
    print(json.dumps({"bench": "fit", **found}))


if __name__ == "__main__":
    main()
