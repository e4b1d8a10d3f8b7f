"""Tiny models with random weights, made, saved and run by transformers in float32: what our engine must agree with.

Their shapes are odd on purpose: widths that are no multiple of 64, heads that do not fill d_model, windows and
scalings small enough that 300 tokens exceed them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, logging

from tests.cpu.variants import Variant

logging.set_verbosity_error()
logging.disable_progress_bar()

# One thread is faster for models as small as these, and leaves a core to what they are compared with.
torch.set_num_threads(1)


def save(variant: Variant, folder: Path) -> None:
    """Writes a checkpoint folder: config, the variant's random weights, and a tokenizer whose words are its ids."""
    # Seeded by the name, so that a new variant changes no other.
    torch.manual_seed(int.from_bytes(variant.name.encode()) % 2**63)
    config = AutoConfig.for_model(variant.model_type, **variant.keys)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model, embedding_spread=0.6 if variant.model_type.startswith("gemma") else 2.0)
    model.save_pretrained(folder)
    words = {str(token): token for token in range(variant.vocab)}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(folder / "tokenizer.json"))


def randomise(model: torch.nn.Module, embedding_spread: float) -> None:
    """Weights that make every term count: scores and logits with a spread of about 2, no zero bias, no unit norm.

    gemma multiplies its tied embedding by sqrt(d): with the same spread all it would say is its last token.
    """
    norms = {id(p) for m in model.modules() if "Norm" in type(m).__name__ for p in m.parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if id(p) in norms and name.endswith("weight"):
                p.normal_(1.0, 0.3)
            elif name.endswith("sinks"):
                p.normal_(1.0, 1.5)
            elif name.endswith("_proj_bias"):  # of gpt-oss' experts: its clamp is at 7
                p.normal_(0.0, 3.0)
            elif p.dim() == 1:
                p.normal_(0.0, 0.2)
            elif p.dim() == 3 and model.config.model_type == "gpt_oss":  # its experts' matrices are turned
                p.normal_(0.0, 1.5 / p.shape[-2] ** 0.5)
            elif "embed_tokens" in name or "lm_head" in name:
                p.normal_(0.0, embedding_spread / p.shape[1] ** 0.5)
            elif "embed_positions" in name:
                p.normal_(0.0, 0.2)
            else:
                p.normal_(0.0, 1.5 / p.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)


def prompt(variant: Variant, length: int) -> list[int]:
    """Random token ids; a longer prompt is no continuation of a shorter one."""
    return np.random.default_rng(length).integers(0, variant.vocab, length).tolist()


class Oracle:
    """A saved model in transformers: float32 weights and arithmetic, attention without fused kernels."""

    def __init__(self, folder: Path) -> None:
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager)
        self.model.eval()

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """float32 [len(token_ids), vocab]."""
        with torch.inference_mode():
            return self.model(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()

    def greedy(self, prompt_ids: list[int], count: int) -> list[tuple[int, float]]:
        """`count` steps: the best token and by how much its logit exceeds the second best."""
        steps, given, cache = [], torch.tensor([prompt_ids]), None
        with torch.inference_mode():
            for _ in range(count):
                out = self.model(given, past_key_values=cache, use_cache=True)
                best, second = out.logits[0, -1].topk(2).values.tolist()
                token = int(out.logits[0, -1].argmax())
                steps.append((token, best - second))
                given, cache = torch.tensor([[token]]), out.past_key_values
        return steps
