"""Models of a penstock server for the `llm` command line. It uses Python's own HTTP client and nothing else."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import llm
from pydantic import Field

_LOOK_S, _ANSWER_S = 1.0, 600.0


def _url() -> str:
    return os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000").rstrip("/")


def _ask(path: str, key: str | None, body: dict[str, Any] | None, timeout_s: float) -> Any:
    """An open answer of the server. Raises llm.ModelError with the server's own line."""
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(_url() + path, content, headers)
    try:
        return urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        said = error.read()
        with suppress(ValueError, KeyError, TypeError):
            said = json.loads(said)["error"]["message"]
        raise llm.ModelError(f"penstock: {said!s:.500}") from None
    except OSError as error:
        raise llm.ModelError(f"no penstock server answers at {_url()}: {error}") from None


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """The models that the server has now; none where no server answers."""
    with suppress(llm.ModelError, ValueError, KeyError, TypeError):
        key = llm.get_key(None, "penstock")
        for model in json.load(_ask("/v1/models", key, None, _LOOK_S))["data"]:
            register(Penstock(str(model["id"])))


class Penstock(llm.KeyModel):
    """One model of the server."""

    needs_key = None
    can_stream = True
    supports_schema = True

    class Options(llm.Options):
        """How tokens are chosen; what is not named is the model's own."""

        temperature: float | None = Field(default=None, ge=0, description="0 is greedy")
        top_p: float | None = Field(
            default=None, gt=0, le=1, description="the likeliest tokens of this much probability"
        )
        top_k: int | None = Field(default=None, ge=1, description="so many of the likeliest tokens")
        max_tokens: int | None = Field(default=None, ge=1, description="the most tokens of an answer")
        seed: int | None = Field(default=None, ge=0, description="the same answer each time")

    def __init__(self, name: str) -> None:
        self.name, self.model_id = name, f"penstock/{name}"

    def execute(
        self, prompt: Any, stream: bool, response: Any, conversation: Any, key: str | None = None
    ) -> Iterator[str]:
        body = {"model": self.name, "messages": _messages(prompt, conversation), "stream": stream}
        body |= {name: value for name, value in prompt.options.model_dump().items() if value is not None}
        if prompt.schema:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "schema", "schema": prompt.schema},
            }
        key = key or llm.get_key(None, "penstock")
        if not stream:
            answer = json.load(_ask("/v1/chat/completions", key, body, _ANSWER_S))
            response.set_usage(input=answer["usage"]["prompt_tokens"], output=answer["usage"]["completion_tokens"])
            yield answer["choices"][0]["message"]["content"]
            return
        body["stream_options"] = {"include_usage": True}
        with _ask("/v1/chat/completions", key, body, _ANSWER_S) as lines:
            for line in lines:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise llm.ModelError(f"penstock: {event['error']['message']}")
                if event.get("usage"):
                    response.set_usage(
                        input=event["usage"]["prompt_tokens"], output=event["usage"]["completion_tokens"]
                    )
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""

    def __str__(self) -> str:
        return f"penstock: {self.model_id}"


def _messages(prompt: Any, conversation: Any) -> list[dict[str, str]]:
    """The conversation so far, and the prompt."""
    found: list[dict[str, str]] = []
    if prompt.system:
        found.append({"role": "system", "content": prompt.system})
    for earlier in conversation.responses if conversation is not None else ():
        if not found and earlier.prompt.system:
            found.append({"role": "system", "content": earlier.prompt.system})
        found += [{"role": "user", "content": earlier.prompt.prompt}, {"role": "assistant", "content": earlier.text()}]
    return [*found, {"role": "user", "content": prompt.prompt}]
