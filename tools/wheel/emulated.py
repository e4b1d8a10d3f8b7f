"""A Python 3.11 for aarch64 on a machine that is none: Debian's, unpacked in build/ and run by Debian's qemu.

`python -m tools.wheel.emulated ARGUMENTS` runs it with what the aarch64 wheel for Python 3.11 needs, with pytest, and
with that wheel's extension as the one that tests look at. `make fuzz` holds the NEON kernels to the op table so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.wheel import build, pythons
from tools.wheel.build import BUILD, ROOT, run

FOLDER = BUILD / "arm"
PYTHON = FOLDER / "python"
_PACKAGES = (
    "python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libstdc++6 libgcc-s1 zlib1g libexpat1 libssl3 "
    "libffi8 libbz2-1.0 liblzma5 libuuid1 libsqlite3-0 libncursesw6 libtinfo6 libreadline8 libcrypt1"
).split()
_QEMU = "qemu-user-static"
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64", "manylinux_2_17_aarch64")


def prepared() -> str:
    """Makes it at the first call. Returns "", or why there is none."""
    if PYTHON.exists():
        return ""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "no Debian, whose packages have qemu and a Python for aarch64"
    shutil.rmtree(FOLDER, ignore_errors=True)
    try:
        _download("arm64", _PACKAGES)
        qemu = shutil.which("qemu-aarch64-static")
        if qemu is None:
            _download(_here(), [_QEMU])
            qemu = str(FOLDER / "host/usr/bin/qemu-aarch64-static")
    except subprocess.CalledProcessError as failure:
        return f"apt-get: {(failure.stderr.strip() or 'failed').splitlines()[-1]}"
    # argv[0] is this script: a Python takes it for itself, and starts children by it, as only the system's own program
    # could be started.
    root = FOLDER / "root"
    PYTHON.write_text(f"#!/bin/sh\nexec '{qemu}' -L '{root}' -0 '{PYTHON}' '{root}/usr/bin/python3.11' \"$@\"\n")
    PYTHON.chmod(0o755)
    return ""


def installed(wheel: Path, *others: str) -> Path:
    """A folder with the wheel and what it needs, for PYTHONPATH."""
    folder = FOLDER / "site"
    shutil.rmtree(folder, ignore_errors=True)
    (FOLDER / "stamp").unlink(missing_ok=True)
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    run(sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", folder, *platforms,
        "--python-version", "3.11", "--only-binary", ":all:", "-c", "constraints.txt", wheel, *others)  # fmt: skip
    return folder


def _here() -> str:
    return run("dpkg", "--print-architecture").strip()


def _download(architecture: str, packages: list[str]) -> None:
    """Unpacks packages of Debian's into FOLDER/root, or of this machine's own architecture into FOLDER/host. apt-get
    has lists of its own for that, so the system stays as it is, and nobody has to be root."""
    state = FOLDER / f"apt-{architecture}"
    for name in ("lists/partial", "cache/archives/partial", "debs"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": architecture, "APT::Architectures": architecture, "Dir::State": state,
        "Dir::State::status": state / "status", "Dir::State::lists": state / "lists", "Dir::Cache": state / "cache",
        "APT::Sandbox::User": "root", "Debug::NoLocking": 1,
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    for command in (("update",), ("download", *packages)):
        subprocess.run(
            ["apt-get", *options, "-qq", *command], cwd=state / "debs", check=True, capture_output=True, text=True
        )
    to = FOLDER / ("root" if architecture == "arm64" else "host")
    for package in sorted((state / "debs").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, to], check=True, capture_output=True, text=True)
    shutil.rmtree(state)


def main() -> int:
    usable = [each for each in pythons.found(Path.home()) if each.has_headers and not each.stable]
    why = prepared() if usable else "no Python 3.11 with its headers to build for"
    if why:
        print(f"skipped: no aarch64 here: {why}")
        return 0
    wheel = build.build("aarch64", usable[0])
    site, native, stamp = FOLDER / "site", FOLDER / "native", FOLDER / "stamp"
    if not stamp.exists() or stamp.stat().st_mtime < (ROOT / "constraints.txt").stat().st_mtime:
        installed(wheel, "pytest", "hypothesis", "gguf")
        shutil.rmtree(site / "penstock")  # it would come before the repository's
        stamp.touch()
    shutil.rmtree(native, ignore_errors=True)
    with zipfile.ZipFile(wheel) as file:
        (extension,) = (name for name in file.namelist() if ".so" in name)
        extracted = file.extract(extension, native)
    env = {"PYTHONPATH": f"{site}:{ROOT}", "PENSTOCK_NATIVE": extracted, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([PYTHON, *sys.argv[1:]], cwd=ROOT, env={**os.environ, **env}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
