"""Draws a plan as one SVG without scripts: what fills each tier, and what each lane does while a token is made."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from html import escape

from penstock.planner.explain import (
    ARENAS,
    Band,
    Limit,
    beside_arenas,
    lane_name,
    limits,
    rate,
    rates,
    spread,
    tier_name,
)
from penstock.planner.frontier import Point
from penstock.planner.lanes import DecodePass, Stretch, decode_pass
from penstock.planner.solve import Solved
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.part_keys import gathered_key
from penstock.spec.places import DISK, GPU, is_disk, nearness
from penstock.spec.plan import Plan
from penstock.units import format_bytes, format_seconds

# Every picture of ours begins so, and is known by it when it is to be replaced.
BEGINS = '<svg xmlns="http://www.w3.org/2000/svg" data-made-by="penstock plan"'
_WIDTH, _EDGE = 900, 24
_LEFT, _LEFT_WIDTH = _EDGE, 384
_RIGHT, _RIGHT_WIDTH = 448, 428
_BAR, _ROW, _STRIP, _GAP = 22, 19, 46, 34
_FRONTIER = 170  # pixels that its axis is high
_FEW_PIECES = 300  # if a lane has more pieces, it is drawn as the share of each moment in which it is busy

# Colours by class: weights and FFN are blue, weights that stream orange, KV and attention violet, work space and the
# head green.
_STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#0b0b0b}
.big{font-size:19px;font-weight:600}.bold{font-weight:600}.soft{fill:#52514e}.end{text-anchor:end}.mid{text-anchor:middle}
.page{fill:#fcfcfb}.box{fill:none;stroke:#c3c2b7}.free{fill:#e8e7e0}.line{stroke:#c3c2b7}.arrow{fill:#52514e}
.blue{fill:#2a78d6}.orange{fill:#eb6834}.violet{fill:#4a3aa7}.green{fill:#1baf7a}.gray{fill:#898781}
@media (prefers-color-scheme:dark){text{fill:#fff}.soft{fill:#c3c2b7}.page{fill:#1a1a19}.box,.line{stroke:#52514e}
.free{fill:#2f2f2c}.arrow{fill:#c3c2b7}.blue{fill:#3987e5}.orange{fill:#d95926}.violet{fill:#9085e9}.green{fill:#199e70}}
"""
# By arena; its label is that of `explain.ARENAS`. All other arenas are _WORK_SPACE.
_COLOURS = {
    "weights": "blue", "ring": "orange", "kv": "violet", "window": "violet", "cache": "orange", "asked": "orange",
    "recent": "orange", "stage": "orange",
}  # fmt: skip
_WORK_SPACE = ("activations, logits, scratch", "green")
_KINDS = {"attention": "violet", "FFN": "blue", "head": "green", "rest": "gray", "weights that stream": "orange"}


def svg(
    solved: Solved, ask: Ask, machine: MachineSpec, name: str = "", band: Band | None = None,
    notes: Sequence[str] = (), points: Sequence[Point] = (),
) -> str:  # fmt: skip
    """The picture. `name`: of the model; `band`: the error band to write beside the speeds; `notes`: lines below the
    lanes; `points`: the frontier to draw below all. Some decode passes are lowered and simulated for it."""
    tier_limits = limits(solved, ask, machine)
    one = decode_pass(solved.plan, ask, machine)
    boxes, left_end = _tiers(solved, tier_limits, one, 110)
    lanes, right_end = _lanes(one, notes, 110)
    below, end = _frontier(points, max(left_end, right_end) + _EDGE)
    height = end + _EDGE
    return "\n".join(
        [
            f'{BEGINS} viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
            f"<title>{_clean(_title(solved.plan, name))}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
            *_header(solved, machine, name, band),
            *boxes,
            *lanes,
            *below,
            "</svg>\n",
        ]
    )


def _title(plan: Plan, name: str) -> str:
    """The picture's title: model, number format and layers."""
    model = plan.target
    return f"{_short(name or model.spec.model_type)} in {model.weights.name}, {len(model.spec.layers)} layers"


def _short(name: str) -> str:
    """A name cut to 48 characters, which fit into the header."""
    return name if len(name) <= 48 else f"{name[:47]}…"


