"""`python -m tests.conversations`: random conversations over HTTP, whole and streamed, in four dialects.

A server of the tale that is in the package, with one of several chat templates, is asked the same twice at once: for
the whole answer and for a stream. Both must say the same: text, thoughts, calls of tools and their arguments, log
probabilities, the reason of the end, tokens. Arguments of whole calls are JSON and follow their tool. Where neither
tools nor thoughts are in it, `LLM.chat` must give the same text alone.

    --cases N | --minutes M    how much (2 minutes)
    --first N                  begin with this case
    --case N                   this one alone

The last line is one JSON object; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

from penstock import LLM, SamplingParams
from penstock.errors import BadRequest
from tests.conversations.dialects import DIALECTS, Dialect, Said, objects
from tests.conversations.draws import ASKED, CONTEXT, Asked, Case, asked, draw, template_text
from tests.cpu.commands import machine_cache
from tests.cpu.engines import ROOT
from tests.cpu.servers import Server, serving
from tests.numbered import search

TALE = ROOT / "penstock" / "assets" / "tale-llama"
_ALONE = ("temperature", "seed", "stop", "presence_penalty", "skip_special_tokens", "top_k")


def differences(case: Case, folder: Path) -> list[str]:
    """What is not the same."""
    rng = random.Random(case.number)
    model = Path(shutil.copytree(TALE, folder / "model"))
    (model / "chat_template.jinja").write_text(template_text(case.template))
    cache = machine_cache(folder / "cache")
    found = list[str]()
    with (
        LLM(model, cache=cache, context=CONTEXT) as llm,
        serving(model, cache, "--context", CONTEXT, "--name", "m", *case.flags) as server,
    ):
        for _ in range(ASKED):
            one, dialect = asked(rng), rng.choice(DIALECTS)
            found += [f"{dialect.path}: {line}, of {one}" for line in compared(server, dialect, one, llm)]
        plan = server.ask("GET", "/v1/plan")[2]
        if plan["running"] or plan["waiting"]:
            found.append(f"{plan['running']} requests run and {plan['waiting']} wait in the end")
    return found


def compared(server: Server, dialect: Dialect, one: Asked, llm: LLM) -> Iterator[str]:
    """What is wrong about the two answers to a request. A request that is refused must be so both times."""
    with ThreadPoolExecutor(2) as pool:
        asks = [pool.submit(post, server, dialect.path, dialect.body(one, stream)) for stream in (False, True)]
        (status, whole), (stream_status, stream) = (ask.result() for ask in asks)
    if status != stream_status or status >= 500:
        yield f"status {status} and {stream_status}: {whole[:200]!r}, {stream[:200]!r}"
    if {status, stream_status} != {200}:
        return
    events = objects(stream)
    if "error" in events[-1] and events[-1]["error"] is not None:
        yield f"the stream ends with {events[-1]['error']}"
        return
    said, streamed = dialect.whole(json.loads(whole)), dialect.streamed(events)
    if said != streamed:
        yield f"{said} whole, {streamed} streamed"
    yield from _calls(said, one)
    tokenizer = llm.engine.tokenizer
    if dialect is DIALECTS[0] and not (one.tools or tokenizer.thinks or tokenizer.writing):
        yield from _alone(said, one, llm)


def _calls(said: Said, one: Asked) -> Iterator[str]:
    """What is wrong about the calls of an answer that was not cut."""
    if said.reason in ("length", "max_tokens", "incomplete", "stop_sequence") or "stop" in one.options:
        return
    if one.must and one.tools and not said.calls and said.reason in ("stop", "end_turn", "completed"):
        yield f"no tool is called: {said}"
    known = {tool["name"]: tool["parameters"] for tool in one.tools}
    for name, arguments in said.calls:
        try:
            given = json.loads(arguments)
        except ValueError:
            yield f"{name} is called with {arguments!r}"
            continue
        wanted = known.get(name)
        if wanted is None or not set(wanted.get("required", ())) <= given.keys() <= wanted["properties"].keys():
            yield f"{name} is called with {arguments!r}"


def _alone(said: Said, one: Asked, llm: LLM) -> Iterator[str]:
    """Whether the model says the same alone."""
    chosen = {name: one.options[name] for name in _ALONE if name in one.options}
    try:
        (answer,) = llm.chat(one.messages, SamplingParams(one.max_tokens, json_schema=one.schema, **chosen))
    except BadRequest as error:  # of a template that wants its system prompt elsewhere, which the server does
        if "template" not in error.message:
            yield f"alone: {error}"
        return
    alone = (answer.text, answer.finish_reason, len(answer.token_ids))
    if alone != (said.text, said.reason, said.tokens):
        yield f"{said}, alone {alone}"


def post(server: Server, path: str, body: object) -> tuple[int, bytes]:
    """(status, body) of an answer."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def judged(number: int) -> tuple[str, list[str]]:
    case = draw(number)
    with tempfile.TemporaryDirectory(prefix="penstock-conversations-") as folder:
        return str(case), differences(case, Path(folder))


if __name__ == "__main__":
    sys.exit(search(__doc__ or "", judged))
