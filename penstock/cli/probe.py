"""`penstock probe`: measures this machine once and keeps the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from penstock.cli.bar import bar
from penstock.cli.options import Json, Machine
from penstock.cli.output import fitted, note, print_json, progress, stdout_columns
from penstock.spec.places import CPU, DISK, HOST
from penstock.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.spec.machine import MachineSpec

_BUSY = 0.5  # if the load of the last minute is beyond this share of all CPUs, the user is told
_LARGE, _SMALL = 4 << 20, 64 << 10  # bytes of a read of the disk


def probe(
    machine: Machine,
    again: Annotated[bool, Option("--again", help="Measure even if this machine was measured before.")] = False,
    details: Annotated[
        bool, Option("--details", help="Also print the rate of every op, and what was measured again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measures this machine once, in a minute at most, and keeps the figures.

    They stand in the cache folder; planning uses them. After Ctrl-C the same command goes on where it stopped, and so
    it does where the minute was too short for all.
    """
    machine.prepare()
    import json

    from penstock.runtime.device.choose import choose
    from penstock.runtime.probe import begun_file, load_or_probe, machine_file
    from penstock.spec import machine as machines

    folder, told = machine.cache_folder, list[str]()
    file = machine_file(folder, machine.isa)
    if again:
        for each in (file, begun_file(file)):
            each.unlink(missing_ok=True)
    try:
        with bar("measuring this machine") as drawn:
            figures = load_or_probe(folder, whole=True, on_part=drawn.show, tell=told.append, isa=machine.isa)
    except KeyboardInterrupt:
        if begun_file(file).exists():
            note("what was measured is kept: `penstock probe` goes on with the rest")
        raise
    with progress() as tell:
        chosen = choose(machine.device, figures, None, folder, tell)
    figures = chosen.machine
    if as_json:
        print_json(json.loads(machines.dumps(figures)))
        return
    lines = [*summary(figures, stdout_columns()), here_line(), f"  {chosen.reason}"]
    if details:
        lines += ["", *told, *fit_lines(figures)]
    print(fitted("\n".join(lines)))


def summary(machine: MachineSpec, columns: int = 0) -> list[str]:
    """The machine in eight lines, with a picture of disk, RAM and processor and the speeds between them. They stand
    below each other where that is wider than `columns` (0: as wide as may be)."""
    ram, disk = machine.rate(CPU, "*", "*"), machine.rate(DISK.reads, "load", "*")
    small, written = machine.rate(DISK.reads, "fetch", "*"), machine.rate(DISK.writes, "save", "*")
    speeds = {"disk": _LARGE / (disk.alpha_s + _LARGE * disk.s_per_byte), "RAM": _per_s(ram.s_per_byte)}
    boxes = (
        ("disk", f"{format_bytes(machine.tier(DISK.tier).bytes)} free",
         f"{format_seconds(small.alpha_s + _SMALL * small.s_per_byte)} a read"),
        ("RAM", f"{format_bytes(machine.tier(HOST).bytes)} free", "for a model"),
        ("processor", f"{_per_s(machine.rate(CPU, 'ffn', 'int4', 512).s_per_flop) / 1e9:.0f} GFLOP/s int4",
         f"{_per_s(machine.rate(CPU, 'ffn', 'bfloat16', 512).s_per_flop) / 1e9:.0f} bfloat16"),
    )  # fmt: skip
    wires = (
        ("", f"{format_rate(speeds['disk'])}▶", f"◀{format_rate(_per_s(written.s_per_byte))}", ""),
        ("", f"{format_rate(speeds['RAM'])}▶", "", ""),
    )
    takes = [f"{format_seconds(1e9 / speed)} from {name}" for name, speed in speeds.items() if speed]
    loads = next((reads for reads in machine.reads if reads.lane == DISK.reads and not reads.most_bytes), None)
    how = f", in {loads.depth} blocks of {format_bytes(loads.block_bytes)} at once" if loads else ""
    factors = {(s.lane, s.beside): s.factor for s in machine.sharing}
    beside, besides = (factors.get(pair, 1.0) for pair in ((CPU, DISK.reads), (DISK.reads, CPU)))
    picture = _picture(boxes, wires)
    if 0 < columns < max(map(len, picture)):
        picture = _stacked(boxes, wires)
    return [
        f"{machine.cpu or machine.name}, {machine.threads} threads ({machine.source})",
        *picture,
        f"  a GB of weights takes {' or '.join(takes)}{how}",
        f"  both at once: computing takes {beside:.2f} times as long, reading {besides:.2f} times",
        f"  {_unsettled(machine)}",
    ]