def _header(solved: Solved, machine: MachineSpec, name: str, band: Band | None) -> list[str]:
    """SVG of three lines: the title, the predicted speed, and the lane that binds with the machine's name."""
    p = solved.prediction
    speed, first = f"{rate(p.decode_tokens_per_s)} tokens/s", f"first token after {format_seconds(p.ttft_s)}"
    if band is not None:
        speed += f" ({rates(p.decode_tokens_per_s, band.decode.factor)})"
        first += f" ({' to '.join(format_seconds(s) for s in spread(p.ttft_s, band.ttft.factor))})"
    bound = f"bound by {lane_name(p.bound_by)}, busy {p.lane_share[p.bound_by]:.0%} of the time"
    return [
        _text(_LEFT, 38, _title(solved.plan, name), "big"),
        _text(_LEFT, 62, f"predicted: {speed}; {first}"),
        _text(_LEFT, 82, f"{bound}; machine: {_short(machine.name)}", "soft"),
    ]


# -- tiers --------------------------------------------------------------------------------------------------


def _tiers(solved: Solved, tier_limits: tuple[Limit, ...], one: DecodePass, y: int) -> tuple[list[str], int]:
    """(SVG of a box for each tier, the fastest on top; the y at which they end). Between two boxes stands what moves up
    from the lower one. `y`: where they begin, in pixels."""
    drawn: list[str] = []
    nearest = sorted(tier_limits, key=lambda limit: nearness(limit.tier))
    for above, limit in zip([None, *nearest], nearest, strict=False):
        if above is not None:
            moved = _from_disk(solved) if limit.tier == DISK.tier else _over_link(one) if above.used_bytes else ""
            drawn += _arrow(moved, y) if moved else []
            y += _GAP if moved else 16
        if limit.tier == DISK.tier:
            rows, whole = _disk_rows(solved.plan), limit.used_bytes
        else:
            rows, whole = _memory_rows(solved.plan, limit), max(limit.limit_bytes, limit.used_bytes)
        box, y = _box(limit, rows, whole, y)
        drawn += box
    return drawn, y


Row = tuple[str, str, int]  # label, colour, bytes


def _memory_rows(plan: Plan, limit: Limit) -> list[Row]:
    """The rows of a memory tier, by arena, and its free bytes last. Empty if the plan does not use the tier."""
    sums: dict[tuple[str, str], int] = {}
    for arena in plan.arenas:
        if arena.tier == limit.tier:
            what = arena.name.split(".")[1]
            key = (ARENAS[what], _COLOURS[what]) if what in _COLOURS else _WORK_SPACE
            sums[key] = sums.get(key, 0) + arena.bytes
    rows = [(label, colour, nbytes) for (label, colour), nbytes in sums.items()]
    rows += [(label, "gray", nbytes) for label, nbytes in beside_arenas(plan, limit.tier)]
    return [*rows, ("free", "free", max(0, limit.limit_bytes - limit.used_bytes))] if rows else []


def _disk_rows(plan: Plan) -> list[Row]:
    """The rows of the disk: weights by how often they are read, and KV."""
    parts, gathered = plan.parts, gathered_key(plan.target.spec)
    sums = {"streams": 0, "once": 0, "rows": 0}
    for unit in plan.units:
        key = "once" if not is_disk(unit.home) else "rows" if unit.part == gathered else "streams"
        sums[key] += (unit.hi - unit.lo) * parts[unit.part].granule_bytes
    kv_bytes = plan.tier_bytes().get(DISK.tier, 0)
    rows = [
        ("weights that stream, read at every token", "orange", sums["streams"]),
        ("embedding, read a row at a time", "gray", sums["rows"]),
        ("weights that stay in memory, read once", "blue", sums["once"]),
        ("KV cache", "violet", kv_bytes),
    ]
    return [row for row in rows if row[2]]


def _box(limit: Limit, rows: list[Row], whole: int, y: int) -> tuple[list[str], int]:
    """(SVG of a tier's box, the y at which it ends). `whole`: the bytes of the full bar."""
    height = 34 + _BAR + 12 + _ROW * max(1, len(rows)) + 6
    x, width = _LEFT + 14, _LEFT_WIDTH - 28
    of = f"{format_bytes(limit.used_bytes)} of {format_bytes(limit.limit_bytes)}"
    drawn = [
        f'<rect class="box" x="{_LEFT}" y="{y}" width="{_LEFT_WIDTH}" height="{height}" rx="6"/>',
        _text(x, y + 23, tier_name(limit.tier), "bold"),
        _text(x + width, y + 23, of, "end"),
        f'<rect class="free" x="{x}" y="{y + 34}" width="{width}" height="{_BAR}"/>',
    ]
    left = float(x)
    for _, colour, nbytes in rows:
        wide = width * nbytes / max(1, whole)
        if colour != "free" and wide >= 0.05:
            drawn.append(f'<rect class="{colour}" x="{left:.1f}" y="{y + 34}" width="{wide:.1f}" height="{_BAR}"/>')
        left += wide
    row_y = y + 34 + _BAR + 25
    for label, colour, nbytes in rows:
        drawn += [
            f'<rect class="{colour}" x="{x}" y="{row_y - 10}" width="11" height="11" rx="2"/>',
            _text(x + 19, row_y, label),
            _text(x + width, row_y, format_bytes(nbytes), "end soft"),
        ]
        row_y += _ROW
    if not rows:
        why = "not used"
        drawn.append(_text(x, row_y, why, "soft"))
    return drawn, y + height


