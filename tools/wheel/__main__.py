"""`python -m tools.wheel [x86_64 | aarch64 …]`: wheels for Linux in dist/, each tried where no compiler is found.

Of each processor there is one wheel for Python 3.11 and one for all later ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.wheel import build, pythons, trial


def main() -> None:
    machines = sys.argv[1:] or build.MACHINES
    if unknown := set(machines) - set(build.MACHINES):
        sys.exit(f"wheel: {', '.join(sorted(unknown))}? There are {', '.join(build.MACHINES)}")
    here = pythons.found(Path.home())
    usable = [each for each in here if each.has_headers]
    first = [each for each in usable if not each.stable][:1] + [each for each in usable if each.stable][:1]
    if not any(each.stable for each in first):
        print("wheel: no Python 3.12 or newer with its headers is here: no wheel for these")
    if all(each.stable for each in first):
        print("wheel: no Python 3.11 with its headers is here: no wheel for it")
    if not first:
        sys.exit(2)
    for machine in machines:
        for python in first:
            wheel = build.build(machine, python)
            print(f"wheel: dist/{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, of which "
                  f"{build.beside_model_bytes(wheel) / 1e6:.1f} are not the model", flush=True)  # fmt: skip
            for line in trial.tried(wheel, machine, here):
                print(f"wheel:   {line}", flush=True)


if __name__ == "__main__":
    main()
