"""This machine's figures: kept under the cache folder, or measured now, in haste or whole."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import BadRequest, BrokenModel
from penstock.runtime import child
from penstock.runtime.fit import Tell
from penstock.runtime.host import Progress
from penstock.runtime.probe_apart import OnPart, probe_apart
from penstock.runtime.probe_begins import with_short_begins
from penstock.runtime.probe_ops import FORMATS
from penstock.runtime.this_machine import fingerprint, with_memory
from penstock.spec import machine as machines
from penstock.spec.machine import MachineSpec
from penstock.store.files import read_text, write_bytes


def machine_file(cache: Path, isa: str | None = None) -> Path:
    """The file that keeps this machine's figures, with the kernels `isa` (None: with the best ones)."""
    return cache / "machines" / f"{fingerprint(isa)}.json"


def probed_file(file: Path) -> Path:
    """The file beside a machine's `file` that keeps the probe's own figures, where a calibration changed them."""
    return file.with_suffix(".probed.json")


def begun_file(file: Path) -> Path:
    """The file beside a machine's `file` that keeps what a probe has found out that did not end, or had no time for
    all. It is there until a probe has found out everything."""
    return file.with_suffix(".begun.json")


def load_or_probe(
    cache: Path,
    on_progress: Progress | None = None,
    *,
    disk_folder: Path | None = None,
    whole: bool = False,
    on_part: OnPart = lambda *_: None,
    tell: Tell = lambda _: None,
    kind: str = "int4",
    isa: str | None = None,
) -> MachineSpec:
    """The machine as measured before, or measured now and kept. Its memory is always read afresh. `disk_folder`: lies
    on the disk to measure; None is `cache`. `whole`: by the whole probe, which takes a minute at most, also where the
    quick one has measured before, or a whole one had no time for all, however long ago. `on_part` and `tell`: as for
    `probe_apart`. `kind`: the number format that the quick one measures. `isa`: the family of kernels; None: the
    best one. Raises StorageFailed where measuring fails."""
    path = machine_file(cache, isa)
    known, begun = kept(path), begun_file(path)
    if known is not None and not (whole and (known.rough or begun.exists())):
        return with_memory(known)
    machine = None if whole else quick_apart(disk_folder or cache, kind, isa)
    if machine is None:
        if on_progress:
            on_progress("measuring this machine, once (a minute at most)", 0, 0)
        machine = probe_apart(disk_folder or cache, on_part, tell=tell, kept=begun, isa=isa)
    elif on_progress:
        on_progress("measured this machine, once, in haste: `penstock probe` takes a minute and foretells better", 0, 0)
    keep(path, machine)
    probed_file(path).unlink(missing_ok=True)  # it is of the probe before this one
    return machine


def kept(path: Path) -> MachineSpec | None:
    """The machine that `keep` wrote. None where there is none. A file that is damaged, or that another version wrote,
    is removed, and the machine has to be measured again."""
    if not path.exists():
        return None
    try:
        return with_short_begins(machines.loads(read_text(path), str(path)))
    except (BadRequest, BrokenModel):
        path.unlink(missing_ok=True)
        return None


def keep(path: Path, machine: MachineSpec) -> None:
    """Writes the machine for `kept`. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, machines.dumps(machine).encode())


def quick_apart(disk_folder: Path, kind: str, isa: str | None) -> MachineSpec | None:
    """Measures some figures in a process of its own, and has the rest of a machine that is alike
    (`runtime/probe_quick`). `kind`: the number format to measure, if the probe knows it. `isa`: the family of kernels;
    None: the best one. None where that process fails, as where no machine was measured that is alike."""
    measured = kind if kind in FORMATS else "int4"
    done = child.run("penstock.runtime.probe_quick", str(disk_folder), measured, *([isa] if isa else []))
    return None if done.returncode else machines.loads(done.stdout, "the quick probe's answer")
