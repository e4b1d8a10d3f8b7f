"""A machine's file that a calibration changed, and the probe's own beside it."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import BadRequest, BrokenModel
from penstock.runtime.probe import keep, probed_file
from penstock.spec import machine as machines
from penstock.spec.machine import MachineSpec
from penstock.store.files import MAX_TEXT_BYTES, load, load_text, write_bytes


def probed(file: Path, machine: MachineSpec) -> MachineSpec:
    """The probe's own figures: kept beside a machine's file that was calibrated, else those of the `machine`. Raises
    BadRequest where that file is damaged."""
    try:
        return machines.loads(load_text(probed_file(file)), "it")
    except FileNotFoundError:
        return machine
    except (BadRequest, BrokenModel, OSError) as error:
        raise BadRequest(
            f"the probe's own figures in {probed_file(file)} cannot be read, {error}: "
            "measure this machine again (penstock probe --again)"
        ) from None


def write(file: Path, after: MachineSpec) -> None:
    """The calibrated machine in its place, the probe's own file beside. Raises OSError."""
    if not probed_file(file).exists():
        write_bytes(probed_file(file), load(file, MAX_TEXT_BYTES))
    keep(file, after)


def undo(file: Path) -> None:
    """Puts the probe's own file back, byte for byte; nothing where none is kept. Raises OSError."""
    if probed_file(file).exists():
        probed_file(file).rename(file)
