"""Clients of a server of `tests.at_size.shelved`: what they ask, and what is wrong about what they get."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

from penstock.serve.generation import Generation

_PATHS = ("/v1/plan", "/metrics", "/health", "/v1/live", "/v1/models", "/v1/plan?prompt_tokens=5&output_tokens=9")
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@dataclass(frozen=True)
class Known:
    """What a model answers to some prompts alone, greedily, with the log probability of each token."""

    prompts: list[list[int]]
    answers: list[Generation]


@dataclass(frozen=True)
class Asked:
    """A request. `kind`: answer, stream, look, tokens, schema, vectors, scores. `leaves_s`: its client goes then."""

    kind: str
    model: int
    prompt: int
    tokens: int
    n: int
    leaves_s: float | None
    pause_s: float
    path: str

    @classmethod
    def drawn(cls, rng: random.Random, models: int, schemas: bool, scores: bool) -> Asked:
        kinds = ["answer"] * 6 + ["stream"] * 6 + ["look", "tokens", "vectors"]
        kinds += ["schema"] * schemas + ["scores"] * scores
        return cls(
            rng.choice(kinds), rng.randrange(models), rng.randrange(4), rng.choice((1, 5, rng.randint(1, 60))),
            rng.choice((1, 1, 2)), rng.choice((None, None, None, rng.uniform(0, 1.5))), rng.choice((0, 0, 0.3)),
            rng.choice(_PATHS),
        )  # fmt: skip


class Client(threading.Thread):
    """Asks one request after the other, and puts what is wrong into `found`. `ending`: the server may refuse now."""

    def __init__(self, port: int, known: list[Known], asked: list[Asked], found: list[str]) -> None:
        super().__init__(daemon=True)
        self._port, self._known, self._asked, self._found = port, known, asked, found
        self.ending = False
        self.right = self.refused = self.gone = 0
        self.now: Asked | None = None

    def run(self) -> None:
        for asked in self._asked:
            self.now = asked
            time.sleep(asked.pause_s)
            try:
                self._ask(asked)
            except (OSError, HTTPException, ValueError) as error:
                if not self.ending:
                    self._found.append(f"{asked}: {type(error).__name__}: {error}")

    def _ask(self, asked: Asked) -> None:
        method, path, body = self._request(asked)
        connection = HTTPConnection("127.0.0.1", self._port, timeout=200)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"content-type": "application/json"} if body else {})
            if asked.leaves_s is not None:
                leaving = threading.Timer(asked.leaves_s, _shut, (connection.sock,))
                leaving.start()
                with suppress(OSError, HTTPException):
                    connection.getresponse().read()
                    leaving.cancel()
                self.gone += 1
                return
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            self._refusal(asked, answer.status, text)
        elif wrong := self._judged(asked, text):
            if not (self.ending and "error" in text):
                self._found.append(f"{asked}: {wrong}")
        else:
            self.right += 1

    def _request(self, asked: Asked) -> tuple[str, str, dict[str, Any] | None]:
        model, prompt = f"m{asked.model}", self._known[asked.model].prompts[asked.prompt]
        if asked.kind == "look":
            return "GET", asked.path, None
        if asked.kind == "tokens":
            return "POST", "/detokenize", {"model": model, "tokens": prompt}
        if asked.kind == "vectors":
            return "POST", "/v1/embeddings", {"model": model, "input": prompt}
        given: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": asked.tokens, "temperature": 0}
        if asked.kind == "schema":
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
            return "POST", "/v1/completions", {**given, "max_tokens": 60, "response_format": form}
        given |= {"ignore_eos": True, "logprobs": 0, "n": asked.n, "stream": asked.kind == "stream"}
        if asked.kind == "scores":
            given |= {"echo": True}
        return "POST", "/v1/completions", given

    def _refusal(self, asked: Asked, status: int, text: str) -> None:
        """A model may be too large for the limit, nobody tells of a model that is being loaded, and a server that ends
        takes no more."""
        if asked.kind == "look" and (status == 503 or self.ending):
            return
        message = json.loads(text)["error"]["message"]
        if status == 503 and (self.ending or re.search(r"too little.*needs|needs .* of memory", message)):
            self.refused += 1
            return
        self._found.append(f"{asked}: {status} {message}")

    def _judged(self, asked: Asked, text: str) -> str:
        """What is wrong about an answer; "" if nothing is."""
        if asked.kind in ("look", "tokens", "vectors"):
            return ""
        if asked.kind == "schema":
            choice = json.loads(text)["choices"][0]
            return "" if choice["finish_reason"] == "length" or "a" in json.loads(choice["text"]) else text
        right = self._known[asked.model].answers[asked.prompt]
        should = [each.logprob for each in right.logprobs[: asked.tokens]]
        choices: dict[int, list[Any]] = {}
        if asked.kind == "stream":
            events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            if events[-1:] != ["[DONE]"]:
                return f"the stream ends with {events[-1:]}"
            parts = [each for event in events[:-1] for each in json.loads(event)["choices"]]
        else:
            parts = json.loads(text)["choices"]
        for part in parts:
            choices.setdefault(part["index"], []).extend((part["logprobs"] or {}).get("token_logprobs", []))
        if len(choices) != asked.n:
            return f"{len(choices)} answers"
        for index, had in choices.items():
            said = had[-asked.tokens :]
            if said != should:
                return f"answer {index}: log probabilities {said[:5]}, alone {should[:5]}"
        return ""


def _shut(link: socket.socket | None) -> None:
    if link is not None:
        with suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
