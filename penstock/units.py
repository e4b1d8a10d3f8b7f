"""Bytes and seconds as people write them. The only place that divides by 1024 or 1000."""

from __future__ import annotations

import re

from penstock.errors import BadRequest

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_FACTORS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    # One letter means the binary unit, as in `docker -m 6g` and `ulimit`.
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": TIB,
}


def parse_bytes(text: str, what: str = "size") -> int:
    """`"1500MiB"` → 1572864000. Decimal units (GB) are decimal; a bare number is bytes.

    Raises BadRequest where the text is no size or is negative.
    """
    match = re.fullmatch(r"\s*([0-9]{1,19})(\.[0-9]{1,19})?\s*([a-zA-Z]*)\s*", text)
    if match is None or match[3].lower() not in _FACTORS:
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise BadRequest(f"{what} {shown!r} is not a size: write it like 6GiB, 1500MiB or 12GB")
    factor = _FACTORS[match[3].lower()]
    return int(match[1]) * factor + int(float(match[2] or 0) * factor)


def format_bytes(count: float) -> str:
    """1572864000 → '1.46 GiB'; three significant digits."""
    for factor, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= factor:
            return f"{_three_digits(count / factor)} {name}"
    return f"{int(count)} B"


def format_mib_up(count: int) -> str:
    """Whole MiB rounded up, the form to give back as a flag: with that flag the request fits."""
    return f"{-(-count // MIB)}MiB"


def format_seconds(seconds: float) -> str:
    """0.0123 → '12.3 ms'."""
    for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor:
            return f"{_three_digits(seconds / factor)} {name}"
    return f"{seconds * 1e9:.0f} ns"


def format_left(seconds: float) -> str:
    """Time that is left, as people say it: 3739 → '1 h 2 min', 95 → '1 min 35 s', 7.2 → '7 s'."""
    whole = round(min(seconds, 1e9))
    if whole < 60:
        return f"{max(1, whole)} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole < 600 else f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def format_rate(bytes_per_s: float) -> str:
    """Bytes per second in decimal GB/s, the unit of data sheets."""
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
