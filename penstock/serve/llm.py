"""Offers a model to Python programs as `LLM`, under the names that people know from other libraries."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest
from penstock.hubs.where import Where
from penstock.planner.explain import rate
from penstock.planner.firing import require_unpacked
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.outputs import Conversations, Messages, Prompts, RequestOutput, conversations, prompt_list
from penstock.serve.planning import default_cache
from penstock.serve.pooling import Pool, chosen_pooling, require_dimensions, stacked
from penstock.serve.sampling import SamplingParams
from penstock.serve.service import Service
from penstock.serve.session import CLOSED
from penstock.spec.ask import DEFAULT_SCORE_ROWS, Ask
from penstock.units import parse_bytes


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
    (`ollama:llama3.2:1b`, `lmstudio:publisher/model`). `where`: other places to look for these. Sizes are numbers of
    bytes or strings such as "6GiB". `verify`: every byte of the packed model is compared with its checksum when it is
    read first; DamagedModel names file, part and granule. `cache`: the folder of the cache, default ~/.cache/penstock.
    The library reads no environment. To share copies with the command line where XDG_CACHE_HOME is set, name its
    subfolder `penstock` here. `score_rows`: how many tokens a pass of `score` takes. Each takes memory for one float32
    an entry of the vocabulary. `sparsity`: one of `spec.ask.SPARSITIES`. `attention`: "full", or for instance
    "top-k:0.1", where a query reads the values of its best tenth of the positions alone (lossy). `threads`: at most
    one for each CPU that this process may use, which is also what None means. `exact`: quantised weights are multiplied
    with float32 activations, not with int8 ones, and a quantised cache with float32 numbers. `on_progress(text, done,
    total)`: is called while downloading, packing and loading.

    If all weights stay in RAM, a first use loads the checkpoint itself. A thread then writes the packed copy between
    passes, and a program's end waits for it. Where it cannot be written there is a warning.

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
        attention: str = "full",
        batch: int = 1,
        context: int | None = None,
        score_rows: int = DEFAULT_SCORE_ROWS,
        threads: int | None = None,
        exact: bool = False,
        cache: str | Path | None = None,
        verify: bool = True,
        on_progress: Callable[[str, int, int], None] | None = None,
        where: Where | None = None,
    ) -> None:
        from penstock.serve.source import resolve

        if threads is not None and threads < 1:
            raise BadRequest(f"threads is {threads}; it should be at least 1")
        folder = Path(cache) if cache else default_cache()
        within_bytes = _size(host_memory, "host_memory")
        ask = Ask(
            batch=batch,
            context=context,
            host_memory_bytes=within_bytes,
            device_memory_bytes=_size(device_memory, "device_memory"),
            resident_bytes=_size(resident, "resident"),
            kv=kv,
            kv_home=kv_home,
            sparsity=sparsity,
            attention=attention,
            score_rows=score_rows,
            use_device=device in ("cuda", "emulated"),
        )
        source = resolve(
            str(model),
            weights=weights,
            cache=folder,
            host_memory_bytes=within_bytes,
            verify=verify,
            on_progress=on_progress,
            where=where,
            unpacked=True,
            require=partial(require_unpacked, sparsity),
        )
        try:
            tokenizer = source.open_tokenizer(ask.host_memory_bytes, verify)
            how = Loading(device=device, cache=folder, threads=threads, exact=exact, verify=verify, tokenizer=tokenizer)
            self.engine = Engine.open(source, ask, how, on_progress)
        except BaseException:
            source.close()
            raise
        self._name = source.called.name
        self._starting = threading.Lock()
        self._service: Service | None = None
        self.engine.begin_copy(warnings.warn)

    def generate(self, prompts: Prompts, params: SamplingParams | None = None) -> list[RequestOutput]:
        """Completes each prompt as it stands; no chat template is applied. A prompt is a text or a list of token ids.
        `params.n` answers to one prompt read the prompt once. Threads may call it at once: their prompts share passes,
        as many at a time as `batch` says. Raises TypeError for prompts that are neither, and as `Service.generate`."""
        texts = prompt_list(prompts)
        chosen = checked_params(params)
        encode = self.engine.tokenizer.encode
        ids = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in texts]
        return self._answers([text if isinstance(text, str) else None for text in texts], ids, chosen)

    def chat(self, messages: Conversations, params: SamplingParams | None = None) -> list[RequestOutput]:
        """The next turn of a conversation, or of each of several, by the model's chat template. A message is
        {"role": "user", "content": "…"}. Raises TypeError for anything else, BadRequest where the model has no chat
        template or the template refuses, and as `generate`."""
        asked = conversations(messages)
        chosen = checked_params(params)
        ids = [self.chat_ids(each) for each in asked]
        return self._answers([None] * len(ids), ids, chosen)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """The answer to one prompt, a text or token ids, in pieces as they become certain. The answer begins when the
        first piece is asked for, and ends early if the iterator is closed. Raises TypeError and BadRequest here. An
        error that ends the answer is raised when its next piece is asked for."""
        (one,) = prompt_list([prompt])
        chosen = one_answer(checked_params(params))
        ids = self.engine.tokenizer.encode(one) if isinstance(one, str) else one
        return self._held(self.service().stream(ids, chosen))

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None) -> Iterator[str]:
        """The next turn of one conversation, as `stream` yields it. Raises as `chat` and `stream`."""
        (one,) = conversations([messages])
        chosen = one_answer(checked_params(params))
        return self._held(self.service().stream(self.chat_ids(one), chosen))

    def _held(self, pieces: Iterator[str]) -> Iterator[str]:
        """Yields the pieces of an answer. This object and its model stay as long as somebody takes pieces."""
        yield from pieces

    def chat_ids(self, messages: Messages) -> list[int]:
        """The token ids of a conversation by the model's chat template. Raises BadRequest where it has none."""
        tokenizer = self.engine.tokenizer
        if not tokenizer.has_chat_template:
            raise BadRequest("this model has no chat template: use generate, with the prompt as it should stand")
        return tokenizer.encode_chat([dict(message) for message in messages])

    def _answers(
        self, texts: Sequence[str | None], ids: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[RequestOutput]:
        """`params.n` answers to each prompt. Equal prompts share their keys and values, so each is read once."""
        n = params.n
        asked = [each for each in ids for _ in range(n)]
        generations = self.service().generate(asked, [params.nth(i) for _ in ids for i in range(n)])
        return [
            RequestOutput.of(text, each, generations[i * n : (i + 1) * n])
            for i, (text, each) in enumerate(zip(texts, ids, strict=True))
        ]

    def score(self, text: str | Sequence[int], likeliest: int = 0) -> Score:
        """The log probability of every token of a text, or of ids, after those before it. `likeliest`: so many of the
        likeliest tokens beside each. Raises as `Engine.generate`."""
        ids = self.engine.tokenizer.encode(text) if isinstance(text, str) else list(text)
        tokens = self.engine.scores(ids, likeliest).tokens()
        return Score(ids, [None, *(each.logprob for each in tokens)], [(), *(each.best for each in tokens)])

    def embed(
        self, texts: Prompts, *, pooling: Pool | None = None, normalize: bool = True, dimensions: int | None = None
    ) -> NDArray[np.float32]:
        """An embedding of each text, float32 [texts, D]: its hidden states behind the final norm, pooled. A text is a
        string or a list of token ids. `pooling`: last or mean; None for what the model was made for, and the last token
        for models that were not made for embeddings at all (`makes_embeddings`). `normalize`: at length 1.
        `dimensions`: only so many of the first numbers. They keep their meaning only if the model was trained for that.
        Raises as `generate`, BadRequest for more dimensions than there are."""
        given, width = prompt_list(texts), require_dimensions(dimensions, self.engine.plan.target.spec.d_embed)
        chosen = chosen_pooling(pooling, self.engine.pooling)
        ids = [self.engine.tokenizer.encode(each) if isinstance(each, str) else each for each in given]
        return stacked(self.service().generate(ids, chosen), normalize, width)

    @property
    def makes_embeddings(self) -> bool:
        """Whether the model's files say that it was made for embeddings."""
        return self.engine.pooling is not None

    def close(self) -> None:
        """Frees the model's memory, when the packed copy of a first use is written. What other threads wait for ends
        with BadRequest. Ctrl-C ends the writing; then the next use is a first one again, or packs the rest."""
        with self._starting:
            if self._service is not None:
                self._service.close(CLOSED)
        try:
            self.engine.end_copy()
        finally:
            self.engine.close()

    def service(self) -> Service:
        """The service that answers all threads together. It is made for the first one."""
        with self._starting:
            if self._service is None:
                self._service = Service.of_whole_answers(self.engine)
            return self._service

    def __repr__(self) -> str:
        plan = self.engine.plan
        return (
            f"<LLM {self._name}: context {plan.context}, batch {self.engine.ask.batch}, "
            f"{rate(self.engine.prediction.decode_tokens_per_s)} tokens/s promised>"
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        # Whoever waits for an answer holds this object, but a stream that nobody reads may be garbage with it. A model
        # that failed to load has no engine, and while the interpreter ends anything may be gone.
        with suppress(Exception):
            if self._service is not None:
                self._service.leave(self.engine.leave)
            else:
                self.engine.leave()


def one_answer(params: SamplingParams) -> SamplingParams:
    """The parameters of a stream. Raises BadRequest for several answers, whose pieces could not be told apart."""
    if params.n != 1:
        raise BadRequest(f"a stream is one answer: n is {params.n}")
    return params


def checked_params(params: SamplingParams | None) -> SamplingParams:
    """The parameters, or the defaults. Raises TypeError for anything else."""
    if not isinstance(params, SamplingParams | None):
        raise TypeError(f"params should be SamplingParams, not {type(params).__name__}")
    return params or SamplingParams()


def _size(value: int | str | None, name: str) -> int | None:
    return parse_bytes(value, name) if isinstance(value, str) else value
