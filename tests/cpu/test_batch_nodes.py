"""`penstock batch --nodes`: a Ray of two nodes on this machine, one of whose engines is killed.

Ray is not among the packages that `make test` installs. Without it, what needs it is skipped.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadRequest
from penstock.serve.batch.nodes import (
    Told,
    _BlockOfLines,
    _cpus_an_engine,
    _keep_to_files,
    _why,
    begin,
    blocks,
)
from penstock.serve.batch.survey import Survey, Todo
from penstock.store.pack import pack
from tests.cpu.commands import Call, Outcome, here, machine_cache, refused
from tests.cpu.engines import load
from tests.cpu.test_batch import TALE, alone, requests, texts, write


class Known:
    """Lines as `blocks` reads them."""

    def id_of(self, number: int) -> str:
        return f"id{number}"

    def text(self, number: int) -> bytes:
        return f"line {number} ä".encode()


def test_blocks_have_every_line_once_in_order() -> None:
    todo = [Todo(n, 1, 4, 4, -1) for n in random.Random(1).sample(range(100), 70)]
    for nodes in (1, 2, 9):
        found: Any = list(blocks(Known(), Survey(todo), nodes))  # type: ignore[arg-type]
        assert [each["number"] for block in found for each in block] == [each.number for each in todo]
        assert len(found) >= min(nodes, 70) and all(Todo(*each["todo"]) in todo for block in found for each in block)
        block = _BlockOfLines(json.loads(json.dumps(found[0])))
        number = found[0][0]["number"]
        assert (block.text(number), block.id_of(number)) == (f"line {number} ä".encode(), f"id{number}")


def test_what_blocks_did_adds_up() -> None:
    counts = {
        "lines": 3, "failed": 1, "answers": 2, "tokens": {"prompt": 5, "cached": 1, "output": 7},
        "bytes_moved": {"disk0": 10}, "clock": {"seconds": 0.5, "tokens": 4},
        "peaks": {"host_bytes": 9, "device_bytes": 0},
    }  # fmt: skip
    told = Told()
    told.add(counts)
    told.add({**counts, "peaks": {"host_bytes": 7, "device_bytes": 3}})
    assert (told.lines, told.failed, told.answers, told.tokens.output) == (6, 2, 4, 14)
    assert (told.bytes_moved, told.decode_tokens_per_s) == ({"disk0": 20}, 8.0)
    assert (told.peak_host_bytes, told.peak_device_bytes) == (9, 3)


def test_what_a_node_said_is_told() -> None:
    ours = "penstock.errors.BrokenModel: /m/tokenizer.json: is damaged"
    trace = f'ray::Map()\n  File "x.py"\n{ours}\n\nUDF failed.\nTo change retry attempts, …'
    broken = RuntimeError("Ray's")
    broken.__cause__ = BadRequest("/m is another model on this node")
    for error, says in {
        RuntimeError(trace): "/m/tokenizer.json: is damaged",
        broken: "/m is another model on this node",
        RuntimeError("one\ntwo"): "two",
        RuntimeError(): "RuntimeError",
    }.items():
        assert _why(error) == says


def test_ray_data_tells_nothing_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray.data")
    _keep_to_files("ray.data")
    logging.getLogger("ray.data").error("its own")
    assert "its own" not in "".join(capsys.readouterr())


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    cache = machine_cache(tmp_path / "cache")

    def batch(*args: object) -> Outcome:
        return here(capsys, "batch", *args, "--cache", cache, "--json")

    return batch


def test_a_plan_is_for_one_machine(call: Call, tmp_path: Path) -> None:
    write(tmp_path / "in", requests(1))
    (tmp_path / "plan").write_text("{}")
    done = call(tmp_path / "in", tmp_path / "out", "--model", TALE, "--nodes", "2", "--plan", tmp_path / "plan")
    refused(done, "--nodes plans on each node")


@pytest.mark.parametrize(
    ("cpus", "nodes", "wanted"),
    [((4, 4), 2, 4), ((12, 4), 2, 4), ((12, 4, 8), 2, 8), ((2,), 2, 1), ((5,), 2, 2), ((3, 9), 3, 3), ((2.5,), 1, 2)],
)
def test_processors_of_each_engine(cpus: tuple[float, ...], nodes: int, wanted: int) -> None:
    assert _cpus_an_engine(cpus, nodes) == wanted


def test_too_few_processors() -> None:
    with pytest.raises(BadRequest, match="--nodes 3: this Ray cluster has 2 processors"):
        _cpus_an_engine((1, 1), 3)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A Ray of two nodes with a processor each, whose driver this process is."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    found.add_node(num_cpus=1)
    ray.init(address=found.address, log_to_driver=False, logging_level="warning")
    yield found
    ray.shutdown()
    found.shutdown()


def test_nodes_import_nothing_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    (tmp_path / "imaplib.py").write_text("PLANTED = True")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [each for each in sys.path if each and each != str(tmp_path)])

    def looks() -> bool:
        import imaplib

        return hasattr(imaplib, "PLANTED")

    begin()
    try:
        assert not ray.get(ray.remote(looks).remote(), timeout=600)
    finally:
        ray.shutdown()


def workers() -> list[int]:
    """Processes of Ray that answer blocks."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                name = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if name.startswith(b"ray::") and b"Map" in name:
                found.append(int(folder.name))
    return found


def test_two_nodes_on_one_of_which_the_engine_dies(cluster: Any, call: Call, tmp_path: Path) -> None:
    packed = tmp_path / "tale-llama"
    pack(TALE, packed)
    lines = requests(60, seed=5)
    write(tmp_path / "in", lines)
    out, killed, before, over = tmp_path / "out", list[int](), list[int](), threading.Event()

    def kill() -> None:
        """One worker, when the first block is in the file."""
        while not (killed or over.is_set()):
            if out.exists() and (lines := out.read_bytes().count(b"\n")) >= 1 and len(there := workers()) == 2:
                os.kill(there[0], signal.SIGKILL)
                killed.append(there[0])
                before.append(lines)
            time.sleep(0.01)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    done = call(tmp_path / "in", out, "--model", packed, "--nodes", "2", "--batch", "4")
    over.set()
    thread.join()
    assert done.code == 0, done.err
    assert killed and before[0] < 60, "the engine was killed before all was done"
    assert done.report["prompts"] == 60 and not done.report["failed"]
    with load(packed, prompt_tokens=200, context=512) as engine:
        assert texts(out) == {line["custom_id"]: alone(engine, line) for line in lines}
    again = call(tmp_path / "in", out, "--model", packed, "--nodes", "2", "--batch", "4")
    assert again.report["resumed"] == 60 and again.report["prompts"] == 0
