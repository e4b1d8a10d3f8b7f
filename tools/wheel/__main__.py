"""`python -m tools.wheel [--draft] [x86_64 | aarch64 …]`: wheels for Linux in dist/, each tried without a compiler.

Of each processor there is one wheel for Python 3.11 and one for all later ones. `--draft` compiles the kernels in a
fraction of the time, and puts wheels that are as slow as that into build/wheel/draft: to see that all steps work.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.wheel import build, pythons, trial


def main() -> None:
    draft = "--draft" in sys.argv[1:]
    machines = [word for word in sys.argv[1:] if word != "--draft"] or build.MACHINES
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
            wheel = build.build(machine, python, draft)
            print(f"wheel: {wheel.relative_to(build.ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB, of which "
                  f"{build.beside_model_bytes(wheel) / 1e6:.1f} are not the model", flush=True)  # fmt: skip
            for line in trial.tried(wheel, machine, here):
                print(f"wheel:   {line}", flush=True)


if __name__ == "__main__":
    main()
