"""An OPT in plain torch: learned positions, layer norms with biases before the blocks, an FFN without a gate, and the
embedding again as the head. What differs from `reference_model.py` in everything but the sums of attention.

Shapes: B sequences, T positions, D model width, H heads, h head width, F neurons of an FFN, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from reference_model import ACTIVATIONS, INIT_STD, Architecture
from torch import Tensor, nn

POSITION_OFFSET = 2  # the first two rows of the position table are never looked up, as in Hugging Face's OPT


class OptAttention(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.head_width = arch.head_width
        self.q_proj = nn.Linear(arch.width, arch.width)
        self.k_proj = nn.Linear(arch.width, arch.width)
        self.v_proj = nn.Linear(arch.width, arch.width)
        self.out_proj = nn.Linear(arch.width, arch.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [B, T, D] -> [B, H, T, h]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, h]
        return self.out_proj(mixed.transpose(1, 2).flatten(2))  # [B, T, D]


class OptLayer(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[arch.hidden_act]
        self.self_attn_layer_norm = nn.LayerNorm(arch.width, eps=arch.norm_eps)
        self.self_attn = OptAttention(arch)
        self.final_layer_norm = nn.LayerNorm(arch.width, eps=arch.norm_eps)
        self.fc1 = nn.Linear(arch.width, arch.neurons)
        self.fc2 = nn.Linear(arch.neurons, arch.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))  # [B, T, D]
        return x + self.fc2(self.activation(self.fc1(self.final_layer_norm(x))))  # [B, T, F] -> [B, T, D]


class OptDecoder(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.vocab, arch.width)
        self.embed_positions = nn.Embedding(POSITION_OFFSET + arch.context, arch.width)
        self.layers = nn.ModuleList(OptLayer(arch) for _ in range(arch.layers))
        self.final_layer_norm = nn.LayerNorm(arch.width, eps=arch.norm_eps)


class Opt(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.model = nn.ModuleDict({"decoder": OptDecoder(arch)})
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # what a layer adds to the residual starts smaller, as in `reference_model.Model`
                into_residual = name.endswith(("out_proj.weight", "fc2.weight"))
                nn.init.normal_(weight, std=INIT_STD / (2 * arch.layers) ** 0.5 if into_residual else INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] of tokens [B, T]; and 0, for there are no experts to be used unevenly."""
        decoder = self.model["decoder"]
        positions = torch.arange(POSITION_OFFSET, POSITION_OFFSET + tokens.shape[1], device=tokens.device)  # [T]
        x = decoder.embed_tokens(tokens) + decoder.embed_positions(positions)  # [B, T, D]
        for layer in decoder.layers:
            x = layer(x)
        return F.linear(decoder.final_layer_norm(x), decoder.embed_tokens.weight), x.new_zeros(())  # [B, T, V]
