"""`python -m bench.peers.accelerate CHECKPOINT`: transformers with accelerate's disk offload, for `bench.offload`.

Layers that `--cpu-bytes` leaves no room for are read from the checkpoint whenever they are needed. The others are
mapped from it, which the kernel may take back under pressure, or with --copied lie in memory of their own.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from bench.peers import PROMPT_TOKENS, Answer, Loaded, serve, token_ids
from penstock.runtime import host


class Offloaded:
    """One loaded model."""

    def __init__(
        self, folder: Path, offload: Path, cpu_bytes: int, copied: bool, threads: int, sequences: int = 1,
        prompt: int = PROMPT_TOKENS,
    ) -> None:  # fmt: skip
        self._sequences, self._prompt = sequences, prompt
        torch.set_num_threads(threads)
        logging.getLogger("accelerate").setLevel(logging.ERROR)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            device_map="auto",
            max_memory={"cpu": cpu_bytes},
            offload_folder=offload,
        ).eval()
        if copied:
            for parameter in self._model.parameters():
                if parameter.device.type == "cpu":
                    parameter.data = parameter.data.clone()

    def facts(self) -> dict[str, Any]:
        stays = sum(p.nbytes for p in self._model.parameters() if p.device.type == "cpu")
        everything = sum(p.nbytes for p in self._model.parameters())
        versions = {module.__name__: module.__version__ for module in (torch, transformers, accelerate)}
        return {"versions": versions, "in_memory_bytes": stays, "on_disk_bytes": everything - stays}

    @torch.inference_mode()
    def decode(self, tokens: int) -> Answer:
        """So many steps, the best token fed back, after a prompt that is not counted."""
        ids = torch.from_numpy(token_ids(self._model.config.vocab_size, PROMPT_TOKENS)).long()[None]
        cache = None
        for step in range(tokens + 1):
            if step == 1:
                start_s = time.perf_counter()
            found = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = found.past_key_values, found.logits[:, -1].argmax(-1, keepdim=True)
        seconds = time.perf_counter() - start_s
        assert found.logits.isfinite().all()
        return {"seconds": seconds, "peak_host_bytes": host.peak_rss_bytes()}

    @torch.inference_mode()
    def decode_block(self, tokens: int) -> Answer:
        """So many steps of all sequences, each after a prompt. One prompt is read, and its cache repeated for the
        others, which saves minutes and changes no step. Neither is counted."""
        ids = torch.from_numpy(token_ids(self._model.config.vocab_size, self._prompt)).long()[None]
        found = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
        cache = found.past_key_values
        cache.batch_repeat_interleave(self._sequences)
        ids = found.logits[:, -1].argmax(-1, keepdim=True).repeat(self._sequences, 1)
        start_s = time.perf_counter()
        for _ in range(tokens):
            found = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = found.past_key_values, found.logits[:, -1].argmax(-1, keepdim=True)
        seconds = time.perf_counter() - start_s
        assert found.logits.isfinite().all()
        return {"seconds": seconds, "tokens": tokens * self._sequences, "peak_host_bytes": host.peak_rss_bytes()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--offload", type=Path, required=True, help="a folder for what has to be written anew")
    parser.add_argument("--cpu-bytes", type=int, required=True)
    parser.add_argument("--copied", action="store_true")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens of prompts of `decode_block`")
    wanted = parser.parse_args()

    def load() -> Loaded:
        how = (wanted.cpu_bytes, wanted.copied, wanted.threads, wanted.sequences, wanted.prompt)
        peer = Offloaded(wanted.checkpoint, wanted.offload, *how)
        return peer.facts(), {"decode": peer.decode, "decode_block": peer.decode_block}

    serve(load)


if __name__ == "__main__":
    main()
