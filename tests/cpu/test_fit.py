"""Fit is a contract: within the limit, to the byte, or refused with the minimum that then works."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.spec.format import Format
from penstock.spec.machine import PROCESS_BYTES, Capacity, MachineSpec, Rate
from penstock.spec.machine import dumps as dump_machine
from penstock.store.synth import synth
from tests.cpu.memory_cgroup import memory_cgroup, run_inside

MIB = 1 << 20
# 190 MiB in bfloat16: well above the limits below.
CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return synth(folder / "config.json", folder / "model", Format("bfloat16"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a machine file in it, so that no test waits for a probe."""
    from penstock.runtime.probe import machine_file

    folder = tmp_path_factory.mktemp("cache")
    rates = (Rate("host", "*", "*", 1e-5, 1e-10, 1e-11), Rate("disk0", "*", "*", 1e-4, 5e-10))
    path = machine_file(folder)
    path.parent.mkdir(parents=True)
    path.write_text(
        dump_machine(MachineSpec("test", (Capacity("host", 1 << 34), Capacity("disk0", 1 << 40)), rates, 2))
    )
    return folder


def penstock(cache: Path, *arguments: object, cgroup: Path | None = None) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "penstock.cli", *map(str, arguments), "--json", "--cache", str(cache)]
    done = run_inside(cgroup, command, timeout=600)
    lines = done.stdout.strip().splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


def run(cache: Path, model: Path, limit: int, cgroup: Path | None = None) -> tuple[int, dict[str, Any], str]:
    flags = ("--host-memory", limit, "--max-tokens", 3, "--context", 256, "--ignore-eos")
    return penstock(cache, "run", model, "a prompt of some bytes", *flags, cgroup=cgroup)


def test_a_limit_is_kept_inside_a_cgroup_of_that_size(model: Path, cache: Path) -> None:
    limit = 200 * MIB
    with memory_cgroup(limit) as cgroup:
        if cgroup is None:
            pytest.skip("this user may not make memory cgroups")
        code, report, errors = run(cache, model, limit, cgroup)
    assert code == 0, errors
    assert report["peak_host_bytes"] <= limit
    code, planned, errors = penstock(
        cache, "plan", model, "--host-memory", limit, "--context", 256, "--prompt-tokens", report["prompt_tokens"],
        "--output-tokens", 3,
    )  # fmt: skip
    assert code == 0, errors
    plan, predicted = planned["plan"], planned["predicted"]
    stride = {part["key"]: part["granule_bytes"] for part in json.loads((model / "penstock.json").read_text())["parts"]}
    streamed = sum((u["hi"] - u["lo"]) * stride[u["part"]] for u in plan["units"] if u["home"] == "disk0")
    assert streamed > 0
    assert report["disk_bytes_per_token"] == predicted["disk_bytes_per_token"] == streamed
    used = sum(arena["bytes"] for arena in plan["arenas"]) + plan["process_bytes"]
    assert 0.95 * limit <= used == predicted["peak_host_bytes"] <= limit
    # The process beside its arenas is what the plan says at most, and not much less.
    beside = report["peak_host_bytes"] - (used - plan["process_bytes"])
    assert 0.4 * plan["process_bytes"] <= beside <= plan["process_bytes"]


def test_the_refused_minimum_runs(model: Path, cache: Path) -> None:
    code, refused, errors = run(cache, model, 60 * MIB)
    assert code == 2
    error = refused["error"]
    assert (error["type"], error["tier"], error["have_bytes"]) == ("DoesNotFit", "host", 60 * MIB)
    assert len([line for line in errors.splitlines() if "too little" in line]) == 1
    minimum = error["minimum_bytes"]
    assert minimum > PROCESS_BYTES
    assert run(cache, model, minimum - MIB)[0] == 2
    with memory_cgroup(minimum) as cgroup:
        code, report, errors = run(cache, model, minimum, cgroup)
    assert code == 0, errors
    assert report["peak_host_bytes"] <= minimum


def test_a_tiny_model_is_a_small_process(cache: Path) -> None:
    source = Path(__file__).parents[3] / "shared" / "models" / "stories-260k"
    if not source.is_dir():
        pytest.skip("needs the shared model stories-260k")
    penstock(cache, "run", source, "Once", "--max-tokens", 1)  # packs it
    code, report, errors = penstock(cache, "run", source, "Once upon a time", "--max-tokens", 30)
    assert code == 0, errors
    assert report["peak_host_bytes"] < 120 * MIB


def test_more_than_the_machine_has_is_refused(model: Path, cache: Path) -> None:
    code, refused, _ = run(cache, model, 1 << 50)
    assert code == 2
    assert refused["error"]["type"] == "BadRequest"
