"""The quick probe: a few figures are measured, and the rest follows from a machine that was measured whole."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.kernels import cpu
from penstock.planner.explain import Band
from penstock.planner.predict import predict
from penstock.planner.solve import solve
from penstock.runtime import probe as probes
from penstock.runtime.probe import kept, load_or_probe, machine_file
from penstock.runtime.probe_apart import Begun, _keep, _ratios, begun_in
from penstock.runtime.probe_parts import ProbeFindings
from penstock.runtime.probe_quick import Ratios, profile, quick_probe, scaled
from penstock.serve.history import error_band
from penstock.serve.planning import describe
from penstock.spec import machine as machines
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import MachineSpec
from tests.cpu.commands import MACHINE, here

ONES = Ratios(1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("isa", cpu.ISAS)
def test_every_instruction_set_has_a_machine_that_was_measured_whole_or_one_that_stands_for_it(isa: str) -> None:
    machine = profile(isa)
    assert f"{isa if isa.startswith('avx') else 'avx2'} kernels" in machine.name
    assert not machine.rough and machine.source.startswith("probe ")
    for kind in ("int4", "int8", "float16", "bfloat16", "float32"):
        for rows in (1, 2, 4, 8, 64, 512):
            assert machine.rate("host", "ffn", kind, rows).format == kind
        assert machine.rate("host", "attend", kind).format == kind


def test_what_was_measured_scales_what_follows_it() -> None:
    like = profile("avx2")
    assert scaled(like.rates, ONES) == like.rates
    after = replace(like, rates=scaled(like.rates, Ratios(3.0, 5.0, 7.0, 11.0)))

    def times(lane: str, op: str, kind: str, rows: int = 1) -> tuple[float, ...]:
        ours, theirs = (m.rate(lane, op, kind, rows) for m in (after, like))
        pairs = zip((ours.alpha_s, ours.s_per_byte, ours.s_per_flop),
                    (theirs.alpha_s, theirs.s_per_byte, theirs.s_per_flop), strict=True)  # fmt: skip
        return tuple(round(a / b, 6) if b else 0.0 for a, b in pairs)

    assert times("host", "qkv", "int8")[1] == 3.0
    assert times("host", "ffn", "float16", 512)[2] == 5.0
    assert times("host", "attend", "float16")[1] == 3.0 and times("host", "attend", "float16", 512)[2] == 5.0
    assert times("host", "norm", "*")[:2] == (1.0, 5.0) and times("host", "pass", "*")[0] == 1.0
    assert times("disk0", "load", "*")[:2] == (7.0, 7.0) and times("disk0", "fetch", "*")[:2] == (11.0, 7.0)
    assert times("disk_write0", "save", "*")[:2] == (7.0, 7.0)


def test_it_measures_this_machine(tmp_path: Path) -> None:
    machine = quick_probe(tmp_path, "int8")
    assert (
        machine.rough
        and 0 <= machine.crowded <= 1
        and machine.source.startswith("quick probe ")
        and not list(tmp_path.iterdir())
    )
    assert machines.loads(machines.dumps(machine), "itself") == machine
    spec, weights = describe(Path("llama-3.2-1b"), parse_format("int4"), to_plan=True)
    ask = Ask(host_memory_bytes=1 << 29, prompt_tokens=64, output_tokens=16)
    solved = solve(ask, spec, weights, machine)
    assert predict(solved.plan, ask, machine).decode_tokens_per_s > 0


def test_the_first_command_measures_in_haste_and_the_probe_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rough, told = replace(MACHINE, rough=True), list[str]()
    monkeypatch.setattr(probes, "quick_apart", lambda *_: rough)
    monkeypatch.setattr(probes, "probe_apart", lambda *_, **__: MACHINE)

    def load(**how: bool) -> MachineSpec:
        told.clear()
        return load_or_probe(tmp_path, lambda text, *_: told.append(text), **how)

    assert load().rough and len(told) == 1 and "in haste" in told[0]
    assert load().rough and not told
    assert not load(whole=True).rough and "a minute at most" in told[0]
    assert not load().rough and not told and kept(machine_file(tmp_path)) == MACHINE
    monkeypatch.setattr(probes, "quick_apart", lambda *_: None)  # where no machine is alike
    machine_file(tmp_path).unlink()
    assert not load().rough and "a minute at most" in told[0]


def test_a_probe_that_had_no_time_for_all_goes_on_however_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found out is a day old, so nothing of it counts any more."""
    late, whole = replace(MACHINE, source="probe; no time for RAM"), iter((MACHINE,))
    monkeypatch.setattr(probes, "probe_apart", lambda *_, **__: next(whole))
    file = machine_file(tmp_path)
    begun = probes.begun_file(file)
    probes.keep(file, late)
    _keep(begun, {"int8 products": ProbeFindings()})
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 90_000)
    assert begun_in(begun) == Begun() and load_or_probe(tmp_path).source == late.source
    assert load_or_probe(tmp_path, whole=True).source == MACHINE.source
    begun.unlink()  # as `probe_apart` does when it has everything
    assert load_or_probe(tmp_path, whole=True).source == MACHINE.source  # no other one is begun


def test_its_band_is_wider(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, weights = describe(Path("llama-3.2-1b"), parse_format("int4"), to_plan=True)
    solved = solve(Ask(), spec, weights, MACHINE)
    for rough, crowded, factor in ((False, 0.0, Band().decode.factor), (True, 0.05, 1.5), (True, 0.17, 2.0)):
        machine = replace(MACHINE, rough=rough, crowded=crowded)
        found = error_band(tmp_path / "machine.json", machine, solved.prediction, solved.plan, 1)
        assert found.decode.factor == found.ttft.factor == factor and not found.decode.known
    file = tmp_path / "cache" / "machines" / machine_file(tmp_path).name
    file.parent.mkdir(parents=True)
    for crowded, told in ((0.0, "1.50, assumed"), (0.17, "2.00, assumed")):
        file.write_text(machines.dumps(replace(MACHINE, rough=True, crowded=crowded)))
        said = here(capsys, "plan", "llama-3.2-1b", "--weights", "int4", "--why", "--cache", tmp_path / "cache")
        assert f"error band × or ÷ {told}" in said.out, said
        assert ("others kept it busy when it was measured" in said.out) == (crowded > 0)


def test_a_product_that_seems_to_take_no_time_for_its_bytes_tells_no_speed() -> None:
    """As a probe beside many busy processes found. Other figures would be scaled to nothing."""
    like = profile("avx512")
    flat = [replace(rate, alpha_s=1e-3, s_per_byte=0.0) for rate in like.rates if (rate.op, rate.rows) == ("ffn", 1)]
    ratios = _ratios(flat, {}, like)
    assert flat and ratios.few == 1.0
    slower = [replace(rate, s_per_byte=3 * rate.s_per_byte) for rate in like.rates if rate.op == "ffn"]
    assert _ratios(slower, {}, like).few == pytest.approx(3.0)
