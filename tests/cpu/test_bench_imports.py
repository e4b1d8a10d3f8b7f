"""Every module under bench/ imports: its names of the package are still there."""

from __future__ import annotations

import importlib
import socket
import threading
from pathlib import Path

import pytest

import bench
from bench.clients import Server, Stream

ROOT = Path(bench.__file__).parent
MODULES = sorted(".".join(file.relative_to(ROOT.parent).with_suffix("").parts) for file in ROOT.glob("**/*.py"))
OURS = {"bench", "penstock", "tests", "tools"}


@pytest.mark.parametrize("module", MODULES)
def test_it_imports(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OURS:
            raise
        pytest.skip(f"{error.name} is not installed")


def test_an_answer_that_breaks_off_is_a_failure() -> None:
    """In its first line: http.client raises an error of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as taken:
                taken.recv(1 << 16)
                taken.sendall(b"nonsense\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        stream = Stream((1,), 1).run(Server(listening.getsockname()[1], 0, None))
        thread.join()
    assert "BadStatusLine" in stream.failed
