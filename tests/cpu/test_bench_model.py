"""`bench MODEL`: what it measures, that its parts fit together, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.graph.resident import resident_plan
from penstock.runtime.ceilings import Ceilings, ceilings_apart
from penstock.serve.bench import weight_bytes
from penstock.serve.bench_result import Measured
from penstock.serve.generation import percentiles
from penstock.serve.shapes import MODEL
from penstock.spec.format import Format
from penstock.store.packed import open_packed
from tests.cpu.commands import Call, here, refused
from tests.pure.machine import model as spec
from tests.traces import read_trace

FLAGS = ("--seconds", "0.1", "--repeats", "2")
needs_the_demo = pytest.mark.skipif(not MODEL.is_dir(), reason="no bundled model here")


@needs_the_demo
def test_the_bundled_model_with_half_of_it_on_disk(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("bench", MODEL, "--cache", cache, "--resident", "6800KiB", "--output-tokens", "12", "--prompt-tokens", "20")
    done = here(capsys, *args, *FLAGS, "--trace", tmp_path / "t.json", "--json")
    assert done.code == 0, done
    found = done.report
    assert (found["batch"], found["context"], found["prompt_tokens"], found["output_tokens"]) == (1, 512, 20, 12)
    assert found["repeats"] in (1, 2)
    for name in ("ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s"):
        assert 0 < found["least"][name] <= found[name] <= found["most"][name]
    gaps = found["inter_token_s"]
    assert 0 < gaps["p50"] <= gaps["p95"] <= gaps["p99"]
    assert {"ttft_s", "decode_tokens_per_s", "disk_bytes_per_token", "bound_by"} <= set(found["predicted"])
    ratios = found["measured_to_predicted"]
    assert ratios["ttft_s"] == pytest.approx(found["ttft_s"] / found["predicted"]["ttft_s"])
    lanes = found["lanes"]
    assert set(lanes) == {"host", "disk0"}
    shares = [lane["busy_share"] for lane in lanes.values()]
    assert all(0 < share <= 1 for share in shares)
    assert found["busy_over_wall"] == pytest.approx(sum(shares)) and 0 < found["overlap_share"] <= min(shares)
    packed = open_packed(next((cache / "models").glob("tale-llama*")))
    assert found["disk_bytes_per_token"] == found["predicted"]["disk_bytes_per_token"]
    assert packed.total_bytes / 3 < found["disk_bytes_per_token"] < packed.total_bytes
    assert found["bytes_moved"]["disk0"] > 11 * found["repeats"] * found["disk_bytes_per_token"]
    bound = found["bound"]
    ceilings = [Ceilings(**found["ceilings"][when]) for when in ("before", "after")]
    disk = sum(each.disk_read_bytes_per_s for each in ceilings) / 2
    ram = sum(each.ram_read_bytes_per_s for each in ceilings) / 2
    assert bound["disk_s"] == pytest.approx(found["disk_bytes_per_token"] / disk)
    assert bound["ram_s"] == pytest.approx(bound["weight_bytes_per_pass"] / ram)
    assert bound["weight_bytes_per_pass"] == packed.total_bytes  # its head is its embedding
    longest = max(bound["disk_s"], bound["ram_s"])
    assert found["bound_by"] == ("disk0" if longest == bound["disk_s"] else "host")
    assert found["share_of_bound"] == pytest.approx(found["decode_tokens_per_s"] * longest)
    assert found["peak_host_bytes"] > packed.total_bytes / 2
    assert "first token" in done.out and "a pass at least: " in done.out
    passes = [event for event in read_trace(tmp_path / "t.json") if event.get("cat") == "pass"]
    assert len(passes) == 3 + 12 * found["repeats"]  # with the warm-up's


def test_in_memory_the_disk_counts_for_nothing(model: Path, call: Call) -> None:
    found = call("bench", model, *FLAGS, "--batch", "3", "--output-tokens", "6", "--context", "80").report
    assert found["batch"] == 3 and set(found["lanes"]) == {"host"}
    assert found["disk_bytes_per_token"] == found["bound"]["disk_s"] == found["overlap_share"] == 0
    assert found["bound_by"] == "host"
    # A batch reads the weights once for all.
    assert found["bound"]["decode_tokens_per_s"] == pytest.approx(3 / found["bound"]["ram_s"])
    assert found["prompt_tokens"] <= 40 and found["ceilings"]["before"]["disk_read_bytes_per_s"] == 0


def test_a_plan_from_a_file(model: Path, tmp_path: Path, call: Call) -> None:
    planned = call("plan", model, "--resident", "0", "--context", "100")
    (tmp_path / "plan.json").write_text(planned.out)
    found = call("bench", model, *FLAGS, "--plan", tmp_path / "plan.json", "--output-tokens", "4").report
    assert found["context"] == 100 and found["disk_bytes_per_token"] > 0
    refused(call("bench", model, "--plan", tmp_path / "plan.json", "--resident", "0"), "--plan says what")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("nothing",), "nothing is not there"),
        (("ops", "x", "--batch", "2"), "ops takes"),
        (("ops", "x", "--trace", "t.json"), "ops takes"),
        (("ops", "x", "--context", "-1"), "-1 names none"),
        (("model", "x"), "for `penstock bench ops CONFIG`"),
        (("model", "--rows", "1"), "for `penstock bench ops CONFIG`"),
        (("MODEL", "--output-tokens", "1"), "should be 2 or more"),
        (("MODEL", "--prompt-tokens", "200", "--output-tokens", "100"), "context of 256 tokens"),
        (("MODEL", "--host-memory", "1MiB"), "1.00 MiB"),
        (("MODEL", "--seconds", "0"), "--seconds"),
    ],
)
def test_what_cannot_be_measured(args: tuple[str, ...], says: str, model: Path, call: Call) -> None:
    refused(call("bench", *(model if arg == "MODEL" else arg for arg in args)), says)


def test_arithmetic() -> None:
    assert Measured.of([3.0, 1.0, 8.0]) == Measured(3.0, 1.0, 8.0)
    assert percentiles([]) == {"p50": 0.0, "p95": 0.0, "p99": 0.0}
    assert percentiles([float(i) for i in range(100)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    tied, untied = (
        resident_plan(spec(tied=t), Format("float32"), kv=Format("float32"), rows=1, context=8) for t in (1, 0)
    )
    head = untied.parts["head"]
    assert weight_bytes(tied) == weight_bytes(untied) == sum(part.nbytes for part in tied.parts.values())
    assert head.nbytes == tied.parts["embed"].nbytes


def test_ceilings_of_a_small_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(3 * 4096 + 5))
    found = ceilings_apart(1, file)
    assert min(vars(found).values()) > 0