def _from_disk(solved: Solved) -> str:
    nbytes = solved.prediction.disk_bytes_per_token
    return f"{format_bytes(nbytes)} read per token" if nbytes else "read once, when the model is loaded"


def _over_link(one: DecodePass) -> str:
    """What crosses the link from RAM to a device, and back."""
    up, down = (one.link_bytes.get(lane, 0) / one.sequences for lane in (GPU.to_device, GPU.to_host))
    return f"{format_bytes(up)} lifted per token, {format_bytes(down)} back" if up or down else "lifted once"


def _arrow(label: str, y: int) -> list[str]:
    """SVG of an arrow from a tier up to the next one, with what moves."""
    x = _LEFT + 40
    return [
        f'<path class="arrow" d="M{x} {y + 4}l7 10h-4.5v{_GAP - 18}h-5v-{_GAP - 18}h-4.5z"/>',
        _text(x + 18, y + _GAP // 2 + 5, label, "soft"),
    ]


# -- lanes --------------------------------------------------------------------------------------------------


def _lanes(one: DecodePass, notes: Sequence[str], y: int) -> tuple[list[str], int]:
    """(SVG of the timeline of one decode pass, with axis and legend; the y at which it ends). `y`: where it begins."""
    pieces, pass_s, _, tokens = one
    what = "one token" if tokens == 1 else f"one token of each of {tokens} sequences"
    drawn = [_text(_RIGHT, y + 13, f"{what} takes {format_seconds(pass_s)}", "bold")]
    y += 32
    crowded = False
    for lane, inside in pieces.items():
        share = sum(piece.end_s - piece.start_s for piece in inside) / pass_s
        drawn += [
            _text(_RIGHT, y + 10, lane_name(lane)),
            _text(_RIGHT + _RIGHT_WIDTH, y + 10, f"busy {min(1.0, share):.0%}", "end soft"),
            f'<rect class="free" x="{_RIGHT}" y="{y + 18}" width="{_RIGHT_WIDTH}" height="{_STRIP}"/>',
        ]
        merged = _merged(inside, pass_s / _RIGHT_WIDTH / 4)
        if len(merged) <= _FEW_PIECES:
            drawn += [_rect(piece, pass_s, y + 18) for piece in merged]
        else:
            crowded = True
            drawn += _areas(inside, pass_s, y + 18)
        y += 18 + _STRIP + 14
    drawn += _axis(pass_s, y - 8)
    y += 36
    kinds = [kind for kind in _KINDS if any(piece.kind == kind for inside in pieces.values() for piece in inside)]
    x = _RIGHT
    for kind in kinds:
        drawn += [f'<rect class="{_KINDS[kind]}" x="{x}" y="{y - 10}" width="11" height="11" rx="2"/>']
        drawn.append(_text(x + 17, y, kind))
        x += 17 + 7 * len(kind) + 14
    if crowded:
        y += _ROW
        drawn.append(_text(_RIGHT, y, "height: the share of each moment that is busy", "soft"))
    y += 8
    for note in notes:
        for i, line in enumerate(textwrap.wrap(note, 62)):
            y += 20 if not i else 17
            drawn.append(_text(_RIGHT, y, line, "soft"))
    return drawn, y


def _merged(pieces: list[Stretch], gap_s: float) -> list[Stretch]:
    """The pieces, with neighbours of one kind that are at most `gap_s` seconds apart made one."""
    merged: list[Stretch] = []
    for piece in pieces:
        if merged and merged[-1].kind == piece.kind and piece.start_s - merged[-1].end_s <= gap_s:
            merged[-1] = merged[-1]._replace(end_s=piece.end_s)
        else:
            merged.append(piece)
    return merged


def _rect(piece: Stretch, pass_s: float, y: int) -> str:
    """SVG of one piece of a lane."""
    x, width = (_RIGHT_WIDTH * s / pass_s for s in (piece.start_s, piece.end_s - piece.start_s))
    return (
        f'<rect class="{_KINDS[piece.kind]}" x="{_RIGHT + x:.2f}" y="{y}" width="{max(width, 0.2):.2f}" '
        f'height="{_STRIP}"/>'
    )


def _areas(pieces: list[Stretch], pass_s: float, y: int) -> list[str]:
    """SVG of an area for each kind of work. Its height at each pixel is the share of that moment which the kind took.
    The areas stand on each other."""
    moment_s = pass_s / _RIGHT_WIDTH
    kinds = [kind for kind in _KINDS if any(piece.kind == kind for piece in pieces)]
    heights = {kind: [0.0] * _RIGHT_WIDTH for kind in kinds}
    for piece in pieces:
        column, last = int(piece.start_s / moment_s), min(_RIGHT_WIDTH - 1, int(piece.end_s / moment_s))
        for i in range(column, last + 1):
            inside_s = min(piece.end_s, (i + 1) * moment_s) - max(piece.start_s, i * moment_s)
            heights[piece.kind][i] += max(0.0, inside_s) / moment_s
    drawn: list[str] = []
    below = [0.0] * _RIGHT_WIDTH
    for kind in kinds:
        below = [a + b for a, b in zip(below, heights[kind], strict=True)]
        path, height = f"M{_RIGHT} {y + _STRIP}", -1
        for i, share in enumerate(below):
            tall = round(2 * _STRIP * min(1.0, share))
            if tall != height:
                path, height = f"{path}H{_RIGHT + i}V{y + _STRIP - tall / 2:g}", tall
        drawn.insert(0, f'<path class="{_KINDS[kind]}" d="{path}H{_RIGHT + _RIGHT_WIDTH}V{y + _STRIP}z"/>')
    return drawn


def _axis(pass_s: float, y: int) -> list[str]:
    """SVG of the time axis in milliseconds, with at most seven marks at round numbers."""
    total_ms = pass_s * 1e3
    step = next(base * 10**power for power in range(-9, 12) for base in (1, 2, 5) if base * 10**power >= total_ms / 6)
    drawn = [f'<path class="line" d="M{_RIGHT} {y}h{_RIGHT_WIDTH}"/>']
    for i in range(int(total_ms / step + 1e-9) + 1):
        x = _RIGHT + _RIGHT_WIDTH * i * step / total_ms
        drawn.append(f'<path class="line" d="M{x:.1f} {y}v5"/>')
        label = f"{i * step:g}" if i else "0 ms"
        drawn.append(_text(round(x), y + 19, label, "soft mid" if i else "soft"))
    return drawn


# -- frontier -----------------------------------------------------------------------------------------------


def _frontier(points: Sequence[Point], y: int) -> tuple[list[str], int]:
    """(SVG of tokens a second over the seconds of a block, both axes logarithmic; the y at which it ends). `y`: where
    it begins. Nothing is drawn without points."""
    if not points:
        return [], y - _EDGE
    left, top, wide, tall = _LEFT + 14, y + 40, _WIDTH - 2 * _LEFT - 300, _FRONTIER
    xs, ys = (_spread_over([getattr(p, name) for p in points]) for name in ("block_s", "tokens_per_s"))
    drawn = [
        _text(_LEFT, y + 13, "Frontier: the longer a block of sequences may take, the more tokens a second", "bold"),
        f'<path class="line" d="M{left} {top}v{tall}h{wide}" fill="none"/>',
        _text(left, top + tall + 22, "seconds of a block, each step as many times as long →", "soft"),
    ]
    for i, (p, x, above) in enumerate(zip(points, xs, ys, strict=True)):
        across, height = left + 20 + (wide - 40) * x, top + 15 + (tall - 30) * (1 - above)
        drawn.append(f'<circle class="blue" cx="{across:.1f}" cy="{height:.1f}" r="5"/>')
        drawn.append(_text(round(across), round(height) - 9, str(i + 1), "mid"))
        sequences = f"{p.seqs} sequence{'s' if p.seqs > 1 else ''}"
        line = f"{i + 1}: {sequences}, {format_seconds(p.block_s)}, {rate(p.tokens_per_s)} tokens/s"
        drawn.append(_text(left + wide + 20, top + 12 + _ROW * i, line))
    return drawn, top + max(tall + 28, _ROW * len(points) + 12)


def _spread_over(values: Sequence[float]) -> list[float]:
    """Where values lie between the least (0) and the most (1), by their logarithms; 0.5 if all are one."""
    logs = [math.log(max(value, 1e-300)) for value in values]
    low, high = min(logs), max(logs)
    return [(each - low) / (high - low) if high > low else 0.5 for each in logs]


# -- text ---------------------------------------------------------------------------------------------------


def _text(x: int, y: int, text: str, style: str = "") -> str:
    """SVG of a line of text. `style`: CSS classes."""
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x}" y="{y}"{kind}>{_clean(text)}</text>'


def _clean(text: str) -> str:
    """The text escaped for XML. Characters that XML forbids, and bytes of a file name that are no text, become question
    marks."""
    return escape("".join(c if c.isprintable() else "?" for c in text))
