"""`python -m tests.at_size.shelved`: a server with several models within a tight limit, in a process of its own.

Each case starts `penstock serve` with two or three models, some of them checkpoints without a packed copy, in a memory
cgroup of the size of --host-memory where one can be made. Clients ask for one model and the other at once, streamed and
whole, and some go away in the middle. Then a signal ends the server at a random moment. Each answer must be the greedy
answer that an engine of its own gives to that prompt alone, with its log probabilities. A model may be refused only by
a line that says what it needs. Memory stays within the limit, the server ends with code 0, and nothing of it is left:
no process, and no file in its folder for temporary files, in the cache or in the store of KV.

    --cases N | --minutes M    how much (2 minutes)
    --first N                  begin with this case
    --case N                   this one alone

The last line is one JSON object; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.serve.engine import Engine
from penstock.serve.guides import guide_bytes
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.store.files import is_aside
from penstock.store.pack import pack
from penstock.store.synth import synth
from tests.at_size.clients import Asked, Client, Known
from tests.cpu.checkpoints import random_tensors, save_checkpoint, save_tokenizer
from tests.cpu.commands import MACHINE, ROOT, command, machine_cache
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.memory_cgroup import memory_cgroup
from tests.numbered import search

MIB = 1 << 20
CONTEXT = 160
_LONGEST_END_S = 100.0  # the server's own limit is 30 s twice, and 5
_STARTS_S = 300.0
_FAMILIES = ("llama", "llama", "qwen3", "gemma2", "olmoe", "opt", "falcon", "gpt_oss", "qwen2_moe")


@dataclass(frozen=True)
class Case:
    """`limit`: of --host-memory, in MiB. `unpacked`: the models that are checkpoints. `signals`: the server gets so
    many, the first `after_s` after its first answer was asked for."""

    number: int
    weights: str
    models: tuple[dict[str, Any], ...]
    unpacked: tuple[bool, ...]
    limit: int
    batch: int
    clients: int
    each: int
    keeps_kv: bool
    kv_on_disk: bool
    schemas: bool
    after_s: float | None  # None: when all clients have their answers
    signal: int
    flags: tuple[str, ...]

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{m['model_type']} {m['num_hidden_layers']}x{m['hidden_size']}{' unpacked' * u}"
            for m, u in zip(self.models, self.unpacked, strict=True)
        )
        return (
            f"case {self.number}: {kinds} in {self.weights}, {self.limit} MiB, {self.batch} at once,"
            f" {self.clients} clients of {self.each}, {' '.join(self.flags)},"
            f" {signal.Signals(self.signal).name} after {self.after_s}"
        )


def draw(number: int) -> Case:
    rng = random.Random(number)
    models = tuple(_model(rng) for _ in range(rng.choice((2, 3, 3))))
    max_vocab = max(model["vocab_size"] for model in models)
    keeps_kv = rng.random() < 0.4
    schemas = rng.random() < 0.4
    disk = rng.random() < 0.2
    batch = rng.choice((1, 2, 4, 8))
    flags = ["--batch", str(batch), "--context", str(CONTEXT), "--threads", "1"]
    flags += [] if schemas else ["--no-schemas"]
    flags += ["--kv-home", "disk"] if disk else []
    flags += ["--kv-tokens", str(CONTEXT)] if rng.random() < 0.5 else []
    flags += ["--score-rows", "0"] if rng.random() < 0.3 else []
    return Case(
        number,
        weights=rng.choice(("float32", "bfloat16", "int8", "int4")),
        models=models,
        unpacked=tuple(rng.random() < 0.4 for _ in models),
        limit=148 + rng.choice((2, 5, 10, 15, 25, 40, 80, 200)) + schemas * guide_bytes(max_vocab) // MIB,
        batch=batch,
        clients=rng.choice((2, 4, 8)),
        each=rng.choice((3, 6)),
        keeps_kv=keeps_kv,
        kv_on_disk=disk,
        schemas=schemas,
        after_s=rng.choice((None, None, 0.2, 1.0, rng.uniform(0, 6))),
        signal=rng.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGINT)),
        flags=tuple(flags),
    )  # fmt: skip


def _model(rng: random.Random) -> dict[str, Any]:
    """The config of a model of a few MB, or of up to 130 MB in float32."""
    config: dict[str, Any] = json.loads(TINY_CONFIGS[rng.choice(_FAMILIES)])
    config["max_position_embeddings"] = 256
    config["num_hidden_layers"] = rng.choice((2, 4, 8))
    if config["model_type"] in ("llama", "qwen3") and rng.random() < 0.8:
        config |= {"hidden_size": rng.choice((256, 512, 768)), "intermediate_size": rng.choice((512, 1792))}
        config["vocab_size"] = rng.choice((300, 5000, 60_000))
    return config


def judged(number: int) -> tuple[str, list[str]] | None:
    """(a case in words, what is wrong)."""
    case = draw(number)
    with tempfile.TemporaryDirectory(prefix="penstock-shelved-", dir=os.environ.get("TMPDIR")) as folder:
        return str(case), _wrong(case, Path(folder))


def _made(case: Case, folder: Path) -> tuple[list[Path], list[Known]]:
    """The models' paths, and the answers that each gives alone."""
    rng = random.Random(f"prompts of {case.number}")
    paths, known = [], []
    for nth, (config, unpacked) in enumerate(zip(case.models, case.unpacked, strict=True)):
        path = packed = folder / f"m{nth}"
        if unpacked:
            tensors = {name: (each * 0.1).astype(np.float32) for name, each in random_tensors(config, seed=nth).items()}
            save_checkpoint(path, config, tensors)
            save_tokenizer(path, config)
            packed = folder / f"packed{nth}"
            pack(path, packed, parse_format(case.weights))
        else:
            (folder / f"{nth}.json").write_text(json.dumps(config))
            synth(folder / f"{nth}.json", path, parse_format(case.weights), seed=case.number + nth)
        paths.append(path)
        known.append(_known(rng, packed, config["vocab_size"]))
    return paths, known


