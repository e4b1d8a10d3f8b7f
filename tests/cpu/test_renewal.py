"""The promise by what disk and RAM give today: renewed before the first word, and told where it differs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DamagedModel
from penstock.planner.explain import Band, Width
from penstock.planner.predict import Prediction, Spread, predict
from penstock.runtime import first_loads, movers, reread
from penstock.runtime.probe import machine_file
from penstock.runtime.reread import NOTHING, End, Read, at_usual_speed
from penstock.serve import renewal
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.renewal import Renewed, Shift, tells
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec, Rate, dumps
from penstock.spec.places import CPU, DISK, is_disk
from penstock.store.packed import open_packed
from tests.cpu.commands import MACHINE, here
from tests.cpu.engines import GREEDY as SHORT
from tests.cpu.engines import load, make_model, streaming


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "llama", "float32")


def with_disk(bytes_per_s: float) -> MachineSpec:
    rates = (replace(r, s_per_byte=1 / bytes_per_s) if is_disk(r.lane) else r for r in MACHINE.rates)
    return replace(MACHINE, rates=tuple(rates))


@pytest.fixture
def slow_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """The second load takes 0.6 s more, beside too few others to leave it out. Returns the bytes/s of a disk that loads
    all but FFNs and embeddings so, at most."""
    plan, whole = streaming(open_packed(folder), ("norms", "edges", "attn")), movers.waited_for

    def slowly(*args: Any) -> Iterator[int]:
        for number, nbytes in enumerate(whole(*args)):
            time.sleep(0.6 if number == 1 else 0.0)
            yield nbytes

    monkeypatch.setattr(first_loads, "waited_for", slowly)
    return sum(plan.unit_bytes(unit) for unit in plan.units if unit.home == "host") / 0.6


@pytest.mark.parametrize("times_slower", [1, 3, 1000])
def test_a_disk_slower_than_foretold(folder: Path, slow_disk: float, times_slower: int) -> None:
    """The promise is that of the same plan, on a machine with a disk as slow as loading found it, within bounds."""
    plan, machine = streaming(open_packed(folder), ("norms", "edges", "attn")), with_disk(slow_disk * times_slower)
    with closing(Engine.load(folder, Ask(), Loading(machine=machine, plan=plan))) as engine:
        renewed = engine.renew()
        assert renewed is not None
        (disk,) = renewed.shifts  # so little stays that it says nothing of the RAM
        assert disk.what == "disk" and disk.measured_bytes_per_s == engine.session.loading.bytes_per_s <= slow_disk
        assert disk.times <= 1 and (times_slower == 1 or disk.times < 0.5)
        # On a busy machine loading may be a quarter as fast as stated in all cases.
        bounded = disk.measured_bytes_per_s <= 0.25 * disk.foretold_bytes_per_s
        assert (disk.times == 0.25) == bounded and (bounded or times_slower < 4)
        today = machine.faster(is_disk, disk.times)
        by_hand = predict(plan, replace(engine.ask, prompt_tokens=128), today)
        assert renewed.prediction.decode_tokens_per_s == pytest.approx(by_hand.decode_tokens_per_s, rel=0.05)
        if times_slower > 1:
            assert renewed.prediction.decode_tokens_per_s < 0.7 * engine.prediction.decode_tokens_per_s
            assert "with today's disk" in str(renewed.line(engine.prediction, engine.band()))
        (answer,) = engine.generate([[1, 2, 3]], SHORT)
    with load(folder) as engine:
        assert engine.generate([[1, 2, 3]], SHORT)[0].token_ids == answer.token_ids


def test_what_it_prints(folder: Path, slow_disk: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line before the first word, and both promises as JSON."""
    file = machine_file(tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text(dumps(with_disk(3 * slow_disk)))
    half = sum(part.nbytes for part in open_packed(folder).parts.values()) // 2
    args = ("run", folder, "a", "--cache", tmp_path, "--context", 64, "--resident", half, "--max-tokens", 3)
    found = here(capsys, *args, "--json").report
    assert found["renewed"]["today"]["disk"]["times"] < 1
    assert 0 < found["renewed"]["decode_tokens_per_s"] < found["predicted"]["decode_tokens_per_s"]
    told = here(capsys, *args).err
    assert "promised " in told and ", with today's disk " in told


@pytest.mark.parametrize("enough", [True, False])
def test_reads_on_where_loading_was_short(enough: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of the weights that stream, if there are enough of them; the answers stay."""
    plan, whole = streaming(open_packed(folder), ("norms", "edges")), movers.waited_for

    def slowly(*args: Any) -> Iterator[int]:
        for nbytes in whole(*args):
            time.sleep(0.1)
            yield nbytes

    monkeypatch.setattr(reread, "waited_for", slowly)
    monkeypatch.setattr(renewal, "_LEAST_READ_S", 0.5 if enough else 1e9)  # loading alone is never long enough then
    if enough:
        monkeypatch.setattr(renewal, "_LEAST_READ_BYTES", 1)
    with load(folder, plan) as engine:
        (expected,) = engine.generate([[1, 2, 3]], SHORT)
    with closing(Engine.load(folder, Ask(), Loading(machine=with_disk(1e12), plan=plan))) as engine:
        renewed = engine.renew()
        assert (renewed is not None) == enough
        if renewed is not None:
            (disk,) = renewed.shifts
            assert disk.measured_bytes_per_s < sum(part.nbytes for part in engine.packed.parts.values()) / 0.1
        assert engine.generate([[1, 2, 3]], SHORT)[0].token_ids == expected.token_ids


def test_a_disk_that_fails_while_it_is_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The promise stays. Who wants the weights afterwards says what is wrong with them."""
    plan = streaming(open_packed(folder), ("norms", "edges"))
    monkeypatch.setattr(renewal, "_LEAST_READ_BYTES", 1)

    def fails(*_: Any) -> Read:
        raise DamagedModel("a granule is not what was written")

    with closing(Engine.load(folder, Ask(), Loading(machine=MACHINE, plan=plan))) as engine:
        monkeypatch.setattr("penstock.serve.session.from_disk", fails)
        engine.renew()
        assert len(engine.generate([[1, 2, 3]], SHORT)[0].token_ids) == SHORT.max_tokens


def test_what_tells_nothing(folder: Path) -> None:
    """A model that is loaded in a moment says nothing of the disk, and passes that no prediction is about nothing."""
    assert not tells(Read(1 << 20, 0.4)) and tells(Read(1 << 20, 0.6)) and tells(Read(64 << 20, 0.02))
    assert not tells(Read(0, 0.0))
    with closing(Engine.load(folder, Ask(), Loading(machine=MACHINE, threads=1))) as engine:
        assert engine.renew() is None


@given(st.floats(0.1, 10), st.floats(0, 1))
def test_a_reading_that_swings_counts_in_part(times: float, swing: float) -> None:
    """The less, the more it swings, and never beyond what was measured; a large change counts nearly whole. The RAM's
    best reading counts whole."""
    whole, part = Shift("disk", 1e9, times * 1e9), Shift("disk", 1e9, times * 1e9, swing)
    more = Shift("disk", 1e9, times * 1e9, 2 * swing)
    assert min(1, whole.times) <= part.times <= max(1, whole.times)
    assert abs(math.log(more.times)) <= abs(math.log(part.times)) + 1e-12
    assert Shift("disk", 1e9, 0.4e9, 0.1).times < 0.43
    assert Shift("disk", 1e9, 0.8e9, 0.1).times == pytest.approx(0.8**0.8, rel=0.03)
    assert Shift("RAM", 1e9, 0.8e9).times == pytest.approx(0.8)


@given(st.floats(1e-3, 1e15), st.floats(1e-3, 1e15))
def test_shifts_are_bounded(foretold: float, measured: float) -> None:
    shift = Shift("disk", foretold, measured)
    assert 0.25 <= shift.times <= 4 and (shift.times > 1) == (measured / foretold >= 1.03)
    assert shift.moves(DISK.reads) and not shift.moves(CPU) and not shift.moves(DISK.writes)
    ram = Shift("RAM", foretold, measured)
    assert ram.moves(CPU) and 0.5 <= ram.times <= 1


def a_prediction(decode: float, ttft_s: float = 1.0) -> Prediction:
    lane = {DISK.reads: 1.0}
    return Prediction(ttft_s, decode, 1.0, DISK.reads, lane, lane, 0.0, Spread(0.0, 0.0, 0.0), {})


def test_what_is_told() -> None:
    band = Band(Width(1.1), Width(1.2))
    slower = (Shift("disk", 2e9, 1.5e9), Shift("RAM", 1e9, 1.01e9))
    both = (Shift("disk", 2e9, 1.5e9), Shift("RAM", 1e9, 0.5e9))
    was = a_prediction(1.23)
    assert Renewed(a_prediction(1.08), slower).line(was, band) == "promised 1.23 tok/s, with today's disk 1.08"
    assert Renewed(a_prediction(1.2), slower).line(was, band) is None
    told = Renewed(a_prediction(1.2, 1.5), both).line(was, band)
    assert told == "promised the first word after 1.00 s, with today's disk and RAM 1.50 s"
    assert str(slower[0]) == "disk gives 1.50 GB/s today, where 2.00 GB/s were foretold (× 0.75)"
    swings = Shift("disk", 2e9, 1.5e9, 0.1)
    assert str(swings).endswith(" were foretold (× 0.78; it swings by 10%, so less of the change counts)")
    assert Renewed(was, slower).report()["today"]["disk"]["times"] == pytest.approx(0.75, abs=0.01)


def test_what_halts_the_machine_for_a_moment_is_no_speed_of_its_disk() -> None:
    """Of loads at 2 GB/s, one after a second in which nothing came."""
    moments = [0.02 * i + (1.0 if i > 5 else 0.0) for i in range(12)]
    ends = [End(moment, 40_000_000 * i) for i, moment in enumerate(moments)]
    assert at_usual_speed(ends, 1).bytes_per_s == pytest.approx(2e9) and at_usual_speed(ends, 1).bytes == 440_000_000
    assert at_usual_speed(ends[:6], 1).swing == 0  # too few parts
    assert at_usual_speed(ends[:1], 1) == at_usual_speed([], 1) == NOTHING
    small = [End(0.1 * i, 1000 * i) for i in range(4)]  # too little for parts
    assert at_usual_speed(small, 1).bytes_per_s == pytest.approx(1e4)


def test_loads_that_end_in_bursts_are_as_fast_as_their_mean() -> None:
    """Four are under way at once: they end together, or the last one takes most of the time that all of them take."""
    together = [End(0.02 * (i // 4) + 1e-5 * i, 9_000_000 * i) for i in range(81)]
    one_is_slow = [End(0.02 * (i // 4) + 0.001 * (i % 4), 9_000_000 * i) for i in range(81)]
    for ends in (together, one_is_slow):
        assert at_usual_speed(ends, 4).bytes_per_s == pytest.approx(36_000_000 / 0.02, rel=0.01)
        assert at_usual_speed(ends, 4).swing < 0.01


def test_a_halt_in_a_short_reading_stands_out() -> None:
    """In loading, where nine loads of 16 MiB are under way: 320 MiB at 2 GB/s, with 0.3 s in between."""
    ends = [End(0.008 * i + (0.3 if i > 9 else 0.0), i * (16 << 20)) for i in range(21)]
    assert at_usual_speed(ends, 9).bytes_per_s == pytest.approx((16 << 20) / 0.008)


@pytest.mark.parametrize("slow", [1.0, 0.5])
def test_the_quarters_of_a_reading_say_how_it_swings(slow: float) -> None:
    ends, moment_s = [End(0.0, 0)], 0.0
    for part in range(16):
        moment_s += 0.01 / (slow if part < 4 else 1)
        ends.append(End(moment_s, (part + 1) * (32 << 20)))
    read = at_usual_speed(ends, 1)
    assert read.swing == pytest.approx(0 if slow == 1 else 0.247, abs=1e-3)
    assert read.beside(NOTHING).swing == NOTHING.beside(read).swing == read.swing


@pytest.mark.parametrize(
    ("ram", "measured", "times"), [(1.6, 1.0, 1.0), (1.6, 0.8, 0.8), (1.0, 0.8, 0.8), (0.9, 0.9, 1.0)]
)
def test_the_ram_that_a_promise_goes_by_is_that_of_its_products(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ram: float, measured: float, times: float
) -> None:
    """A machine's figure of its RAM that comes from a fast spell lowers no promise. `ram`, `measured`: of the speed of
    the fastest product of one row."""
    product = 20e9
    of_products = tuple(Rate(CPU, op, "float32", 0.0, 1 / product, rows=1) for op in ("qkv", "out", "ffn", "head"))
    others = tuple(rate for rate in MACHINE.rates if rate.lane != CPU)
    machine = replace(MACHINE, rates=(*others, *of_products, Rate(CPU, "*", "*", 0.0, 1 / (ram * product))))
    nbytes = 1 << 30
    with closing(Engine.load(folder, Ask(), Loading(machine=machine))) as engine:
        monkeypatch.setattr(engine.session, "read_resident", lambda: Read(nbytes, nbytes / (measured * product)))
        (shift,) = renewal.shifts(engine.session, machine)
    assert shift.what == "RAM" and shift.times == pytest.approx(times)
