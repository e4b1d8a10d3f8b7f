"""`bench.offload` where the peer does not live within the limit: ours is told all the same."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.budgets import weights_bytes
from bench.ceilings import Reading
from bench.files import FileEngines
from bench.offload import PEERS, Setting
from bench.offload_engines import LARGE
from bench.peers import WorkerEnded
from bench.throughput_engines import BlockEngines

FACTS = {"predicted_tokens_per_s": 2.0, "streamed_bytes": 5e8, "weight_bytes": 1e9}
ANSWER = {"seconds": 4.0, "disk_bytes_per_token": 5e8, "exact": True, "peak_host_bytes": 7}


class _Ceilings:
    def read(self) -> Reading:
        return Reading(1e10, 1e9, 1, 1)


class _Engines:
    """Ours answers, and a peer that is named in `alive`, in its first turns alone where a number is said."""

    threads = 2

    def __init__(self, alive: dict[str, int]) -> None:
        self.alive = alive

    def limit(self, shape: str, gb: float) -> int:
        return 1

    def ours(self, *_: object) -> Any:
        worker = SimpleNamespace(facts=FACTS, cpu_s=0.0, ask=lambda command, tokens: dict(ANSWER))
        return nullcontext((worker, SimpleNamespace(peak_bytes=lambda: 9)))

    def llamacpp(self, limit: int) -> Any:
        return self._peer("llamacpp")

    def accelerate(self, limit: int, cpu_bytes: int, copied: bool) -> Any:
        return self._peer("accelerate")

    def _peer(self, name: str) -> Any:
        if self.alive.get(name, 0) < 1:
            raise WorkerEnded(f"{name} ended with exit code -9")
        self.alive[name] -= 1
        return self.ours()


@pytest.mark.parametrize("shape", ["8b", "1b_bf16"])
def test_a_peer_that_ends_leaves_ours(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    peer = PEERS[shape]
    engines: Any = _Engines({})
    ceilings: Any = _Ceilings()
    found = Setting(engines, shape, 1.0, ceilings).measure(2)
    assert found["tokens_per_s"] == 3.0 and found["share_of_bound"] == pytest.approx(0.5 * 12 / 4)
    assert found[f"vs_{peer}"] is None and found[f"{peer}_tokens_per_s"] is None
    assert found[f"{peer}_peak_cgroup_bytes"] is None and found["peak_cgroup_bytes"] == 9
    assert f"without {peer}" in capsys.readouterr().err


def test_a_peer_that_ends_once_has_the_other_round(capsys: pytest.CaptureFixture[str]) -> None:
    engines: Any = _Engines({"llamacpp": 1})
    ceilings: Any = _Ceilings()
    found = Setting(engines, "8b", 1.0, ceilings).measure(2)
    assert found["vs_llamacpp"] == 3.0 / 0.75 and len(found["by_round"]) == 2
    assert [row["vs_llamacpp"] for row in found["by_round"]] == [4.0, None]
    assert found["by_round"][1]["llamacpp_ended"] == "llamacpp ended with exit code -9"
    assert "llamacpp ended" in capsys.readouterr().err


def test_other_shapes_have_names_and_budgets_of_their_own(tmp_path: Path) -> None:
    whole = json.loads(LARGE.read_text())
    (tmp_path / "half.json").write_text(json.dumps({**whole, "num_hidden_layers": 16}))
    ours, other = BlockEngines(tmp_path), BlockEngines(tmp_path, large=tmp_path / "half.json")
    assert ours.packed("8b").name == "llama-3.1-8b-int4" and ours.gguf.name == "llama-3.1-8b-q4_0.gguf"
    assert ours.packed("1b").name == "llama-3.2-1b-int4" and ours.packed("1b_bf16").name == "llama-3.2-1b-bfloat16"
    assert other.packed("8b").name == "half-int4" and other.config_file == tmp_path / "half.json"
    for engines in (ours, other):
        assert engines.limit("1b", 0.6) == 600_000_000 // 4096 * 4096
    share = weights_bytes(tmp_path / "half.json", "int4") / weights_bytes(LARGE, "int4")
    assert 0.5 < share < 0.6 and ours.limit("8b", 2.86) == 2_860_000_000 // 4096 * 4096
    assert other.limit("8b", 2.86) == pytest.approx(1e8 + 2.76e9 * share, rel=1e-4)
    assert FileEngines(tmp_path, tmp_path / "half.json", "q4_0").limit("q4_0", 2.86) == ours.limit("8b", 2.86)
