"""A server of `penstock serve` in a process of its own, for tests that ask it over HTTP."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import openai

from penstock.serve.engine import Engine
from penstock.serve.sampling import SamplingParams
from tests.cpu.commands import start

CONTEXT = 128


class Server(NamedTuple):
    process: subprocess.Popen[bytes]
    port: int
    model: Path
    said: list[str]

    def ask(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Any:
        """(status, headers, JSON or text) of a request."""
        given = {"content-type": "application/json"} if body is not None else {}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection.request(method, path, content, {**given, **(headers or {})})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.status, answer.headers, json.loads(text) if is_json and text else text

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, timeout=600)


@contextmanager
def serving(model: Path, cache: Path, *flags: object, **how: Any) -> Iterator[Server]:
    process = start(
        *("serve", model, "--cache", cache, "--port", 0, "--context", CONTEXT, "--threads", 1, *flags), **how
    )
    said: list[str] = []
    assert process.stderr is not None
    port = 0
    for line in process.stderr:
        said.append(line.decode())
        if found := re.search(r"http://\S+?:(\d+)/v1", said[-1]):
            port = int(found[1])
            break
    assert port, said
    rest = threading.Thread(target=lambda: said.extend(line.decode() for line in process.stderr or ()), daemon=True)
    rest.start()
    try:
        yield Server(process, port, model, said)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(600)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        rest.join(600)
        assert process.returncode == 0, said
        assert not any("Traceback" in line for line in said), said


def text_of(engine: Engine, prompt: str, **params: Any) -> str:
    return engine.generate([engine.tokenizer.encode(prompt)], SamplingParams(**params))[0].text
