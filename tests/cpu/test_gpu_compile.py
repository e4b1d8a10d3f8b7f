"""Every Triton kernel compiles for cards that are not here: the interpreter takes what compilers do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: it exists for Linux alone")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("target", "case"), [("cuda:80", "0"), ("hip:gfx942", "2")])
def test_every_kernel_compiles(target: str, case: str, tmp_path: Path) -> None:
    """In a process of its own, where the interpreter is off; with a cache of its own, or it would compile nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", target, case], cwd=ROOT, capture_output=True, text=True,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    assert "add_up_kernel" in found.stdout
