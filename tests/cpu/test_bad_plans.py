"""Plans and machines from files that make no sense: refused in one line, never run."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.runtime import probe
from penstock.serve.planning import plan
from penstock.spec import machine as machines
from penstock.spec.format import parse_format
from penstock.store.synth import synth
from tests.cpu.commands import MACHINE, Call, apart, machine_cache, refused
from tests.cpu.configs import TINY_CONFIGS

# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(model: Path, cache: Path) -> dict[str, Any]:
    """`penstock plan --json` of the model, half on disk."""
    found = apart("plan", model, "--json", "--cache", cache, "--resident", "300KiB")
    assert found.code == 0, found.err
    return found.report


def plan_with(*keys: Any, value: Any) -> Callable[[dict[str, Any]], str]:
    def text(made: dict[str, Any]) -> str:
        plan = copy.deepcopy(made["plan"])
        at = plan
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value
        return json.dumps(plan)

    return text


PLANS = {
    "empty": (lambda made: "", "is not JSON"),
    "a list": (lambda made: "[1]", "should hold a JSON object"),
    "a plan that is none": (lambda made: '{"plan": 3}', "has schema None"),
    "nothing in it": (lambda made: '{"schema": "penstock.plan/3"}', "lacks"),
    "another version": (plan_with("schema", value="penstock.plan/0"), "has schema 'penstock.plan/0'"),
    "deep": (lambda made: '{"plan":' * 100_000, "not JSON"),
    "deep but whole": (lambda made: '{"plan":' * 900 + "{}" + "}" * 900, "schema"),
    "cut": (lambda made: json.dumps(made)[:-100], "is not JSON"),
    "NaN": (plan_with("context", value=math.nan), "NaN is not a number"),
    "huge": (plan_with("models", 0, "spec", "norm", "eps", value=10**400), "should be a finite number"),
    "float": (plan_with("context", value=64.0), "context should be int"),
    "names": (plan_with("ring_bytes", value={"a\nb": "x"}), "should be int"),
    "negative range": (plan_with("units", 3, "lo", value=-4), "granules"),
    "no units": (plan_with("units", value=[]), "have no home"),
    "ring too small": (plan_with("ring_bytes", "host", value=4096), "through a ring of 4096"),
    "ring gone": (plan_with("ring_bytes", value={}), "through a ring of 0"),
    "arena": (plan_with("arenas", 0, "bytes", value=2**23), "arena"),
    "device": (plan_with("units", 2, "home", value="gpu0"), "gpu0"),
    "another model": (plan_with("models", 0, "spec", "d_model", value=96), "another model: d_model differs"),
    "other weights": (plan_with("models", 0, "weights", "kind", value="bfloat16"), "bfloat16 weights"),
    "context": (plan_with("context", value=10**9), "more than the model's 256"),
    "batches": (plan_with("batches_per_pass", value=10**9), "batches_per_pass is 1000000000"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_makes_no_sense(name: str, made: dict[str, Any], call: Call, model: Path, tmp_path: Path) -> None:
    text, says = PLANS[name]
    (tmp_path / "plan").write_text(text(made))
    for args in (("run", model, "hi"), ("eval", model, tmp_path / "plan")):
        refused(call(*args, "--plan", tmp_path / "plan"), says, "BadRequest")


def test_a_plan_that_does_not_fit(made: dict[str, Any], call: Call, model: Path, tmp_path: Path) -> None:
    (tmp_path / "plan").write_text(json.dumps(made))
    flags = ("--plan", tmp_path / "plan", "--max-tokens", 2, "--ignore-eos")
    error = refused(call("run", model, "hi", *flags, "--host-memory", "82MiB"), "for this plan", "DoesNotFit")
    assert (error["tier"], error["have_bytes"]) == ("host", 82 << 20)
    minimum = error["minimum_bytes"]
    assert minimum == error["need_bytes"]
    refused(call("run", model, "hi", *flags, "--host-memory", minimum - 1), "for this plan", "DoesNotFit")
    assert call("run", model, "hi", *flags, "--host-memory", minimum).report["output_tokens"] == 2
    # What it says of the process is not what the process takes: the limit holds all the same.
    made = {**made, "plan": {**made["plan"], "process_bytes": 1}}
    (tmp_path / "plan").write_text(json.dumps(made))
    assert refused(call("run", model, "hi", *flags, "--host-memory", "60MiB"))["minimum_bytes"] == minimum
    refused(call("run", model, "x" * 257, *flags), "the prompt has 257 tokens")


def test_a_plan_for_other_weights(call: Call, model: Path, tmp_path: Path) -> None:
    for name in ("qwen3", "opt"):
        (tmp_path / "config.json").write_text(TINY_CONFIGS[name])
        (tmp_path / "plan").write_text(call("plan", tmp_path).out)
        refused(call("run", model, "hi", "--plan", tmp_path / "plan"), "this plan cannot run", "BadRequest")
    (tmp_path / "config.json").write_text(TINY_CONFIGS["llama"])
    other = synth(tmp_path, tmp_path / "int4", parse_format("int4"))
    (tmp_path / "plan").write_text(call("plan", other).out)
    refused(call("run", model, "hi", "--plan", tmp_path / "plan"), "int4 weights, the model has float32", "BadRequest")


# --- machines --------------------------------------------------------------------------------------------------------


def machine_with(*keys: Any, value: Any) -> str:
    machine = json.loads(machines.dumps(MACHINE))
    at = machine
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    return json.dumps(machine)


RATE, DISK_RATE = json.loads(machines.dumps(MACHINE))["rates"]
MACHINES = {
    "empty": ("", "is not JSON"),
    "another schema": ('{"schema": "penstock.plan/1"}', "schema"),
    "negative bandwidth": (machine_with("rates", 1, "s_per_byte", value=-1e-9), "s_per_byte is -1e-09"),
    "NaN": (machine_with("rates", 0, "alpha_s", value=math.nan), "NaN is not a number"),
    "infinite": (machine_with("rates", 0, "alpha_s", value=math.inf), "Infinity is not a number"),
    "beyond float": (machine_with("rates", 0, "alpha_s", value=0).replace('_s": 0,', '_s": 1e999,'), "finite"),
    "beyond everything": (machine_with("rates", 0, "alpha_s", value=10**400), "finite"),
    "a year a byte": (machine_with("rates", 0, "s_per_byte", value=1e300), "s_per_byte is 1e+300"),
    "free": (machine_with("rates", 0, value={**RATE, "alpha_s": 0, "s_per_byte": 0, "s_per_flop": 0}), "costs no time"),
    "no rates": (machine_with("rates", value=[]), "no rate for the lane host"),
    "no disk": (machine_with("rates", 1, "lane", value="disk1"), "no rate for the lane disk0"),
    "only one op": (machine_with("rates", 0, "op", value="ffn"), "has no rate for"),
    "no tier": (machine_with("tiers", 1, "name", value="disk9"), "lacks the tier disk0"),
    "empty tier": (machine_with("tiers", 0, "bytes", value=0), "tier host has 0 bytes"),
    "negative tier": (machine_with("tiers", 0, "bytes", value=-5), "tier host has -5 bytes"),
    "tier beyond everything": (machine_with("tiers", 0, "bytes", value=10**400), "tier host has 1"),
    "tiny tier": (machine_with("tiers", 0, "bytes", value=4096), "is too little"),
    "tier twice": (machine_with("tiers", 1, "name", value="host"), "names a tier twice"),
    "rate twice": (machine_with("rates", value=[RATE, RATE, DISK_RATE]), "two rates for host"),
    "rows below nothing": (machine_with("rates", 0, "rows", value=-1), "rows -1"),
    "a fit of 2": (machine_with("rates", 0, "r2", value=2.0), "r2 2.0"),
    "faster together": (machine_with("sharing", value=[{"lane": "host", "beside": "disk0", "factor": 0.5}]), "factor"),
    "no threads": (machine_with("threads", value=0), "threads 0"),
    "process": (machine_with("process_bytes", value=-1), "process_bytes -1"),
    "text": (machine_with("threads", value="2"), "should be int"),
    "null": (machine_with("tiers", value=None), "should be a list"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_that_cannot_be(name: str, call: Call, model: Path, tmp_path: Path) -> None:
    text, says = MACHINES[name]
    (tmp_path / "machine").write_text(text)
    refused(call("plan", model, "--machine", tmp_path / "machine"), says)


def test_a_machine_that_is_no_file(call: Call, model: Path, tmp_path: Path) -> None:
    refused(call("plan", model, "--machine", tmp_path), "cannot be read")
    refused(call("plan", model, "--machine", "my-laptop"), "there is no such file")
    (tmp_path / "machine").write_bytes(b"\xff\xfe")
    refused(call("plan", model, "--machine", tmp_path / "machine"), "not UTF-8")


VALUES = st.sampled_from(
    [None, True, 0, 1, -1, 2**40, 10**400, 0.0, 1e-300, 1e300, -1.0, "", "*", "host", "ffn", [], {}]
)
LEAVES = [
    *[("tiers", i, key) for i in (0, 1) for key in ("name", "bytes")],
    *[("rates", i, key) for i in (0, 1) for key in RATE],
    *[(key,) for key in ("name", "threads", "cpu", "process_bytes", "tiers", "rates")],
]  # fmt: skip


@pytest.mark.fuzz
@given(st.sampled_from(LEAVES), VALUES, st.sampled_from(["latency", "throughput"]))
def test_fuzz_machines(
    model: Path, tmp_path_factory: pytest.TempPathFactory, leaf: tuple[Any, ...], value: Any, objective: str
) -> None:
    """A plan whose figures are all finite, or one of our errors."""
    try:
        machine = machines.loads(machine_with(*leaf, value=value), "machine")
        solved = plan(model, machine=machine, objective=objective, resident_bytes=300_000)
    except PenstockError as error:
        assert error.exit_code == 2
        return
    figures = [v for v in vars(solved.prediction).values() if isinstance(v, int | float)]
    assert all(math.isfinite(v) and v >= 0 for v in [*figures, *solved.prediction.lane_share.values()])


def test_a_machine_file_of_ours_that_was_damaged(
    call: Call, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in the cache is measured again, not refused."""
    monkeypatch.setattr(probe, "quick_apart", lambda *_: MACHINE)  # which takes two seconds
    kept = next(machine_cache(tmp_path / "cache").rglob("*.json"))
    kept.write_bytes(b"\xff{")
    found = call("plan", model, "--cache", tmp_path / "cache")
    assert found.code == 0 and "measured this machine" in found.err
    assert json.loads(kept.read_text())["tiers"]
