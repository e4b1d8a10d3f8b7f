"""A Llama, and a Qwen3 with experts, in plain torch, small enough to read in one go: what `train_reference.py` trains.

Tensor names are those of Hugging Face, so that a state dict is a checkpoint without any renaming but that of experts. A
sibling architecture is an entry in `ARCHITECTURES`, and a feed-forward block in `FEED_FORWARDS` where its own differs.
`reference_opt.py` has the OPT.

Shapes: B sequences, T positions, D model width, H query heads, K key-value heads, h head width, E experts, A of them
active for a token, F neurons of an FFN or of an expert, V vocabulary, N = B * T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """The sizes of a model. Defaults are tale-llama's; config.json is written from these fields and nothing else."""

    name: str
    hidden_act: str = "silu"  # silu: SwiGLU; relu: ReGLU, whose zeros an engine can skip
    feed_forward: str = "gated"
    vocab: int = 4096
    width: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head_width: int = 32
    neurons: int = 704  # 11 blocks of 64 neurons, the granule in which an offloading engine cuts an FFN
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    context: int = 512
    model_type: str = "llama"
    qk_norm: bool = False
    experts: int = 0
    active: int = 0  # experts of a token
    balance: float = 0.0  # the weight of the loss that spreads tokens over experts

    def hf_config(self, bos: int, eos: int) -> dict[str, object]:
        """config.json, complete: nothing is left to a reader's defaults."""
        if self.model_type == "opt":
            return self.opt_config(bos, eos)
        return {
            "architectures": [CLASSES[self.model_type]],
            "model_type": self.model_type,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "head_dim": self.head_width,
            "hidden_act": self.hidden_act,
            "hidden_size": self.width,
            "initializer_range": INIT_STD,
            "intermediate_size": self.neurons,
            "max_position_embeddings": self.context,
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab,
            **(self.expert_config() if self.experts else {}),
        }

    def opt_config(self, bos: int, eos: int) -> dict[str, object]:
        """config.json of an OPT whose norms stand before the blocks."""
        return {
            "architectures": [CLASSES["opt"]],
            "model_type": "opt",
            "_remove_final_layer_norm": False,
            "activation_function": self.hidden_act,
            "attention_dropout": 0.0,
            "bos_token_id": bos,
            "do_layer_norm_before": True,
            "dropout": 0.0,
            "enable_bias": True,
            "eos_token_id": eos,
            "ffn_dim": self.neurons,
            "hidden_size": self.width,
            "init_std": INIT_STD,
            "layer_norm_elementwise_affine": True,
            "layerdrop": 0.0,
            "max_position_embeddings": self.context,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "pad_token_id": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab,
            "word_embed_proj_dim": self.width,
        }

    def expert_config(self) -> dict[str, object]:
        """What config.json says more where layers have experts."""
        return {
            "decoder_sparse_step": 1,  # each layer has them
            "mlp_only_layers": [],
            "moe_intermediate_size": self.neurons,
            "norm_topk_prob": True,
            "num_experts": self.experts,
            "num_experts_per_tok": self.active,
            "output_router_logits": False,
            "router_aux_loss_coef": self.balance,
            "sliding_window": None,
            "use_sliding_window": False,
        }


ARCHITECTURES = {
    "llama": Architecture("tale-llama"),
    # Widths that 256 divides: kernels that take neurons one by one need no remainder.
    "relu": Architecture("tale-relu", hidden_act="relu", neurons=768),
    "opt": Architecture(
        "tale-opt", hidden_act="relu", feed_forward="plain", kv_heads=8, neurons=1024, model_type="opt"
    ),
    # 11.7 million parameters, 3.9 million of them at work for a token. 32 experts, since of 8 a token would need half.
    "moe": Architecture(
        "tale-moe",
        feed_forward="routed",
        layers=6,
        neurons=64,
        model_type="qwen3_moe",
        qk_norm=True,
        experts=32,
        active=4,
        balance=0.01,
    ),
}

CLASSES = {"llama": "LlamaForCausalLM", "opt": "OPTForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}

INIT_STD = 0.02

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu": F.relu}


def rope_tables(arch: Architecture) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, h] in the half-split layout: channel i turns together with channel i + h/2."""
    channel = torch.arange(0, arch.head_width, 2, dtype=torch.float32)  # [h/2]
    frequency = arch.rope_theta ** (-channel / arch.head_width)  # [h/2]
    angle = torch.outer(torch.arange(arch.context, dtype=torch.float32), frequency)  # [T, h/2]
    angle = torch.cat([angle, angle], dim=-1)  # [T, h]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of channels of x [B, heads, T, h] by its position's angle."""
    first, second = x.chunk(2, dim=-1)  # [B, heads, T, h/2] each
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        queries, keys = arch.heads * arch.head_width, arch.kv_heads * arch.head_width
        self.q_proj = nn.Linear(arch.width, queries, bias=False)
        self.k_proj = nn.Linear(arch.width, keys, bias=False)
        self.v_proj = nn.Linear(arch.width, keys, bias=False)
        self.o_proj = nn.Linear(queries, arch.width, bias=False)
        if arch.qk_norm:
            self.q_norm = nn.RMSNorm(arch.head_width, eps=arch.norm_eps)
            self.k_norm = nn.RMSNorm(arch.head_width, eps=arch.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, positions, _ = x.shape  # x [B, T, D]
        per_head = (batch, positions, -1, self.arch.head_width)
        q, k = self.q_proj(x).view(per_head), self.k_proj(x).view(per_head)
        if self.arch.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)  # [B, H, T, h], [B, K, T, h]
        v = self.v_proj(x).view(per_head).transpose(1, 2)  # [B, K, T, h]
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        group = self.arch.heads // self.arch.kv_heads  # query heads j*group .. share key-value head j
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [B, H, T, h]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, h]
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # [B, T, D]


