"""Why penstock does not run on other systems than Linux. It imports nothing, so anything can say it at once."""

from __future__ import annotations

_NEEDS_LINUX = "penstock reads weights past the page cache and keeps memory limits by means of Linux"
_WHY = {
    "win32": f"Windows is not supported: {_NEEDS_LINUX}. It runs inside WSL2 (`wsl --install`)",
    "darwin": f"macOS is not supported: {_NEEDS_LINUX}. A Linux machine, or a virtual one, runs it",
}


def why_not(platform: str) -> str | None:
    """A line for the user of such a system (`sys.platform`), or None where penstock runs."""
    return _WHY.get(platform)
