"""`python -m tools.trace_picture TRACE OUT.svg [--purpose decode] [--nth 3]`: draws the lanes of one pass of a run.

TRACE: what `penstock run --trace` wrote. A pass is drawn with what the disk did meanwhile, for it or for the next one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_WIDTH, _LEFT, _LANE, _GAP = 900, 110, 46, 14
_NAMES = {"host": "processor", "disk0": "disk"}
_COLOURS = {"load": "orange", "attention": "violet", "FFN": "blue", "head": "green"}
_STYLE = """
text{font:13px system-ui,sans-serif;fill:#0b0b0b}.soft{fill:#52514e}.end{text-anchor:end}.bold{font-weight:600}
.page{fill:#fcfcfb}.free{fill:#e8e7e0}.blue{fill:#2a78d6}.orange{fill:#eb6834}.violet{fill:#4a3aa7}.green{fill:#1baf7a}
.gray{fill:#898781}
@media (prefers-color-scheme:dark){text{fill:#fff}.soft{fill:#c3c2b7}.page{fill:#1a1a19}.free{fill:#2f2f2c}}
"""


def picture(events: list[Event], purpose: str, nth: int) -> str:
    """The SVG of the `nth` pass of this purpose, from 1 on. Raises SystemExit where there is none."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    passes = [e for e in events if e["ph"] == "X" and e["cat"] == "pass" and e["name"].startswith(purpose)]
    if len(passes) < nth:
        raise SystemExit(f"the trace has {len(passes)} passes of {purpose}")
    one = passes[nth - 1]
    begin_us, end_us = one["ts"], one["ts"] + one["dur"]
    lanes: dict[str, list[Event]] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] != "pass" and event["ts"] < end_us:
            if event["ts"] + event["dur"] > begin_us:
                lanes.setdefault(names[event["tid"]].split(" (")[0], []).append(event)
    rows = one["args"]["rows"]
    what = f"{rows} token{'s' if rows > 1 else ''}"
    y, drawn = 50, [_text(24, 30, f"A pass of {what}: {one['dur'] / 1e3:.1f} ms", "bold")]
    for lane in sorted(lanes, key=lambda name: (name.startswith("disk"), name)):
        drawn += _lane(lane, lanes[lane], begin_us, end_us, y)
        y += _LANE + _GAP
    y += 12
    for i, (kind, colour) in enumerate((*_COLOURS.items(), ("other", "gray"))):
        drawn.append(f'<rect class="{colour}" x="{_LEFT + 110 * i}" y="{y - 10}" width="11" height="11" rx="2"/>')
        drawn.append(_text(_LEFT + 17 + 110 * i, y, "weights that stream" if kind == "load" else kind))
    height = y + 16
    box = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}><title>{escape(what)}</title><style>{_STYLE}</style>'
    return "\n".join([head, f'<rect class="page" width="{_WIDTH}" height="{height}"/>', *drawn, "</svg>\n"])


def _lane(lane: str, events: list[Event], begin_us: float, end_us: float, y: int) -> Iterator[str]:
    wide = _WIDTH - _LEFT - 24
    yield _text(24, y + 20, _NAMES.get(lane, lane))
    yield f'<rect class="free" x="{_LEFT}" y="{y}" width="{wide}" height="{_LANE}"/>'
    reached, busy_us = begin_us, 0.0
    for event in sorted(events, key=lambda e: e["ts"]):  # loads overlap: each is drawn from where the last one ended
        start_us, stop_us = max(event["ts"], reached), min(event["ts"] + event["dur"], end_us)
        if stop_us <= start_us:
            continue
        reached, busy_us = stop_us, busy_us + stop_us - start_us
        at, long = (wide * us / (end_us - begin_us) for us in (start_us - begin_us, stop_us - start_us))
        yield (
            f'<rect class="{_colour(event)}" x="{_LEFT + at:.2f}" y="{y}" '
            f'width="{max(0.2, long - 0.4):.2f}" height="{_LANE}"/>'
        )
    yield _text(24, y + 38, f"{busy_us / (end_us - begin_us):.0%} busy", "soft")


def _colour(event: Event) -> str:
    if event["cat"] != "compute":
        return "orange"
    ops = event["args"]["ops"]
    named = " ".join(ops) if isinstance(ops, list) else str(ops)
    for kind, marks in (("FFN", ("ffn",)), ("attention", ("attend", "qkv", "out")), ("head", ("head",))):
        if any(mark in named for mark in marks):
            return _COLOURS[kind]
    return "gray"


def _text(x: int, y: int, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{style}">{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--purpose", default="decode")
    parser.add_argument("--nth", type=int, default=3)
    wanted = parser.parse_args()
    events = json.loads(wanted.trace.read_text())["traceEvents"]
    wanted.out.write_text(picture(events, wanted.purpose, wanted.nth))


if __name__ == "__main__":
    main()
