"""What `bench.throughput` says of a block: bytes to the byte wherever KV lies, and figures that no later failure takes
away."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bench import throughput, throughput_engines
from bench.peers import WorkerEnded
from bench.peers.block import Block
from bench.throughput import Setting, beside, medians
from bench.throughput_engines import absent, bound_needs_s
from bench.throughput_policies import Policies
from penstock.graph.check_plan import check_plan
from penstock.spec import plan as plans
from penstock.spec.ask import Ask
from penstock.store.packed import open_packed
from tests.cpu.commands import MACHINE, machine_cache
from tests.cpu.engines import make_model

HOMES = [("memory", "float16"), ("disk", "float16"), ("disk", "int8")]
OURS = {"decode_tokens_per_s": 6.0, "weights_once": True, "peak_exact": True}


@pytest.mark.parametrize(("home", "kv"), HOMES)
@pytest.mark.parametrize("steps", [0, 3])
def test_the_bytes_of_a_block(home: str, kv: str, steps: int, tmp_path: Path) -> None:
    """Weights once a pass and KV from its home: read as said, with prompts and behind prompts that nobody read."""
    model, cache = make_model(tmp_path, "llama", "int4"), machine_cache(tmp_path / "cache")
    ask = Ask(
        prompt_tokens=70, output_tokens=8, batch=4, context=128, objective="throughput", kv=kv, kv_home=home,
        resident_bytes=0,
    )  # fmt: skip
    block = Block(model, ask, cache, None)
    with closing(block.engine):
        facts = block.facts()
        if not steps:
            block.prompts(0)
        found = block.steps(steps) if steps else block.decode(0)
    assert found["exact"] is True and found["passes"] == (steps or 7)
    assert facts["pass_streamed_bytes"] > 0 and found["read_bytes"] > 0
    assert (found["kv_read_bytes"] > 0) == (home == "disk")
    # All but granules of the embedding's rows.
    assert found["read_bytes"] >= found["passes"] * facts["pass_streamed_bytes"] * 0.5 + found["kv_read_bytes"]
    a_token = found["kv_seen_bytes"] / found["passes"] / block.seqs / (70 + (found["passes"] + 1) / 2 + bool(steps))
    assert a_token == pytest.approx(sum(throughput_engines_kv(block)))
    needs = bound_needs_s(facts, found, disk=1e9, ram=1e10, ops=1e11)
    assert needs["disk"] * 1e9 == facts["pass_streamed_bytes"] + found["kv_read_bytes"] / found["passes"]


@pytest.mark.parametrize("kv_home", ["memory", "disk"])
def test_policies_without_a_part_of_the_search_can_run(kv_home: str, tmp_path: Path) -> None:
    """Also where the chosen plan has what only its own order allows: units in KV pages that nobody has."""
    packed = open_packed(make_model(tmp_path, "llama", "int4"))
    machine = MACHINE
    ask = Ask(
        prompt_tokens=70,
        output_tokens=8,
        batch=4,
        context=256,
        objective="throughput",
        kv_home=kv_home,
        resident_bytes=0,
    )
    policies = Policies(packed, ask, machine)
    assert policies.chosen().plan.guests == (kv_home == "memory")
    for policy in policies.ablated():
        check_plan(policy.plan, packed.spec, packed.weights)
        assert plans.loads(plans.dumps(policy.plan), "a plan") == policy.plan


def throughput_engines_kv(block: Block) -> Iterator[int]:
    """Bytes of K and V of a token, layer by layer."""
    (home,) = block.plan.kv
    for layer in block.plan.target.spec.layers:
        yield 2 * layer.attention.kv_heads * home.format.kv_bytes(layer.attention.head_dim)


def test_peers_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput_engines, "MODULES", {"llamacpp": ("json", "no_such_peer"), "accelerate": ("json",)})
    assert absent(["llamacpp", "accelerate", "row_by_row"]) == {
        "llamacpp": "ModuleNotFoundError: No module named 'no_such_peer'"
    }


def test_rounds_with_and_without_a_peer() -> None:
    rows = [
        {**OURS, "vs_a": 2.0, "vs_b": None, "peers": {"a": {"decode_tokens_per_s": 3.0}, "b": None}},
        {**OURS, "decode_tokens_per_s": 8.0, "weights_once": False, "vs_a": None, "vs_b": None, "peers": {"a": None}},
    ]
    found = medians(rows)
    assert (found["decode_tokens_per_s"], found["vs_a"], found["vs_b"]) == (7.0, 2.0, None)
    assert found["weights_once"] is False and found["peak_exact"] is True and "vs_b" not in found["ranges"]
    assert beside(rows[0], "a") == 2 and beside(rows[0], "b") is None and beside({"peers": {"a": OURS}}, "a") is None


class _Toy(Setting):
    """A setting without engines. The peer ends in its second turn, ours in its third."""

    def __init__(self, engines: object, name: str, steps: int, without: Any) -> None:
        self.name, self._without, self.errors = name, without, [0.25]
        self._rounds, self._seconds, self._tried, self._turns = [], {}, {}, 0
        self._size = None
        self.ceilings: Any = argparse.Namespace(close=lambda: None)

    def ours(self) -> dict[str, Any]:
        self._turns += 1
        if self._turns == 3:
            raise MemoryError("ours ended")
        return dict(OURS)

    def _single(self) -> dict[str, Any]:
        if self._turns == 1 and self._rounds[1:]:
            raise WorkerEnded("it was killed")
        return {"decode_tokens_per_s": 2.0}

    def _llamacpp(self) -> dict[str, Any]:
        raise AssertionError("it cannot be run here")


def test_what_was_measured_is_printed_whatever_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(throughput, "Setting", _Toy)
    monkeypatch.setattr(throughput, "absent", lambda peers: {"llamacpp": f"no such module, of {sorted(peers)}"})
    monkeypatch.setattr(throughput.BlockEngines, "write", lambda *_: None)
    monkeypatch.setattr(throughput, "kv_ratio", lambda characters: 1.002)
    argv = ["bench", "--only", "8b_2.86", "kv", "--rounds", "3", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match=r"failed: 8b_2\.86"):
        throughput.main()
    out, err = capsys.readouterr()
    report = json.loads(out.splitlines()[-1])
    found = report["8b_2.86"]
    assert report["failed"] == {"8b_2.86": "MemoryError: ours ended"} and "llamacpp cannot be run here" in err
    assert report["absent"] == {"llamacpp": "no such module, of ['llamacpp', 'single_stream']"}
    assert (found["decode_tokens_per_s"], found["vs_single_stream"], found["vs_llamacpp"]) == (6.0, 3.0, None)
    assert report["kv_int4_perplexity_ratio"] == 1.002  # the parts after it go on
    assert report["prediction_error_worst"] == 0.25 and found["weights_once"] is True
    assert [row["peers"]["single_stream"] is None for row in found["by_round"]] == [False, True, True]


def test_a_peer_that_is_stopped_has_what_it_did() -> None:
    setting = _Toy(None, "1b_bf16_1.6", 0, ())
    peers: dict[str, Any] = {"accelerate": None}

    def turn(size: tuple[int, int]) -> dict[str, Any]:
        if size == (3, 0):
            raise KeyboardInterrupt
        if size == (2, 0):
            raise WorkerEnded("killed for memory")
        return {"tokens": 4 * size[0], "seconds": 2.0}

    sizes = [(1, 0), (2, 0), (1, 7), (3, 0)]
    with pytest.raises(KeyboardInterrupt):
        setting._peer(peers, "accelerate", lambda: setting._of_size(turn, sizes, first=False))
    assert peers["accelerate"]["decode_tokens_per_s"] == 2.0
    setting._peer(peers, "accelerate", lambda: setting._of_size(turn, sizes[:3], first=False))
    assert setting._size == (1, 0) and peers["accelerate"]["sequences"] == 1


def test_a_policy_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = object.__new__(Setting)
    setting._seconds = {"12 at once": [4.0, 2.0], "without search": [6.0]}
    assert setting.regrets() == {"policies": {"12 at once": 3.0, "without search": 6.0}}
    setting._seconds["chosen"] = [3.3]
    assert setting.regrets()["policy_regret"] == pytest.approx(0.1) and setting.regrets()["fastest"] == "12 at once"
    assert setting.regrets()["table_4"] == {"without search": pytest.approx(0.55)}
