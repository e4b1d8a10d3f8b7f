"""What a system that is no Linux, or a Linux without /proc and cgroups, gets. Reads without O_DIRECT have their tests
where reads are tested (`test_without_direct_reads`), as have writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime import host
from tests.cpu.commands import ROOT, here, machine_cache, refused

# What other systems' Pythons lack. Windows lacks what macOS lacks, too, and nobody but Linux has the extension.
_MACOS = "os.sched_getaffinity os.posix_fadvise os.posix_fallocate os.O_DIRECT os.sched_setaffinity".split()
_WINDOWS = "os.O_CLOEXEC os.O_NOFOLLOW os.O_NONBLOCK os.O_NOCTTY os.O_DIRECTORY os.getuid os.getloadavg".split()
_HIDE = """
import importlib.abc, importlib.util, os, pkgutil, sys

platform, modules, names = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
for name in names:
    delattr(os, name.removeprefix("os."))
"""
_STARTS = """
sys.platform = platform
import penstock
from penstock.cli import entry
print(penstock.__version__, entry.main())
try:
    penstock.LLM
except ImportError as failure:
    print(failure)
"""
_IMPORTS = """
import penstock
for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
    if ".gpu." not in module.name and ".cuda." not in module.name and not module.name.endswith(("__main__", "_child")):
        importlib.import_module(module.name)
print("imported")
"""


def python(script: str, platform: str, modules: str, names: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _HIDE + script, platform, modules, " ".join(names)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("platform", "modules", "names", "says"),
    [
        ("darwin", "penstock._native", _MACOS, "macOS is not supported"),
        ("win32", "penstock._native fcntl resource termios pwd grp", _MACOS + _WINDOWS, "WSL2"),
    ],
)
def test_other_systems_get_a_line_and_not_an_import_error(
    platform: str, modules: str, names: list[str], says: str
) -> None:
    done = python(_STARTS, platform, modules, names)
    assert done.returncode == 0, done.stderr
    started, imported = done.stdout.splitlines()
    assert started == "0.1.0 2" and says in imported
    (line,) = done.stderr.splitlines()
    assert line == f"penstock: {imported}"


def test_no_module_needs_at_import_what_only_linux_has() -> None:
    done = python("import importlib" + _IMPORTS, "linux", "", _MACOS)
    assert done.stdout == "imported\n", done.stderr[-2000:]


@pytest.fixture
def no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither /proc nor /sys, and so no cgroups."""
    true_read = Path.read_text

    def read_text(path: Path, *args: object, **kwargs: object) -> str:
        if str(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(path)
        return true_read(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read_text)


def test_memory_is_known_without_cgroups(no_proc: None) -> None:
    assert host.memory_limit_bytes() == host.physical_bytes() == host.available_bytes() > 1 << 28
    assert host.rss_bytes() == host.peak_rss_bytes() == 0 and host.usable_cpus() >= 1


def test_limits_hold_without_cgroups(
    no_proc: None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan's bytes are counted, not looked up: the same answer, and the same refusal of too little."""
    flags = ("--cache", machine_cache(tmp_path / "cache"), "--json", "--max-tokens", 4, "--temperature", 0)
    whole = here(capsys, "run", model, "hi", *flags)
    streamed = here(capsys, "run", model, "hi", *flags, "--resident", 0)
    assert whole.code == streamed.code == 0, (whole, streamed)
    assert whole.report["token_ids"] == streamed.report["token_ids"]
    refused(here(capsys, "run", model, "hi", *flags, "--host-memory", "1MiB"), "MiB", "DoesNotFit")
    refused(here(capsys, "run", model, "hi", *flags, "--host-memory", "1TiB"), "TiB")
