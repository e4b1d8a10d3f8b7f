"""Pythons for aarch64 on a machine that is none: Debian's, unpacked in build/ and run by Debian's qemu.

`python -m tools.wheel.emulated ARGUMENTS` runs a Python 3.11 with what the aarch64 wheel for it needs, with pytest, and
with that wheel's extension as the one that tests look at. `make fuzz` holds the NEON kernels to the op table so.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tools.wheel import build, pythons
from tools.wheel.build import BUILD, ROOT, run

FOLDER = BUILD / "arm"
_QEMU = "qemu-user-static"
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64", "manylinux_2_17_aarch64")
_LIBRARIES = (
    "libc6 libstdc++6 libgcc-s1 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libuuid1 libsqlite3-0 libncursesw6 "
    "libtinfo6 libcrypt1"
)


@dataclass(frozen=True)
class Emulated:
    """A Python for aarch64, as a release of Debian has it. `libraries`: what it needs beside those of all releases."""

    version: str
    release: str
    libraries: str

    @property
    def folder(self) -> Path:
        return FOLDER / self.version

    @property
    def program(self) -> Path:
        return self.folder / "python"

    def prepared(self) -> str:
        """Makes it at the first call. Returns "", or why there is none."""
        if self.program.exists():
            return ""
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            return "no Debian, whose packages have qemu and a Python for aarch64"
        shutil.rmtree(self.folder, ignore_errors=True)
        root, python = self.folder / "root", f"python{self.version}"
        packages = f"{python}-minimal lib{python}-minimal lib{python}-stdlib {self.libraries} {_LIBRARIES}".split()
        try:
            _download(root, "arm64", packages, self.release)
            if not (root / "lib").exists():  # where all libraries are in /usr, another package has this link
                (root / "lib").symlink_to("usr/lib")
            qemu = shutil.which("qemu-aarch64-static")
            if qemu is None:
                _download(self.folder / "host", _here(), [_QEMU], _codename())
                qemu = str(self.folder / "host/usr/bin/qemu-aarch64-static")
        except subprocess.CalledProcessError as failure:
            return f"apt-get: {(failure.stderr.strip() or 'failed').splitlines()[-1]}"
        # argv[0] is this script: a Python takes it for itself, and starts children by it, as only the system's own
        # program could be started.
        self.program.write_text(
            f"#!/bin/sh\nexec '{qemu}' -L '{root}' -0 '{self.program}' '{root}/usr/bin/{python}' \"$@\"\n"
        )
        self.program.chmod(0o755)
        return ""

    def installed(self, wheel: Path, *others: str) -> Path:
        """A folder with the wheel and what it needs, for PYTHONPATH."""
        site = self.folder / "site"
        shutil.rmtree(site, ignore_errors=True)
        (self.folder / "stamp").unlink(missing_ok=True)
        flags = ["-q", "--disable-pip-version-check", "-c", "constraints.txt", "--target", site]
        flags += ["--python-version", self.version, "--only-binary", ":all:"]
        flags += [word for name in _PLATFORMS for word in ("--platform", name)]
        run(sys.executable, "-m", "pip", "install", *flags, wheel, *others)
        return site


OLD = Emulated("3.11", "bookworm", "libssl3 libreadline8")
NEW = Emulated("3.13", "trixie", "libssl3t64 libreadline8t64 libzstd1")  # for wheels of the stable ABI


def _here() -> str:
    return run("dpkg", "--print-architecture").strip()


def _codename() -> str:
    return platform.freedesktop_os_release()["VERSION_CODENAME"]


def _download(to: Path, architecture: str, packages: list[str], release: str) -> None:
    """Unpacks packages of a release of Debian's. apt-get has lists of its own for that, so the system stays as it is,
    and nobody has to be root. They come from where this system has its packages from."""
    state = to.with_name(f"apt-{architecture}")
    for name in ("lists/partial", "cache/archives/partial", "debs"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": architecture, "APT::Architectures": architecture, "Dir::State": state,
        "Dir::State::status": state / "status", "Dir::State::lists": state / "lists", "Dir::Cache": state / "cache",
        "APT::Sandbox::User": "root", "Debug::NoLocking": 1,
    }  # fmt: skip
    for source in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")):
        if source.exists() and release != _codename():
            other = state / source.name
            other.write_text(source.read_text().replace(_codename(), release))
            settings |= {"Dir::Etc::SourceList": other, "Dir::Etc::SourceParts": "-"}
            break
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    for command in (("update",), ("download", *packages)):
        subprocess.run(
            ["apt-get", *options, "-qq", *command], cwd=state / "debs", check=True, capture_output=True, text=True
        )
    for package in sorted((state / "debs").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, to], check=True, capture_output=True, text=True)
    shutil.rmtree(state)


def main() -> int:
    usable = [each for each in pythons.found(Path.home()) if each.has_headers and not each.stable]
    why = OLD.prepared() if usable else "no Python 3.11 with its headers to build for"
    if why:
        print(f"skipped: no aarch64 here: {why}")
        return 0
    wheel = build.build("aarch64", usable[0])
    site, native, stamp = (OLD.folder / name for name in ("site", "native", "stamp"))
    if not stamp.exists() or stamp.stat().st_mtime < (ROOT / "constraints.txt").stat().st_mtime:
        OLD.installed(wheel, "pytest", "hypothesis", "gguf")
        shutil.rmtree(site / "penstock")  # it would come before the repository's
        stamp.touch()
    shutil.rmtree(native, ignore_errors=True)
    with zipfile.ZipFile(wheel) as file:
        (extension,) = (name for name in file.namelist() if ".so" in name)
        extracted = file.extract(extension, native)
    env = {"PYTHONPATH": f"{site}:{ROOT}", "PENSTOCK_NATIVE": extracted, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([OLD.program, *sys.argv[1:]], cwd=ROOT, env={**os.environ, **env}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
