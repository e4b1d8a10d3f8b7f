"""Offers `LLM` to programs that use asyncio: nothing here holds the event loop up while a model loads or answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest
from penstock.serve.generation import Generation
from penstock.serve.llm import LLM, Score, checked_params, one_answer
from penstock.serve.outputs import Conversations, Messages, Prompts, RequestOutput, conversations, prompt_list
from penstock.serve.pooling import Pool, Pooling, chosen_pooling, require_dimensions, stacked
from penstock.serve.sampling import SamplingParams
from penstock.serve.session import CLOSED
from penstock.serve.told import AnswerPiece, Cancelled, Ended, Told, require_answer


class AsyncLLM:
    """`async with await AsyncLLM.load(model, host_memory="12GiB") as llm: await llm.generate(prompt)`.

    Requests of several tasks share passes, as many at a time as `batch` says. Where a task is cancelled, its requests
    leave at the next pass. Raises what `LLM` raises."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @classmethod
    async def load(cls, model: str | Path, **options: Any) -> AsyncLLM:
        """Loads a model in a thread. `options`: those of `LLM`. Raises as `LLM`."""
        return cls(await asyncio.to_thread(partial(LLM, model, **options)))

    async def generate(self, prompts: Prompts, params: SamplingParams | None = None) -> list[RequestOutput]:
        """As `LLM.generate`. Raises as that, and BadRequest where `close` ended an answer."""
        given = prompt_list(prompts)
        ids = [await self._encoded(prompt) for prompt in given]
        return await self._answers([each if isinstance(each, str) else None for each in given], ids, params)

    async def chat(self, messages: Conversations, params: SamplingParams | None = None) -> list[RequestOutput]:
        """As `LLM.chat`. Raises as that, and BadRequest where `close` ended an answer."""
        ids = [await asyncio.to_thread(self.llm.chat_ids, each) for each in conversations(messages)]
        return await self._answers([None] * len(ids), ids, params)

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> AsyncGenerator[str, None]:
        """As `LLM.stream`, which it raises as, at the first piece."""
        (one,) = prompt_list([prompt])
        async with aclosing(self._pieces(await self._encoded(one), params)) as pieces:
            async for piece in pieces:
                yield piece

    async def stream_chat(self, messages: Messages, params: SamplingParams | None = None) -> AsyncGenerator[str, None]:
        """As `LLM.stream_chat`, which it raises as, at the first piece."""
        (one,) = conversations([messages])
        ids = await asyncio.to_thread(self.llm.chat_ids, one)
        async with aclosing(self._pieces(ids, params)) as pieces:
            async for piece in pieces:
                yield piece

    async def score(self, text: str | Sequence[int], likeliest: int = 0) -> Score:
        """As `LLM.score`, and raises as that. It waits until no answer is under way."""
        return await asyncio.to_thread(self.llm.score, text, likeliest)

    async def embed(
        self, texts: Prompts, *, pooling: Pool | None = None, normalize: bool = True, dimensions: int | None = None
    ) -> NDArray[np.float32]:
        """As `LLM.embed`: float32 [texts, dimensions]. Raises as that."""
        width = require_dimensions(dimensions, self.llm.engine.plan.target.spec.d_embed)
        chosen = chosen_pooling(pooling, self.llm.engine.pooling)
        ids = [await self._encoded(each) for each in prompt_list(texts)]
        return stacked(await self._all(ids, [chosen] * len(ids)), normalize, width)

    async def close(self) -> None:
        """Frees the model's memory. Answers under way end with BadRequest. Cancelling it, as Ctrl-C does, ends the
        writing of a first use's copy."""
        try:
            await asyncio.to_thread(self.llm.close)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.llm.engine.close)
            raise

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def _encoded(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return await asyncio.to_thread(self.llm.engine.tokenizer.encode, prompt)

    async def _answers(
        self, texts: Sequence[str | None], ids: Sequence[Sequence[int]], params: SamplingParams | None
    ) -> list[RequestOutput]:
        chosen = checked_params(params)
        n = chosen.n
        answers = await self._all(
            [each for each in ids for _ in range(n)], [chosen.nth(i) for _ in ids for i in range(n)]
        )
        return [
            RequestOutput.of(text, each, answers[i * n : (i + 1) * n])
            for i, (text, each) in enumerate(zip(texts, ids, strict=True))
        ]

    async def _all(self, ids: Sequence[Sequence[int]], params: Sequence[SamplingParams | Pooling]) -> list[Generation]:
        tasks = [asyncio.ensure_future(self._whole(*each)) for each in zip(ids, params, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:  # where one failed, and where this task is cancelled
            for task in tasks:
                task.cancel()

    async def _whole(self, ids: Sequence[int], params: SamplingParams | Pooling) -> Generation:
        async with aclosing(self._told(ids, params, False)) as told:
            async for what in told:
                if isinstance(what, Generation):
                    return what
        raise AssertionError("what is told ends with a whole answer or an error")

    async def _pieces(self, ids: Sequence[int], params: SamplingParams | None) -> AsyncGenerator[str, None]:
        async with aclosing(self._told(ids, one_answer(checked_params(params)), True)) as told:
            async for what in told:
                if isinstance(what, str) and what:
                    yield what

    async def _told(
        self, ids: Sequence[int], params: SamplingParams | Pooling, streams: bool
    ) -> AsyncGenerator[str | Generation, None]:
        """The pieces of an answer, then the whole of it."""
        loop, service = asyncio.get_running_loop(), self.llm.service()
        told: asyncio.Queue[Told] = asyncio.Queue()

        def tell(what: Told) -> None:
            with suppress(RuntimeError):  # the loop has ended: nobody listens any more
                loop.call_soon_threadsafe(told.put_nowait, what)

        number = service.submit(ids, params, tell, streams=streams)
        try:
            while True:
                what = await told.get()
                if isinstance(what, Cancelled):
                    raise BadRequest(CLOSED)
                require_answer(what)
                if isinstance(what, Ended):
                    yield what.answer
                    return
                if isinstance(what, AnswerPiece):
                    yield what.text
        finally:
            service.cancel(number)