def _known(rng: random.Random, packed: Path, vocab: int) -> Known:
    begins = [rng.randrange(300) for _ in range(70)]
    prompts = [
        (begins[: rng.randrange(70)] + [rng.randrange(300) for _ in range(rng.randint(1, 20))])[:90] for _ in range(4)
    ]
    params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=1)
    with closing(Engine.load(packed, Ask(context=CONTEXT), Loading(machine=MACHINE, device="none"))) as engine:
        return Known(prompts, [engine.generate([each], params)[0] for each in prompts])


def _wrong(case: Case, folder: Path) -> list[str]:
    paths, known = _made(case, folder)
    cache, temporary, kept = machine_cache(folder / "cache"), folder / "tmp", folder / "kv"
    temporary.mkdir()
    names = [f"m{nth}" for nth in range(len(paths))]
    more = [word for name, path in zip(names[1:], paths[1:], strict=True) for word in ("--model", f"{name}={path}")]
    given = ["serve", paths[0], *more, "--cache", cache, "--port", 0, "--device", "none", *case.flags]
    given += ["--host-memory", f"{case.limit}MiB"]
    given += ["--weights", case.weights] if any(case.unpacked) else []
    given += ["--keep-kv", kept] if case.keeps_kv else []
    found: list[str] = []
    with ExitStack() as opened:
        group = opened.enter_context(memory_cgroup(case.limit * MIB))
        words = command(given)
        if group is not None:
            words = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *words]
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env={**os.environ, "TMPDIR": str(temporary)}, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        try:
            _served(case, process, known, group, found)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    left = [str(each.relative_to(folder)) for each in temporary.rglob("*")]
    left += [str(each.relative_to(folder)) for each in cache.rglob("*") if is_aside(each.name)]
    left += [str(each.relative_to(folder)) for each in kept.rglob("*") if each.is_file() and each.suffix != ".kv"]
    if left:
        found.append(f"left behind: {left[:5]}")
    return found


class Watch(threading.Thread):
    """Looks at the memory of a server and its children, without the page cache."""

    def __init__(self, process: int, group: Path | None) -> None:
        super().__init__(daemon=True)
        self.process, self.group = process, group
        self.most_bytes, self.peak_bytes, self.ends = 0, 0, threading.Event()

    def run(self) -> None:
        while not self.ends.wait(0.05):
            try:
                status = Path(f"/proc/{self.process}/status").read_text()
                self.peak_bytes = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) << 10
                if self.group is not None:
                    stat = dict(line.split() for line in (self.group / "memory.stat").read_text().splitlines())
                    self.most_bytes = max(self.most_bytes, int(stat.get("total_rss") or stat.get("anon") or 0))
            except (OSError, IndexError):
                continue


def _served(
    case: Case, process: subprocess.Popen[str], known: list[Known], group: Path | None, found: list[str]
) -> None:
    said: list[str] = []
    ready = threading.Event()
    port = 0

    def listen() -> None:
        nonlocal port
        for line in process.stdout or ():
            said.append(line.rstrip())
            if at := re.search(r"http://\S+?:(\d+)/v1", line):
                port = int(at[1])
                ready.set()
        ready.set()

    threading.Thread(target=listen, daemon=True).start()
    watch = Watch(process.pid, group)
    watch.start()
    if not ready.wait(_STARTS_S) or not port:
        code = process.wait(20)
        if code != 2 or "needs" not in said[-1]:
            found.append(f"did not start, code {code}: {said[-5:]}")
        return
    rng, begun_s = random.Random(f"asked in {case.number}"), time.monotonic()
    asked = [
        Asked.drawn(rng, len(known), case.schemas, "--score-rows" not in case.flags)
        for _ in range(case.clients * case.each)
    ]
    clients = [Client(port, known, asked[n :: case.clients], found) for n in range(case.clients)]
    for client in clients:
        client.start()
    if case.after_s is not None:
        time.sleep(max(0.0, begun_s + case.after_s - time.monotonic()))
        for client in clients:
            client.ending = True
    else:
        for client in clients:
            client.join(_STARTS_S)
            if client.is_alive():
                found.append(f"a client waits for {client.now}")
    process.send_signal(case.signal)
    ended_s = time.monotonic()
    try:
        code = process.wait(_LONGEST_END_S)
        if code:
            found.append(f"code {code} after {signal.Signals(case.signal).name}: {said[-3:]}")
    except subprocess.TimeoutExpired:
        found.append(f"goes on {time.monotonic() - ended_s:.0f} s after the signal")
    for client in clients:
        client.join(30)
    watch.ends.set()
    refused = sum(client.refused for client in clients)
    whole = sum(client.right for client in clients)
    print(
        f"  {whole} right, {refused} refused, {sum(c.gone for c in clients)} gone; peak {watch.peak_bytes >> 20},"
        f" with children {watch.most_bytes >> 20} of {case.limit} MiB; ended in {time.monotonic() - ended_s:.1f} s",
        file=sys.stderr,
    )
    if max(watch.most_bytes, watch.peak_bytes) > case.limit * MIB:
        found.append(f"{watch.peak_bytes} bytes, {watch.most_bytes} with children, of {case.limit * MIB}")
    found += [f"said: {line}" for line in said if re.search(r"Traceback|Error|Warning|never|Exception", line)][:5]
    if group is not None and (pids := (group / "cgroup.procs").read_text().split()):
        found.append(f"processes are left: {pids}")


if __name__ == "__main__":
    sys.exit(search(__doc__ or "", judged))
