"""`penstock serve`: answers many clients at once, by OpenAI's API."""

from __future__ import annotations

import importlib.util
import os
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from penstock.cli.loading import loaded, packed_model
from penstock.cli.options import (
    CacheLimit,
    Machine,
    Model,
    PlanFile,
    SharedWorkload,
    Weights,
    as_path,
    flag,
    given_plan,
    read_text,
)
from penstock.cli.output import note
from penstock.errors import BadRequest
from penstock.spec.ask import DEFAULT_SCORE_ROWS, Ask
from penstock.units import MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from penstock.serve.api.keys import Key
    from penstock.serve.api.shelf import Loaded
    from penstock.serve.engine import Engine
    from penstock.serve.kv_store import KvStore
    from penstock.serve.source import Source
    from penstock.spec.plan import Plan

KEY_VARIABLE = "PENSTOCK_API_KEY"
# What the process takes beside what `run` takes. Its libraries are 12 MiB, and 64 clients with 256 requests made that
# 25 MiB. Bodies are at most 16 MiB together (`api/guard`), and are there twice: as bytes and as text.
SERVER_BYTES = 64 * MIB
_PROMPT_TOKENS, _OUTPUT_TOKENS = 512, 256  # plans are made for so many where no flag says
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True)
class ServeWorkload(SharedWorkload):
    """What the plan is for: several answers at once."""

    batch: int = flag("--batch", "N", "Answers at once; other requests wait.", 8, min=1)

    def ask(self, machine: Machine, prompt_tokens: int = 64, output_tokens: int = 64) -> Ask:
        ask = super().ask(machine, prompt_tokens, output_tokens)
        return replace(ask, kv_tokens=ask.kv_tokens or ask.batch * (ask.prompt_tokens + ask.output_tokens))