def _per_s(seconds: float) -> float:
    """Pieces a second of what takes so many seconds a piece; 0 if it takes none."""
    return 1 / seconds if seconds else 0.0


def _picture(boxes: tuple[tuple[str, str, str], ...], wires: tuple[tuple[str, str, str, str], ...]) -> list[str]:
    """Boxes of four lines, `wires` between them. Each box: its title and two lines."""
    lines = ["  "] * 4
    for i, (title, *inside) in enumerate(boxes):
        width = max(len(title) + 4, *(len(text) + 2 for text in inside))
        box = [
            f"┌ {title} {'─' * (width - len(title) - 2)}┐",
            *(f"│ {text:<{width - 2}} │" for text in inside),
            f"└{'─' * width}┘",
        ]
        lines = [line + part for line, part in zip(lines, box, strict=True)]
        if i < len(wires):
            wide = max(len(text) for text in wires[i])
            lines = [line + f"{text:^{wide}}" for line, text in zip(lines, wires[i], strict=True)]
    return [line.rstrip() for line in lines]


def _stacked(boxes: tuple[tuple[str, str, str], ...], wires: tuple[tuple[str, str, str, str], ...]) -> list[str]:
    """As `_picture`, for narrow terminals."""
    lines = list[str]()
    for i, box in enumerate(boxes):
        lines += _picture((box,), ())
        speeds = (
            [text.strip("▶◀") + (" ▲" if "◀" in text else " ▼") for text in wires[i] if text] if i < len(wires) else []
        )
        lines += [f"    {'   '.join(speeds)}"] if speeds else []
    return lines


def _unsettled(machine: MachineSpec) -> str:
    """Which figures swung from one measurement to the next, by their lanes and ops."""
    from penstock.runtime.fit import GOOD_R2

    swung = [rate for rate in machine.rates if rate.r2 < GOOD_R2]
    if not swung:
        return "every figure lay on its line"
    named = sorted({f"{rate.op} in {rate.format}" if rate.lane == CPU else str(rate.lane) for rate in swung})
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return f"{len(swung)} of {len(machine.rates)} figures swung: {', '.join(named[:3])}{more} (--details, --again)"


def fit_lines(machine: MachineSpec) -> list[str]:
    """The rates of each lane. A task takes alpha, and then the longer one of its bytes and its flops."""
    lines = [f"  {'lane':<13}{'op':<8}{'format':<10}{'rows':>6}{'alpha':>9}  {'bytes':>11}  {'flops':>13}  {'r²':>6}"]
    for rate in machine.rates:
        read = format_rate(1 / rate.s_per_byte) if rate.s_per_byte else "-"
        flops = f"{1e-9 / rate.s_per_flop:.0f} GFLOP/s" if rate.s_per_flop else "-"
        rows, alpha = f"≤ {rate.rows}" if rate.rows else "any", format_seconds(rate.alpha_s)
        heading = f"  {rate.lane:<13}{rate.op:<8}{rate.format:<10}{rows:>6}"
        lines.append(f"{heading}{alpha:>9}  {read:>11}  {flops:>13}  {rate.r2:>6.3f}")
    lines += [
        f"  {r.lane} {f'up to {format_bytes(r.most_bytes)}' if r.most_bytes else 'loads'} {r.reason}"
        for r in machine.reads
    ]
    lines += [f"  {s.lane} beside {s.beside}: takes {s.factor:.2f} times as long" for s in machine.sharing]
    return lines


def here_line() -> str:
    """A line about the memory and the processors that are free on this machine just now."""
    from penstock.runtime import host

    load, cpus = host.load(), host.usable_cpus()
    limit, physical = host.memory_limit_bytes(), host.physical_bytes()
    line = (
        f"  free now: {format_bytes(host.available_bytes())} of {format_bytes(limit)} of memory"
        + (f" (a cgroup's limit; the machine has {format_bytes(physical)})" if limit < physical else "")
        + f", {cpus} of {host.all_cpus()} CPUs"
    )
    return line + (
        f"; load {load:.1f}: others are busy, which figures of RAM and disk show" if load > _BUSY * cpus else ""
    )
