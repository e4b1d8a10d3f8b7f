"""`python -m bench.peers.llamacpp MODEL.gguf`: llama.cpp as a worker of `bench.cpu` and `bench.offload`, through its C
interface.

Everything is left at its default but the threads, the context, one batch for the whole prompt, and that the file is
read rather than mapped, as a repacked model has to be copied anyway. With --mmap it is mapped and not repacked, for
memory that does not hold it. With --plain it is read and not repacked. With --kv its cache has that format, which takes
flash attention.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from bench.peers import PROMPT_TOKENS, Answer, Loaded, followed_ids, serve, token_ids
from bench.peers.random_gguf import bytes_per_token, load_config
from penstock.runtime import host

KV_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q4_0": llama_cpp.GGML_TYPE_Q4_0}


class LlamaCpp:
    """One loaded model and a context of one sequence."""

    def __init__(
        self, file: Path, config: dict[str, Any], threads: int, context: int, mmap: bool = False, repack: bool = True,
        sequences: int = 1, kv: str | None = None, prompt: int = PROMPT_TOKENS,
    ) -> None:  # fmt: skip
        self._log: list[str] = []
        # Kept, since llama.cpp calls it for as long as it lives.
        self._on_log = llama_cpp.llama_log_callback(lambda _, text, __: self._log.append(text.decode(errors="replace")))
        llama_cpp.llama_log_set(self._on_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        of_model = llama_cpp.llama_model_default_params()
        of_model.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
        of_model.use_extra_bufts = repack and not mmap  # of a mapped file repacking would copy every weight
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), of_model)
        self._need(self._model is not None, f"no model from {file.name}")
        of_context = llama_cpp.llama_context_default_params()
        of_context.n_ctx = context
        self._most_rows = of_context.n_batch = of_context.n_ubatch = min(512, context)
        self._sequences = of_context.n_seq_max = sequences
        of_context.n_threads = of_context.n_threads_batch = threads
        if kv is not None:
            of_context.type_k = of_context.type_v = KV_TYPES[kv]
            of_context.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(self._model, of_context)
        self._need(self._context is not None, "no context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab, self._bytes_per_token = config["vocab_size"], bytes_per_token(config)
        self._followed = 0  # tokens
        self._prompt = prompt

    def facts(self) -> dict[str, Any]:
        repacked = re.search(r"CPU_REPACK model buffer size\s*=\s*([\d.]+) MiB", "".join(self._log))
        return {
            "version": llama_cpp.__version__,
            "repacked_mib": float(repacked[1]) if repacked else 0.0,
            "system": llama_cpp.llama_print_system_info().decode().strip(),
        }

    def prefill(self, tokens: int) -> Answer:
        ids = token_ids(self._vocab, tokens)
        llama_cpp.llama_memory_clear(self._memory, True)
        self._followed = 0
        start_s = time.perf_counter()
        logits = self._step(ids)
        seconds = time.perf_counter() - start_s
        assert np.isfinite(logits).all()
        return {"seconds": seconds}

    def decode(self, tokens: int) -> Answer:
        llama_cpp.llama_memory_clear(self._memory, True)
        following = self._step(token_ids(self._vocab, PROMPT_TOKENS)).argmax()
        start_s = time.perf_counter()
        for _ in range(tokens):
            logits = self._step(np.array([following], np.int32))
            following = logits.argmax()
        seconds = time.perf_counter() - start_s
        assert np.isfinite(logits).all()
        return {"seconds": seconds, "bytes": tokens * self._bytes_per_token}

    def decode_together(self, tokens: int) -> Answer:
        """So many steps of all sequences, each step one call, after prompts that are not counted. The context is the
        room of all of them."""
        llama_cpp.llama_memory_clear(self._memory, True)
        following: list[int] = []
        for seq in range(self._sequences):
            ids = token_ids(self._vocab, PROMPT_TOKENS, seq).tolist()
            rows = [(token, at, seq, at + 1 == len(ids)) for at, token in enumerate(ids)]
            following += [int(logits.argmax()) for logits in self._batch(rows)]
        start_s = time.perf_counter()
        for step in range(tokens):
            rows = [(token, PROMPT_TOKENS + step, seq, True) for seq, token in enumerate(following)]
            found = self._batch(rows)
            following = [int(logits.argmax()) for logits in found]
        seconds = time.perf_counter() - start_s
        assert all(np.isfinite(logits).all() for logits in found)
        return {"seconds": seconds}

    def decode_block(self, tokens: int) -> Answer:
        """So many steps of all sequences, each after a prompt. One prompt is read, and its cache copied for the others,
        which saves minutes and changes no step: each sequence has a cache of its own. Neither that nor the first step,
        in which copies are made, is counted."""
        llama_cpp.llama_memory_clear(self._memory, True)
        following = [int(self._step(token_ids(self._vocab, self._prompt)).argmax())] * self._sequences
        for seq in range(1, self._sequences):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, seq, -1, -1)
        for step in range(tokens + 1):
            if step == 1:
                start_s = time.perf_counter()
            found = self._batch([(token, self._prompt + step, seq, True) for seq, token in enumerate(following)])
            following = [int(logits.argmax()) for logits in found]
        seconds = time.perf_counter() - start_s
        assert all(np.isfinite(logits).all() for logits in found)
        return {"seconds": seconds, "tokens": tokens * self._sequences, "peak_host_bytes": host.peak_rss_bytes()}

    def _batch(self, rows: list[tuple[int, int, int, bool]]) -> list[NDArray[np.float32]]:
        """Logits float32 [V] of the rows that want them; they hold until the next call. `rows`: (token, position,
        sequence, whether its logits are wanted)."""
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, seq, wants) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, int(wants)
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        failed = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_batch_free(batch)
        self._need(not failed, f"llama_decode: {failed}")
        wanted = [i for i, (*_, wants) in enumerate(rows) if wants]
        get = llama_cpp.llama_get_logits_ith
        return [np.ctypeslib.as_array(get(self._context, i), (self._vocab,)) for i in wanted]

    def follow(self, tokens: int) -> Answer:
        """So many steps along the same random text for all engines, on from where the last call ended."""
        if not self._followed:
            llama_cpp.llama_memory_clear(self._memory, True)
        ids = followed_ids(self._vocab, self._followed, tokens)
        self._followed += tokens
        start_s = time.perf_counter()
        for i in range(tokens):
            logits = self._step(ids[i : i + 1])
        seconds = time.perf_counter() - start_s
        assert np.isfinite(logits).all()
        return {"seconds": seconds, "bytes": tokens * self._bytes_per_token}

    def _step(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Logits of the last token, float32 [V]; they hold until the next step. More tokens than a batch takes go in
        one batch after the other."""
        for at in range(0, len(ids), self._most_rows):
            rows = ids[at : at + self._most_rows].tolist()
            tokens = (llama_cpp.llama_token * len(rows))(*rows)
            failed = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, len(rows)))
            self._need(not failed, f"llama_decode: {failed}")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, -1), (self._vocab,))

    def _need(self, fine: bool, complaint: str) -> None:
        if not fine:
            raise SystemExit(f"{''.join(self._log[-20:])}llama.cpp: {complaint}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--mmap", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--kv", choices=KV_TYPES)
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens of prompts of `decode_block`")
    wanted = parser.parse_args()

    def load() -> Loaded:
        config = load_config(wanted.config)
        how = (wanted.mmap, not wanted.plain, wanted.sequences, wanted.kv, wanted.prompt)
        peer = LlamaCpp(wanted.model, config, wanted.threads, wanted.context, *how)
        commands = {"prefill": peer.prefill, "decode": peer.decode, "follow": peer.follow}
        return peer.facts(), {**commands, "decode_together": peer.decode_together, "decode_block": peer.decode_block}

    serve(load)


if __name__ == "__main__":
    main()
