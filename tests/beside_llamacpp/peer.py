"""llama.cpp with one file: the logits of prompts and of steps behind them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from penstock.runtime import host
from tests.beside_llamacpp.draws import ROOM, VOCABULARY

Array = NDArray[Any]


class Peer:
    """A model with a float32 cache, without flash attention, which is computed in float16. Raises RuntimeError."""

    def __init__(self, file: Path) -> None:
        self._log: list[str] = []
        # Kept, since llama.cpp calls it for as long as it lives.
        self._on_log = llama_cpp.llama_log_callback(lambda _, text, __: self._log.append(text.decode(errors="replace")))
        llama_cpp.llama_log_set(self._on_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        of_model = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), of_model)
        self._need(self._model is not None, f"no model from {file.name}")
        how = llama_cpp.llama_context_default_params()
        how.n_ctx = how.n_batch = how.n_ubatch = ROOM
        how.n_threads = how.n_threads_batch = host.usable_cpus()
        how.type_k = how.type_v = llama_cpp.GGML_TYPE_F32
        how.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, how)
        self._need(self._context is not None, "no context")

    def answers(self, ids: Array, steps: int) -> Array:
        """Logits of the last row of a prompt and of each of the last `steps` ids behind it, float32 [1 + steps, V]."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        length = len(ids) - steps
        return np.stack([self._step(ids[:length]), *(self._step(ids[at : at + 1]) for at in range(length, len(ids)))])

    def _step(self, ids: Array) -> Array:
        tokens = (llama_cpp.llama_token * len(ids))(*ids.tolist())
        failed = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, len(ids)))
        self._need(not failed, f"llama_decode: {failed}")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, (VOCABULARY,)).copy()

    def close(self) -> None:
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)
        llama_cpp.llama_log_set(llama_cpp.llama_log_callback(0), ctypes.c_void_p(0))

    def _need(self, fine: bool, complaint: str) -> None:
        if not fine:
            raise RuntimeError(f"llama.cpp: {complaint}: {''.join(self._log[-6:])[-600:]}")
