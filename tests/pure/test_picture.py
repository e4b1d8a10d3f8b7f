"""The picture: well-formed, complete, small, and nobody's name breaks it."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.planner.explain import Band, rate
from penstock.planner.lanes import decode_pass
from penstock.planner.picture import svg
from penstock.planner.routing import stated_firing
from penstock.planner.solve import Solved, solve
from penstock.serve.planning import describe
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import Rate
from penstock.spec.model import ModelSpec
from penstock.units import format_bytes, format_seconds
from tests.pure.machine import LLAMA_1B, MACHINE, WITH_DEVICE, model

SVG = "{http://www.w3.org/2000/svg}"
GIB = 1 << 30
LLAMA_70B = model(80, 8192, 64, 8, 28672, dtype="bfloat16", vocab=128256, max_positions=131072, tied=False)
CASES = {
    "tiny": (model(), Format("float32"), Ask()),
    "1B, streaming": (LLAMA_1B, Format("bfloat16"), Ask(host_memory_bytes=GIB, context=512)),
    "70B, streaming": (LLAMA_70B, parse_format("int4"), Ask()),
    "a batch": (LLAMA_1B, parse_format("int4"), Ask(batch=4, host_memory_bytes=2 * GIB)),
}


def drawn(spec: ModelSpec, fmt: Format, ask: Ask, name: str = "a model") -> tuple[Solved, str]:
    solved = solve(ask, spec, fmt, MACHINE)
    return solved, svg(solved, ask, MACHINE, name, Band(), ["a note of some words " * 6])


def texts(picture: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(picture).iter(f"{SVG}text")]


@pytest.mark.parametrize("case", CASES)
def test_pictures(case: str) -> None:
    solved, picture = drawn(*CASES[case])
    root = ElementTree.fromstring(picture)
    assert len(picture) < 200_000
    said = " | ".join(texts(picture))
    p = solved.prediction
    assert f"{rate(p.decode_tokens_per_s)} tokens/s (" in said
    assert f"first token after {format_seconds(p.ttft_s)} (" in said
    assert "bound by the disk" in said if p.bound_by == "disk0" else "bound by the processor" in said
    assert {"RAM", "disk"} <= set(texts(picture))
    for nbytes in (arena.bytes for arena in solved.plan.arenas if arena.name in ("host.weights", "host.ring")):
        assert format_bytes(nbytes) in said
    assert ("the disk" in texts(picture)) == bool(solved.plan.ring_bytes)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for node in root.iter(f"{SVG}rect"):
        box = {name: float(node.attrib.get(name, 0)) for name in ("x", "y", "width", "height")}
        assert box["x"] >= 0 and box["x"] + box["width"] <= width + 0.2
        assert box["y"] >= 0 and box["y"] + box["height"] <= height
    assert not any(tag in picture for tag in ("<script", "href", "<image", "@import", "url("))


def test_neurons_on_the_disk_are_drawn() -> None:
    """The arena of records that a token reads is among what fills RAM."""
    (spec, _), kv_load = describe(Path("opt-1.3b"), to_plan=True), Rate("disk0", "kv_load", "*", 1e-5, 4e-10)
    machine = replace(MACHINE, rates=(*MACHINE.rates, kv_load, replace(kv_load, op="pick")))
    ask = Ask(context=128, host_memory_bytes=700 << 20)
    solved = solve(ask, spec, parse_format("int4-neurons"), machine, trace=stated_firing(spec))
    assert "host.asked" in {arena.name for arena in solved.plan.arenas}
    assert "records of active neurons" in texts(svg(solved, ask, machine))


def test_a_device_is_drawn() -> None:
    """Its memory on top, its lane and the link's; or that it is not used."""
    ask = Ask(device_memory_bytes=2 * GIB, context=512)
    solved = solve(ask, LLAMA_70B, parse_format("int4"), WITH_DEVICE)
    picture = svg(solved, ask, WITH_DEVICE, "a model", Band(), [])
    assert {"device", "RAM", "the device", "the link to the device", "its driver and libraries"} <= set(texts(picture))
    up, down = (decode_pass(solved.plan, ask, WITH_DEVICE).link_bytes[lane] for lane in ("h2d0", "d2h0"))
    assert up > 0 and f"{format_bytes(up)} lifted per token, {format_bytes(down)} back" in texts(picture)
    assert picture.count('class="arrow"') == 2  # from the disk to RAM, from RAM to the device
    solved, _ = drawn(*CASES["tiny"])
    assert {"device", "not used"} <= set(texts(svg(solved, Ask(), WITH_DEVICE, "a model", Band(), [])))


@pytest.mark.parametrize("case", CASES)
def test_texts_of_a_column_do_not_overlap(case: str) -> None:
    """Letters are at most 9 pixels wide on average; lines 15 apart."""
    placed: dict[float, list[tuple[float, float]]] = {}
    for node in ElementTree.fromstring(drawn(*CASES[case])[1]).iter(f"{SVG}text"):
        x, style = float(node.attrib["x"]), node.attrib.get("class", "")
        wide = len("".join(node.itertext())) * (10 if "big" in style else 6.2)
        lo = x - wide if "end" in style else x - wide / 2 if "mid" in style else x
        placed.setdefault(float(node.attrib["y"]), []).append((lo, lo + wide))
    for row in placed.values():
        row.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(row)), row


HOSTILE = ['<script>alert("1")</script>', "a&b;]]>", "x\x00\x1b[31m\ny", "\ud800\udcff", "n" * 5000, "ö模型🦙", ""]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names(name: str) -> None:
    _, picture = drawn(*CASES["tiny"], name=name)
    picture.encode()
    ElementTree.fromstring(picture)
    assert "<script" not in picture
    assert max(len(text) for text in texts(picture)) < 130
    if name.startswith("ö"):
        assert any(name in text for text in texts(picture))


@pytest.mark.parametrize("case", CASES)
def test_lanes_of_a_pass(case: str) -> None:
    """Pieces lie in the pass, one after the other, and fill what the prediction says is busy."""
    spec, fmt, ask = CASES[case]
    solved = solve(ask, spec, fmt, MACHINE)
    lanes, pass_s, *_ = decode_pass(solved.plan, ask, MACHINE)
    assert pass_s == pytest.approx(min(ask.batch, 4) / solved.prediction.decode_tokens_per_s, rel=0.05)
    for lane, pieces in lanes.items():
        assert all(0 <= p.start_s < p.end_s <= pass_s for p in pieces)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(pieces))
        share = sum(p.end_s - p.start_s for p in pieces) / pass_s
        assert share == pytest.approx(solved.prediction.lane_share[lane], abs=0.05)
    assert {p.kind for p in lanes["host"]} == {"attention", "FFN", "head", "rest"}


def test_what_lies_between_passes_is_in_the_picture() -> None:
    """Of a small model it is much: the lanes are as busy as the prediction says."""
    machine = replace(MACHINE, rates=(*MACHINE.rates, Rate("host", "pass", "*", 1e-4, 0.0)))
    solved = solve(Ask(), model(), Format("float32"), machine)
    lanes, pass_s, *_ = decode_pass(solved.plan, Ask(), machine)
    share = sum(piece.end_s - piece.start_s for piece in lanes["host"]) / pass_s
    assert share == pytest.approx(solved.prediction.lane_share["host"], abs=0.02) and share < 0.9


def test_a_color_of_each_kind_is_defined() -> None:
    picture = drawn(*CASES["1B, streaming"])[1]
    used = {c for found in re.findall(r'class="([a-z ]+)"', picture) for c in found.split()}
    assert all(f".{name}" in picture for name in used)
