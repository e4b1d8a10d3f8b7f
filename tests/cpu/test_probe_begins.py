"""When attention over many rows begins: by new measurements, and by figures that were kept before."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from penstock.planner.pass_times import pass_s
from penstock.planner.solve import solve
from penstock.runtime.fit import fit
from penstock.runtime.probe import keep, kept
from penstock.runtime.probe_begins import _shortest_bytes, with_short_begins
from penstock.runtime.probe_ops import (
    KV_FORMATS,
    MANY_ROWS_TIMED,
    ONE_ROW_TIMED,
    TimedOp,
    attention_rates,
    attention_sizes,
)
from penstock.spec import machine as machines
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import MachineSpec, Rate
from penstock.spec.places import CPU
from tests.pure.machine import LLAMA_1B, MACHINE

ONE = 10e-6, 3e-11  # seconds of a call of one row beside its bytes, and of a byte
MANY = 8e-12  # seconds of a flop
PROFILES = sorted((Path(penstock.__file__).parent / "machines" / "profiles").glob("*.json"))


def timer(noise: float, seed: int):  # type: ignore[no-untyped-def]
    """Times calls of attention, those of many rows up to `noise` too long."""
    rng = random.Random(seed)

    def time(rows: int, start: int) -> list[TimedOp]:
        found = []
        for nbytes, flops in attention_sizes("float16", [(rows, start)]):
            seconds = ONE[0] + (nbytes * ONE[1] if rows == 1 else flops * MANY * (1 + noise * rng.random()))
            found.append(TimedOp("attend", nbytes, flops, seconds))
        return found

    return time


def said_wrongly(rates: list[Rate], begin_s: float) -> MachineSpec:
    """A machine with these rates of attention, where many rows take so long to begin."""
    rates = [replace(rate, alpha_s=begin_s) if not rate.rows else rate for rate in rates]
    others = [rate for rate in MACHINE.rates if rate.op != "attend"]
    return replace(MACHINE, rates=(*others, *rates))


@pytest.mark.parametrize("seed", range(8))
def test_noise_of_long_calls_is_not_their_begin(seed: int) -> None:
    one, many = attention_rates(CPU, "float16", timer(0.8, seed), lambda _: None)
    shortest_bytes = min(nbytes for nbytes, _ in attention_sizes("float16", ONE_ROW_TIMED))
    assert one.alpha_s == pytest.approx(ONE[0]) and one.s_per_byte == pytest.approx(ONE[1])
    assert many.alpha_s <= ONE[0] + shortest_bytes * ONE[1]
    assert MANY * 0.99 <= many.s_per_flop <= MANY * 1.8


def test_without_noise_the_line_is_what_it_was() -> None:
    _, many = attention_rates(CPU, "float16", timer(0, 0), lambda _: None)
    assert many.alpha_s == pytest.approx(ONE[0], rel=1e-3) and many.s_per_flop == pytest.approx(MANY)


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_the_shortest_call_that_is_timed(kv: str) -> None:
    assert _shortest_bytes(kv) == min(nbytes for nbytes, _ in attention_sizes(kv, ONE_ROW_TIMED))


def test_kept_figures_are_read_so_that_long_calls_take_what_they_took(tmp_path: Path) -> None:
    rates = attention_rates(CPU, "float16", timer(0, 0), lambda _: None)
    wrong = said_wrongly(rates, 2e-3)
    keep(tmp_path / "machine.json", wrong)
    machine = kept(tmp_path / "machine.json")
    assert machine is not None and machine == with_short_begins(wrong) == with_short_begins(machine)
    before, after = (of.rate(CPU, "attend", "float16", 512) for of in (wrong, machine))
    assert after.alpha_s < 20e-6 and before.alpha_s == 2e-3
    flops = [flops for _, flops in attention_sizes("float16", MANY_ROWS_TIMED)]
    took_s = [before.alpha_s + x * before.s_per_flop for x in flops]
    assert after.s_per_flop == fit(list(zip(flops, took_s, strict=True)), after.alpha_s).slope_s
    assert after.alpha_s + max(flops) * after.s_per_flop == pytest.approx(max(took_s), rel=0.25)
    assert {r for r in wrong.rates if r.op != "attend"} == {r for r in machine.rates if r.op != "attend"}


def test_rows_of_prompts_beside_answers_cost_what_attention_does() -> None:
    """A server's pass of seven answers and two rows of a prompt, in RAM."""
    rates = attention_rates(CPU, "float16", timer(0, 0), lambda _: None)
    wrong = said_wrongly(rates, 2e-3)
    plan = solve(Ask(batch=8, context=256, prompt_tokens=128), LLAMA_1B, parse_format("int4"), MACHINE).plan
    without_s = pass_s(plan, wrong, 7, 0)
    seemed_s, is_s = (pass_s(plan, machine, 7, 2) for machine in (wrong, with_short_begins(wrong)))
    layers = len(LLAMA_1B.layers)
    assert seemed_s > without_s + layers * 1.9e-3
    assert is_s < without_s + layers * 0.5e-3  # products of ten rows are a part of it


@pytest.mark.parametrize("file", PROFILES, ids=lambda file: file.stem)
def test_profiles_are_read_as_they_are(file: Path) -> None:
    machine = machines.loads(file.read_text(encoding="utf-8"), file.name)
    assert with_short_begins(machine) == machine


def test_figures_of_others_stay() -> None:
    assert with_short_begins(MACHINE) == MACHINE
