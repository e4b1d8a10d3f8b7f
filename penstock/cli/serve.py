"""`penstock serve`: answers many clients at once, by OpenAI's API."""

from __future__ import annotations

import importlib.util
import os
import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.flags import flag
from penstock.cli.interrupts import sigterm_ends
from penstock.cli.loading import loaded, packed_model
from penstock.cli.options import (
    CacheLimit,
    Machine,
    Model,
    PlanFile,
    SharedWorkload,
    Weights,
    as_path,
    given_plan,
    read_text,
)
from penstock.cli.output import note
from penstock.errors import BadRequest
from penstock.spec.ask import DEFAULT_SCORE_ROWS, Ask
from penstock.units import MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from penstock.serve.api.guard import Access
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
        return replace(ask, kv_tokens=ask.kv_tokens or ask.batch * ask.sequence_tokens)


@dataclass(frozen=True)
class Serving:
    """What clients meet: where the server listens, who may ask, under which names, and what it does for them."""

    host: str = flag("--host", "NAME", "Where to listen. Beyond this machine a key is needed.", "127.0.0.1")
    port: int = flag("--port", "N", "0 takes any that is free.", 8000, min=0, max=65535)
    key_file: str | None = flag(
        "--key-file", "FILE", f"Keys that clients must have, one a line (docs/SERVER.md); or ${KEY_VARIABLE}."
    )
    origin: list[str] | None = flag("--origin", "URL", "Pages of this origin may ask, such as https://chat.example.")  # noqa: RUF009
    name: str | None = flag("--name", "NAME", "The model's name for clients; default its folder's.")
    more: list[str] | None = flag(  # noqa: RUF009
        "--model", "NAME=PATH", "Another model, loaded in place of the one before when it is asked for."
    )
    queue: int = flag("--queue", "N", "Requests that may wait.", 256, min=0, max=100_000)
    keep_kv: str | None = flag(
        "--keep-kv", "DIR", "Keep KV of prompts and answers here, to go on from after a restart."
    )
    keep_kv_limit: str = flag("--keep-kv-limit", "SIZE", "The most that --keep-kv may take, for each model.", "4GiB")
    score_rows: int = flag(
        "--score-rows", "N", "Tokens of prompts that a pass may score (echo, logprobs).", DEFAULT_SCORE_ROWS, min=0
    )
    no_schemas: bool = flag(
        "--no-schemas", None, "No answers by JSON schema (response_format): their process takes no memory.", False
    )

    def access(self) -> Access:
        """Who may ask. Raises BadRequest for a file without keys, and if other machines could ask without one."""
        from penstock.serve.api.guard import Access, is_loopback

        keys = _keys(self.key_file)
        if not keys and not is_loopback(self.host):
            raise BadRequest(
                f"--host {self.host} can be reached from other machines: give --key-file FILE, or a key in"
                f" {KEY_VARIABLE}"
            )
        return Access(self.host, keys, tuple(self.origin or ()))

    def url(self, port: int) -> str:
        """The API's address at the port that was taken."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{port}/v1"

    def kept(self) -> KeptKv | None:
        """Where KV is kept; None without --keep-kv. Raises BadRequest."""
        if self.keep_kv == "":
            raise BadRequest("--keep-kv names no folder")
        limit_bytes = parse_bytes(self.keep_kv_limit, "--keep-kv-limit")
        return None if self.keep_kv is None else KeptKv(as_path(self.keep_kv), limit_bytes)

    def paths(self, model: str) -> dict[str, str]:
        """Paths of models by name, that of MODEL first. Raises BadRequest for what is no NAME=PATH, and for a name that
        comes twice."""
        paths = {self.name or Path(model).name or model: model}
        for given in self.more or []:
            called, _, where = given.partition("=")
            if not (called and where):
                raise BadRequest(f"--model {given}: it should be NAME=PATH")
            if called in paths:
                raise BadRequest(f"--model {given}: there is a model {called} already")
            paths[called] = where
        return paths


def serve(
    model: Model,
    machine: Machine,
    work: ServeWorkload,
    serving: Serving,
    weights: Weights = None,
    plan_file: PlanFile = None,
    cache_limit: CacheLimit = None,
) -> None:
    """An OpenAI-compatible server. Answers that run at once share each read of the weights; --batch says how many may,
    8 by default.

    /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, /metrics and /v1/plan.
    SIGTERM and Ctrl-C take no more requests, let what is under way end, and end with code 0.
    """
    with sigterm_ends(partial(note, "ended")):
        _serve(model, machine, work, serving, weights, plan_file, cache_limit)


def _serve(
    model: str, machine: Machine, work: ServeWorkload, serving: Serving, weights: str | None, plan_file: str | None,
    cache_limit: str | None,
) -> None:  # fmt: skip
    if missing := [each for each in _NEEDED if importlib.util.find_spec(each) is None]:
        raise BadRequest(f"the server needs {', '.join(missing)}: pip install 'penstock[serve]'")
    machine.prepare()
    plan, access = given_plan(plan_file, machine, work), serving.access()
    ask = replace(work.ask(machine, _PROMPT_TOKENS, _OUTPUT_TOKENS), score_rows=serving.score_rows)
    paths = serving.paths(model)
    if plan and len(paths) > 1:
        raise BadRequest("--plan is of one model: give no --model beside it")
    kept, ends = serving.kept(), threading.Event()
    from penstock.serve.api.server import serve as listen
    from penstock.serve.api.shelf import Shelf

    def load(called: str) -> Loaded:
        # KV that is kept is found by the checksums of a packed copy, and a plan of a file is for one.
        unpacked = plan is None and kept is None
        how: Any = {"sparsity": work.sparsity_of(plan), "plan": plan, "ends": ends}
        source = packed_model(paths[called], weights, machine, cache_limit, True, unpacked, **how)
        return _load(called, source, ask, machine, plan, serving, kept, ends)

    first = load(next(iter(paths)))
    engine = first.service.engine
    context, speed = engine.plan.context, engine.prediction.decode_tokens_per_s
    sequences = engine.plan.at_once(engine.ask.batch, engine.ask.sequence_tokens)
    shelf = Shelf(first, {called: partial(load, called) for called in paths}, serving.queue, ends.set)
    del first, engine  # this model may give its place to another one

    def ready(at: int) -> None:
        from penstock.planner.explain import rate

        note(f"{sequences} answers at once are predicted to have {rate(speed)} tokens/s together")
        note(f"{', '.join(paths)} {'is' if len(paths) == 1 else 'are'} on {serving.url(at)}")

    with closing(shelf):
        listen(shelf, access, context, serving.port, ready)
        if shelf.loads:  # the interpreter would wait for its kernels, and then free what they use
            note("ended, in the middle of loading a model")
            os._exit(0)
    note("ended")


def _load(
    name: str, source: Source, ask: Ask, machine: Machine, plan: Plan | None, serving: Serving, kept: KeptKv | None,
    ends: threading.Event,
) -> Loaded:  # fmt: skip
    """Loads a model and begins to answer with it. A packed copy that it lacks is written meanwhile. `ends`: the server
    is ending, and loads no more. Raises as `loaded`."""
    from penstock.planner.pace import pace
    from penstock.planner.pass_times import PassTimes
    from penstock.planner.swap import swap
    from penstock.serve.api.shelf import Loaded
    from penstock.serve.failures import Failures
    from penstock.serve.guides import guide_bytes, has_guides
    from penstock.serve.service import Service

    with ExitStack() as stack:
        stack.callback(source.close)
        tokenizer = source.open_tokenizer(ask.host_memory_bytes, not machine.no_verify)
        stack.callback(tokenizer.close)  # its process would live on where loading fails
        guide = guide_bytes(tokenizer.size) if has_guides() and not serving.no_schemas else 0
        beside: dict[str, Any] = {"tokenizer": tokenizer, "beside_bytes": SERVER_BYTES + guide, "guide_bytes": guide}
        engine = stack.enter_context(loaded(source, ask, machine, plan, **beside, copy="beside", ends=ends))
        tempo = pace(engine.plan, engine.machine)
        note(tempo.reason)
        times = PassTimes(engine.plan, engine.machine, tempo.mixed)
        how: dict[str, Any] = {"prompt_rows": tempo.prompt_rows, "mixed": tempo.mixed, "follows": True}
        how |= {"queue": serving.queue, "times": times, "failures": Failures(lambda why: note(f"{name}: {why}"))}
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
    """Where KV of prompts and answers is kept, and how many bytes of it at most for each model."""

    folder: Path
    limit_bytes: int

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


def _keys(file: str | None) -> tuple[Key, ...]:
    """The keys of --key-file, or of the environment. Raises BadRequest for a file without any."""
    from penstock.serve.api.keys import Key, parse_keys

    if file is None:
        secret = os.environ.get(KEY_VARIABLE, "").strip()
        return (Key(KEY_VARIABLE, secret),) if secret else ()
    return parse_keys(read_text(file), f"--key-file {file}")
