"""Changes a machine's file by a calibration, and keeps the probe's own file beside it, so that it can be undone."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import BadRequest, BrokenModel
from penstock.runtime.probe import keep, probed_file
from penstock.runtime.probe_begins import with_short_begins
from penstock.spec import machine as machines
from penstock.spec.machine import MachineSpec
from penstock.store.files import MAX_TEXT_BYTES, load, load_text, write_bytes


def probed(file: Path, machine: MachineSpec) -> MachineSpec:
    """The probe's own figures. If the machine's `file` was calibrated, they are kept beside it. Else they are those of
    `machine`, which the file holds. Raises BadRequest where the kept figures are damaged."""
    try:
        return with_short_begins(machines.loads(load_text(probed_file(file)), "it"))
    except FileNotFoundError:
        return machine
    except (BadRequest, BrokenModel, OSError) as error:
        raise BadRequest(
            f"the probe's own figures in {probed_file(file)} cannot be read, {error}: "
            "measure this machine again (penstock probe --again)"
        ) from None


def write(file: Path, after: MachineSpec) -> None:
    """Writes the calibrated machine to `file`, after a copy of the probe's own beside it. Raises OSError."""
    if not probed_file(file).exists():
        write_bytes(probed_file(file), load(file, MAX_TEXT_BYTES))
    keep(file, after)


def undo(file: Path) -> None:
    """Puts the probe's own file back, byte for byte. Does nothing where none is kept. Raises OSError."""
    if probed_file(file).exists():
        probed_file(file).rename(file)