class GatedFeedForward(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[arch.hidden_act]
        self.gate_proj = nn.Linear(arch.width, arch.neurons, bias=False)
        self.up_proj = nn.Linear(arch.width, arch.neurons, bias=False)
        self.down_proj = nn.Linear(arch.neurons, arch.width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))  # [B, T, F] -> [B, T, D]
        return y, x.new_zeros(())


class RoutedFeedForward(nn.Module):
    """Experts, of which a router takes `active` for each token (qwen3_moe: softmax, then the largest, which are scaled
    to sum to one).

    Tokens are sorted by expert and each expert computes its own. On two AVX-512 cores a step of 2048 tokens takes
    0.92 s so; computing all 32 experts for every token and weighing 28 of them with zero takes 1.35 s and gives the
    same gradients.
    """

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch, self.activation = arch, ACTIVATIONS[arch.hidden_act]
        self.gate = nn.Linear(arch.width, arch.experts, bias=False)
        self.experts = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(arch.width, arch.experts * arch.neurons, bias=False),
                "up_proj": nn.Linear(arch.width, arch.experts * arch.neurons, bias=False),
                "down_proj": nn.Linear(arch.experts * arch.neurons, arch.width, bias=False),
            }
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y [B, T, D], and how unevenly tokens spread over experts: 1 where they are even (Switch Transformers, Eq.
        4)."""
        arch = self.arch
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.gate.weight.float()).softmax(-1).flatten(0, 1)  # [N, E]
        largest, taken = scores.topk(arch.active)  # [N, A]
        share = largest / largest.sum(-1, keepdim=True)  # [N, A]
        counts = torch.bincount(taken.flatten(), minlength=arch.experts)  # [E]
        uneven = (counts / taken.numel() * scores.mean(0)).sum() * arch.experts
        order = taken.flatten().argsort(stable=True)  # [N * A]: the row of the sorted that comes from each
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        each = x.flatten(0, 1).unsqueeze(1).expand(-1, arch.active, -1).flatten(0, 1)  # [N * A, D]
        tokens = each[order].split(counts.tolist())  # an expert's [n, D]
        gate, up = (self.experts[name].weight.split(arch.neurons) for name in ("gate_proj", "up_proj"))  # [F, D] each
        down = self.experts["down_proj"].weight.split(arch.neurons, dim=1)  # [D, F] each
        found = [
            F.linear(self.activation(F.linear(rows, g)) * F.linear(rows, u), d)
            for rows, g, u, d in zip(tokens, gate, up, down, strict=True)
        ]
        y = torch.cat(found)[back].unflatten(0, (-1, arch.active))  # [N, A, D]
        return (y * share.to(y.dtype).unsqueeze(-1)).sum(1).view_as(x), uneven


FEED_FORWARDS: dict[str, Callable[[Architecture], nn.Module]] = {
    "gated": GatedFeedForward,
    "routed": RoutedFeedForward,
}


def to_checkpoint(arch: Architecture, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with an expert's matrices apart: `mlp.experts.7.up_proj.weight` [F, D]."""
    found: dict[str, Tensor] = {}
    for name, weight in state.items():
        before, experts, which = name.partition(".experts.")
        if not experts:
            found[name] = weight
            continue
        axis = 1 if which.startswith("down_proj") else 0
        for expert, part in enumerate(weight.split(arch.neurons, axis)):
            found[f"{before}.experts.{expert}.{which}"] = part.contiguous()
    return found


def from_checkpoint(arch: Architecture, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_checkpoint`."""
    found, apart = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for name, weight in weights.items():
        before, experts, rest = name.partition(".experts.")
        if experts:
            expert, _, which = rest.partition(".")
            apart.setdefault(f"{before}.experts.{which}", {})[int(expert)] = weight
        else:
            found[name] = weight
    for name, parts in apart.items():
        found[name] = torch.cat([parts[i] for i in range(arch.experts)], 1 if "down_proj" in name else 0)
    return found


class Layer(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(arch.width, eps=arch.norm_eps)
        self.self_attn = Attention(arch)
        self.post_attention_layernorm = nn.RMSNorm(arch.width, eps=arch.norm_eps)
        self.mlp = FEED_FORWARDS[arch.feed_forward](arch)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)  # [B, T, D]
        y, uneven = self.mlp(self.post_attention_layernorm(x))
        return x + y, uneven  # [B, T, D]


class Body(nn.Module):
    """What Hugging Face calls `model`: everything but the head, which is the embedding again."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.vocab, arch.width)
        self.layers = nn.ModuleList(Layer(arch) for _ in range(arch.layers))
        self.norm = nn.RMSNorm(arch.width, eps=arch.norm_eps)


class Model(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch, self.model = arch, Body(arch)
        cos, sin = rope_tables(arch)
        self.register_buffer("cos", cos, persistent=False)  # [T, h]
        self.register_buffer("sin", sin, persistent=False)
        # What a layer adds to the residual starts smaller by the root of how many such terms add up (2 a layer), so
        # that the residual's variance at the last layer does not grow with the depth.
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=INIT_STD / (2 * arch.layers) ** 0.5 if into_residual else INIT_STD)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] of tokens [B, T], and how unevenly the layers' experts are used, on average."""
        positions = tokens.shape[1]
        cos, sin = self.cos[:positions], self.sin[:positions]
        x = self.model.embed_tokens(tokens)  # [B, T, D]
        uneven = x.new_zeros(())
        for layer in self.model.layers:
            x, of_layer = layer(x, cos, sin)
            uneven = uneven + of_layer / self.arch.layers
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight), uneven  # [B, T, V]