def serve(
    model: Model,
    machine: Machine,
    work: ServeWorkload,
    host: Annotated[
        str, Option("--host", metavar="NAME", help="Where to listen. Beyond this machine a key is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, Option("--port", metavar="N", min=0, max=65535, help="0 takes any that is free.")] = 8000,
    key_file: Annotated[
        str | None,
        Option(
            "--key-file",
            metavar="FILE",
            help=f"Keys that clients must have, one a line (docs/SERVER.md); or ${KEY_VARIABLE}.",
        ),
    ] = None,
    origin: Annotated[
        list[str] | None,
        Option("--origin", metavar="URL", help="Pages of this origin may ask, such as https://chat.example."),
    ] = None,
    name: Annotated[
        str | None, Option("--name", metavar="NAME", help="The model's name for clients; default its folder's.")
    ] = None,
    more: Annotated[
        list[str] | None,
        Option(
            "--model",
            metavar="NAME=PATH",
            help="Another model, loaded in place of the one before when it is asked for.",
        ),
    ] = None,
    queue: Annotated[int, Option("--queue", metavar="N", min=0, max=100_000, help="Requests that may wait.")] = 256,
    keep_kv: Annotated[
        str | None,
        Option("--keep-kv", metavar="DIR", help="Keep KV of prompts and answers here, to go on from after a restart."),
    ] = None,
    keep_kv_limit: Annotated[
        str, Option("--keep-kv-limit", metavar="SIZE", help="The most that --keep-kv may take, for each model.")
    ] = "4GiB",
    score_rows: Annotated[
        int,
        Option("--score-rows", metavar="N", min=0, help="Tokens of prompts that a pass may score (echo, logprobs)."),
    ] = DEFAULT_SCORE_ROWS,
    no_schemas: Annotated[
        bool, Option("--no-schemas", help="No answers by JSON schema (response_format): their process takes no memory.")
    ] = False,
    weights: Weights = None,
    plan_file: PlanFile = None,
    cache_limit: CacheLimit = None,
) -> None:
    """An OpenAI-compatible server. Answers that run at once share each read of the weights; --batch says how many may,
    8 by default.

    /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, /metrics and /v1/plan.
    SIGTERM and Ctrl-C take no more requests, let what is under way end, and end with code 0.
    """
    if missing := [each for each in _NEEDED if importlib.util.find_spec(each) is None]:
        raise BadRequest(f"the server needs {', '.join(missing)}: pip install 'penstock[serve]'")
    machine.prepare()
    plan, keys = given_plan(plan_file, machine, work), _keys(key_file)
    from penstock.serve.api.guard import Access, is_loopback

    if not keys and not is_loopback(host):
        raise BadRequest(
            f"--host {host} can be reached from other machines: give --key-file FILE, or a key in {KEY_VARIABLE}"
        )
    ask = replace(work.ask(machine, _PROMPT_TOKENS, _OUTPUT_TOKENS), score_rows=score_rows)
    paths = _models(name or Path(model).name or model, model, more or [])
    if plan and len(paths) > 1:
        raise BadRequest("--plan is of one model: give no --model beside it")
    kept = KeptKv.of(keep_kv, keep_kv_limit)
    from penstock.serve.api.server import serve as listen
    from penstock.serve.api.shelf import Shelf

    def load(called: str) -> Loaded:
        source = packed_model(paths[called], weights, machine, cache_limit, chat=True)
        return _load(called, source, ask, machine, plan, queue, not no_schemas, kept)

    first = load(next(iter(paths)))
    engine = first.service.engine
    context, speed = engine.plan.context, engine.prediction.decode_tokens_per_s
    sequences = engine.plan.at_once(engine.ask.batch, engine.ask.prompt_tokens + engine.ask.output_tokens)
    shelf = Shelf(first, {called: partial(load, called) for called in paths}, queue)
    del first, engine  # this model may give its place to another one

    def ready(at: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        note(f"{sequences} answers at once are predicted to have {speed:.3g} tokens/s together")
        note(f"{', '.join(paths)} {'is' if len(paths) == 1 else 'are'} on http://{shown}:{at}/v1")

    with closing(shelf):
        listen(shelf, Access(host, keys, tuple(origin or ())), context, port, ready)
    note("ended")


def _load(
    name: str, source: Source, ask: Ask, machine: Machine, plan: Plan | None, queue: int, schemas: bool,
    kept: KeptKv | None,
) -> Loaded:  # fmt: skip
    """Loads a model and begins to answer with it. Raises as `loaded`."""
    from penstock.planner.pace import pace
    from penstock.planner.pass_times import PassTimes
    from penstock.planner.swap import swap
    from penstock.serve.api.shelf import Loaded
    from penstock.serve.guides import guide_bytes, has_guides
    from penstock.serve.service import Service
    from penstock.serve.tokenizer import Tokenizer

    tokenizer = Tokenizer.open(source.folder, ask.host_memory_bytes, not machine.no_verify)
    guide = guide_bytes(tokenizer.size) if schemas and has_guides() else 0
    beside: dict[str, Any] = {"tokenizer": tokenizer, "beside_bytes": SERVER_BYTES + guide, "guide_bytes": guide}
    with ExitStack() as stack:
        engine = stack.enter_context(loaded(source, ask, machine, plan, **beside))
        tempo = pace(engine.plan, engine.machine)
        note(tempo.reason)
        times = PassTimes(engine.plan, engine.machine, tempo.mixed)
        how: dict[str, Any] = {"prompt_rows": tempo.prompt_rows, "mixed": tempo.mixed, "follows": True}
        how |= {"queue": queue, "times": times}
        reasons: tuple[str, ...] = ()
        if kept is not None:
            how["store"] = kept.store(engine, machine.exact)
            choice = swap(engine.plan, engine.machine, times, tempo.prompt_rows)
            note(choice.reason)
            how["swaps"] = choice.pays
            reasons = (choice.reason,)
        service = Service(engine, **how)
        stack.enter_context(closing(service))
        return Loaded(name, service, tempo, guide > 0, stack.pop_all().close, reasons)


@dataclass(frozen=True)
class KeptKv:
    """--keep-kv and --keep-kv-limit."""

    folder: Path
    limit_bytes: int

    @classmethod
    def of(cls, folder: str | None, limit: str) -> KeptKv | None:
        """Raises BadRequest."""
        if folder == "":
            raise BadRequest("--keep-kv names no folder")
        limit_bytes = parse_bytes(limit, "--keep-kv-limit")
        return None if folder is None else cls(as_path(folder), limit_bytes)

    def store(self, engine: Engine, exact: bool) -> KvStore:
        """The store for a model. Raises BadRequest and StorageFailed."""
        from penstock.serve.kv_store import KvStore, store_key

        key = store_key(engine.plan, engine.packed.sums, exact)
        pages = engine.session.kv_pages
        pages.require_seen()
        page_bytes = pages.page_bytes
        store = KvStore(self.folder, key, page_bytes, self.limit_bytes)
        note(f"{len(store)} pages of KV are kept in {self.folder}, {format_bytes(page_bytes)} each")
        return store


def _models(name: str, path: str, more: list[str]) -> dict[str, str]:
    """Paths by name, of MODEL first. Raises BadRequest for what is no NAME=PATH, and for a name that comes twice."""
    paths = {name: path}
    for given in more:
        called, _, where = given.partition("=")
        if not (called and where):
            raise BadRequest(f"--model {given}: it should be NAME=PATH")
        if called in paths:
            raise BadRequest(f"--model {given}: there is a model {called} already")
        paths[called] = where
    return paths


def _keys(file: str | None) -> tuple[Key, ...]:
    """The keys of --key-file, or of the environment. Raises BadRequest for a file without any."""
    from penstock.serve.api.keys import Key, parse_keys

    if file is None:
        secret = os.environ.get(KEY_VARIABLE, "").strip()
        return (Key(KEY_VARIABLE, secret),) if secret else ()
    return parse_keys(read_text(file), f"--key-file {file}")
