"""Offers a model to Python programs as `LLM`, under the names that people know from other libraries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.hubs.where import Where
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.planning import default_cache
from penstock.serve.sampling import SamplingParams
from penstock.serve.service import Service
from penstock.serve.tokenizer import Tokenizer
from penstock.spec.ask import DEFAULT_SCORE_ROWS, Ask
from penstock.units import parse_bytes

_CLOSED = "this model was closed: load it again"


@dataclass
class Answer:
    """The answer of `LLM.generate` to a prompt. `finish_reason`: stop or length."""

    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: str


@dataclass
class Score:
    """What a model thinks of a text. `logprobs[i]`: log p of token i after those before it, in nats; None for the
    first. `likeliest[i]`: the likeliest tokens at that place, as (id, log p), the likeliest first."""

    token_ids: list[int]
    logprobs: list[float | None]
    likeliest: list[tuple[tuple[int, float], ...]]


class LLM:
    """`LLM(model, host_memory="12GiB", weights="int4").generate(prompts, SamplingParams(max_tokens=64))`.

    `model`: a packed model, a Hugging Face folder or a GGUF file (packed into the cache on first use), a name on the
    Hub (`org/name[:revision][/file.gguf]`, `org/name:Q4_K_M`), or of what Ollama or LM Studio keeps here
    (`ollama:llama3.2:1b`, `lmstudio:publisher/model`). `where`: other places to look for these.
    Sizes are numbers of bytes or strings such as "6GiB". `verify`: every byte of the packed model is compared with its
    checksum when it is read first; DamagedModel names file, part and granule. `cache`: the folder of the cache, default
    ~/.cache/penstock. The library reads no environment. To share copies with the command line where XDG_CACHE_HOME is
    set, name its subfolder `penstock` here. `score_rows`: tokens that `score` takes a pass; each takes memory
    for one float32 an entry of the vocabulary. `sparsity`: one of `spec.ask.SPARSITIES`.
    `on_progress(text, done, total)`: is called while downloading, packing and loading.

    Raises BadRequest, BrokenModel, UnsupportedModel, DamagedModel, DoesNotFit, StorageFailed and DeviceFailed, all of
    them PenstockErrors.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        resident: int | str | None = None,
        weights: str | None = None,
        kv: str | None = None,
        kv_home: str | None = None,
        sparsity: str = "auto",
        batch: int = 1,
        context: int | None = None,
        score_rows: int = DEFAULT_SCORE_ROWS,
        cache: str | Path | None = None,
        verify: bool = True,
        on_progress: Callable[[str, int, int], None] | None = None,
        where: Where | None = None,
    ) -> None:
        from penstock.serve.source import resolve

        folder = Path(cache) if cache else default_cache()
        within_bytes = _size(host_memory, "host_memory")
        source = resolve(
            str(model),
            weights=weights,
            cache=folder,
            host_memory_bytes=within_bytes,
            verify=verify,
            on_progress=on_progress,
            where=where,
        )
        ask = Ask(
            batch=batch,
            context=context,
            host_memory_bytes=within_bytes,
            device_memory_bytes=_size(device_memory, "device_memory"),
            resident_bytes=_size(resident, "resident"),
            kv=kv,
            kv_home=kv_home,
            sparsity=sparsity,
            score_rows=score_rows,
            use_device=device in ("cuda", "emulated"),
        )
        tokenizer = Tokenizer.open(source.folder, ask.host_memory_bytes, verify)
        how = Loading(device=device, cache=folder, verify=verify, tokenizer=tokenizer)
        self.engine = Engine.open(source, ask, how, on_progress)
        self._starting = threading.Lock()
        self._service: Service | None = None

    def generate(self, prompts: str | Sequence[str], params: SamplingParams | None = None) -> list[Answer]:
        """Completes each prompt as it stands; no chat template is applied. Threads may call it at once: their prompts
        share passes, as many at a time as `batch` says. Raises TypeError for prompts that are not a string or a list of
        strings, and as `Service.generate`."""
        texts = _texts(prompts)
        if not isinstance(params, SamplingParams | None):
            raise TypeError(f"params should be SamplingParams, not {type(params).__name__}")
        ids = [self.engine.tokenizer.encode(text) for text in texts]
        generations = self._answering().generate(ids, params or SamplingParams())
        return [Answer(t, g.text, g.token_ids, g.finish_reason) for t, g in zip(texts, generations, strict=True)]

    def score(self, text: str | Sequence[int], likeliest: int = 0) -> Score:
        """The log probability of every token of a text, or of ids, after those before it. `likeliest`: so many of the
        likeliest tokens beside each. Raises as `Engine.generate`."""
        ids = self.engine.tokenizer.encode(text) if isinstance(text, str) else list(text)
        tokens = self.engine.scores(ids, likeliest).tokens()
        return Score(ids, [None, *(each.logprob for each in tokens)], [(), *(each.best for each in tokens)])

    def close(self) -> None:
        """Frees the model's memory. What other threads wait for ends with BadRequest."""
        with self._starting:
            if self._service is not None:
                self._service.close(_CLOSED)
        self.engine.close()

    def _answering(self) -> Service:
        """Who answers all threads together, made for the first one."""
        with self._starting:
            if self._service is None:
                self._service = Service.of_whole_answers(self.engine)
            return self._service

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _texts(prompts: object) -> list[str]:
    """The prompts of `LLM.generate` as a list. Raises TypeError for anything but strings: of a dict the keys would be
    read, and None would fail deep inside."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise TypeError(f"prompts should be a string or a list of strings, not {type(prompts).__name__}")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise TypeError(f"prompts[{i}] should be a string, not {type(prompt).__name__}")
    return list(prompts)


def _size(value: int | str | None, name: str) -> int | None:
    return parse_bytes(value, name) if isinstance(value, str) else value
