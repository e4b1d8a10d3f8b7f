"""Builds a wheel for one processor and one Python, and looks at what is in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from tools.wheel.pythons import Python

ROOT = Path(__file__).resolve().parents[2]
BUILD, DIST = ROOT / "build" / "wheel", ROOT / "dist"
MACHINES = ("x86_64", "aarch64")
GLIBC = "2.28"  # of 2018: Debian 10, RHEL 8. numpy's own wheels need 2.27 or 2.28
MODEL = "penstock/assets/tale-llama/"
MOST_BYTES = 5_000_000  # of a wheel, beside the model that it brings


def run(*command: object, env: dict[str, str] | None = None) -> str:
    """Runs a command in the repository and returns its output. Where it fails, its words are shown, and we end."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", check=False,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nwheel: {' '.join(map(str, command))[:200]} failed")
    return done.stdout


def build(machine: str, python: Python, draft: bool = False) -> Path:
    """The wheel for such a processor, in dist/. `draft`: with slow kernels, in build/, where nobody takes it for a
    release."""
    import ziglang  # type: ignore[import-not-found]

    # Exactly one extension is in a wheel: what an earlier build left in the folder of results would come along.
    tag = "cp312-abi3" if python.stable else "cp{0}{1}-cp{0}{1}".format(*python.version)
    dist = BUILD / "draft" if draft else DIST
    folder, results = BUILD / f"{machine}-{tag}{'-draft' if draft else ''}", BUILD / "built"
    shutil.rmtree(results, ignore_errors=True)
    defines = {
        "CMAKE_TOOLCHAIN_FILE": ROOT / "tools/wheel/zig.cmake",
        "ZIG": Path(ziglang.__file__).parent / "zig",
        "PENSTOCK_TARGET": f"{machine}-linux-gnu.{GLIBC}",
        "Python_INCLUDE_DIR": _headers(python),
        # Descriptors of thread-local variables lose vector registers in the x86-64 loaders of glibc before 2.40.
        "NB_HAS_MTLS_GNU2": "OFF",
    }
    if draft:
        defines |= {"PENSTOCK_KERNELS": "-O1", "CMAKE_CXX_FLAGS_RELEASE": "-O1 -DNDEBUG"}
    if ccache := shutil.which("ccache"):  # both wheels for a processor have the same kernels, nearly all of the work
        defines["CMAKE_CXX_COMPILER_LAUNCHER"] = ccache
    zig = metadata.version("ziglang")
    settings = [f"cmake.define.{name}={value}" for name, value in defines.items()]
    settings += [f"build-dir={folder}", f"wheel.tags={tag}-linux_{machine}"]
    settings += ["wheel.py-api=cp312"] if python.stable else []
    suffix = ".abi3.so" if python.stable else ".cpython-{}{}-{}-linux-gnu.so".format(*python.version, machine)
    env = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # cmake and ninja
        "SETUPTOOLS_EXT_SUFFIX": suffix,
        # ccache would go by the time of the compiler, which is a new script in each folder of builds.
        "CCACHE_COMPILERCHECK": f"string:zig {zig} {defines['PENSTOCK_TARGET']}",
        "ZIG_GLOBAL_CACHE_DIR": os.environ.get("ZIG_GLOBAL_CACHE_DIR", str(BUILD / "zig")),
    }
    words = (word for setting in settings for word in ("-C", setting))
    flags = ("--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check", "-w", results)
    run(_environment(python), "-m", "pip", "wheel", ".", *flags, *words, env=env)
    (built,) = results.glob("*.whl")
    # Renames it by the oldest glibc that will do, and refuses what it links and wheels may not. `auto`, because
    # auditwheel takes names of platforms for the processor that it runs on alone.
    run(sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--plat", "auto", "-w", dist, built,
        env={"PATH": env["PATH"]})  # fmt: skip
    wheel = max(dist.glob(f"*-{tag}-*_{machine}.whl"), key=lambda file: file.stat().st_mtime)
    for fault in faults(wheel):
        sys.exit(f"wheel: {wheel.name}: {fault}")
    return wheel


def beside_model_bytes(wheel: Path) -> int:
    """What of a wheel's bytes is not the model that it brings."""
    with zipfile.ZipFile(wheel) as file:
        model = sum(each.compress_size for each in file.infolist() if each.filename.startswith(MODEL))
    return wheel.stat().st_size - model


def faults(wheel: Path) -> list[str]:
    """What is wrong with the files of a wheel."""
    with zipfile.ZipFile(wheel) as file:
        names = [each.filename for each in file.infolist()]
    found = [f"{name} is missing" for name in (f"{MODEL}config.json", "penstock/py.typed", "penstock/_native.pyi")
             if name not in names]  # fmt: skip
    oldest = min(map(int, re.findall(r"manylinux_2_(\d+)_", wheel.name)), default=None)
    if oldest is None or oldest > int(GLIBC.partition(".")[2]):
        found.append(f"it should run with glibc {GLIBC}")
    extensions = [name for name in names if ".so" in name]
    if len(extensions) != 1 or not extensions[0].startswith("penstock/_native."):
        found.append(f"it should have one extension, and has {', '.join(extensions) or 'none'}")
    if strangers := {name.split("/")[0] for name in names if not name.startswith("penstock")}:
        found.append(f"it brings {', '.join(sorted(strangers))}")
    if (size := beside_model_bytes(wheel)) > MOST_BYTES:
        found.append(f"{size:,} bytes beside the model, {MOST_BYTES:,} at most")
    return found


def _environment(python: Python) -> Path:
    """A Python that has what builds wheels, of the versions that constraints.txt pins."""
    folder = BUILD / python.name
    program = folder / "bin" / "python"
    if not (folder / "stamp").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(python.program, "-m", "venv", folder)
        run(program, "-m", "pip", "install", "-q", "-c", "constraints.txt", "scikit-build-core", "nanobind")
        (folder / "stamp").touch()
    return program


def _headers(python: Python) -> Path:
    """A copy of Python's headers that serves other processors too: its pyconfig.h is that of this one, all whose sizes
    are the same on both. (Debian's names a folder of the C library, and of the processor.)"""
    folder = BUILD / f"{python.name}-include"
    if not folder.exists():
        shutil.copytree(python.include, folder)
        shutil.copyfile(python.config, folder / "pyconfig.h")
    return folder
