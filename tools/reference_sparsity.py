"""How few neurons of a ReLU model fire: what a model card tells.

Shapes: B windows, T positions, F neurons of an FFN, N tokens of a stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from reference_text import BOS_ID, windows
from torch import Tensor, nn

WINDOWS = 8  # computed at once
FIRES = ("gate_proj", "fc1")  # a neuron fires where this matrix's product is above 0


@torch.inference_mode()
def firing(model: nn.Module, stream: Tensor, length: int) -> list[Tensor]:
    """For each layer how often each neuron fires, [F] in float64: a share of all tokens of the stream but bos."""
    counts: list[Tensor] = []
    scored = torch.empty(0, dtype=torch.bool)

    def count(layer: int) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(module: nn.Module, inputs: object, product: Tensor) -> None:  # product [B, T, F]
            counts[layer] += (product > 0)[scored].sum(0).cpu()

        return hook

    fire = [module for name, module in model.named_modules() if name.endswith(FIRES)]
    counts = [torch.zeros(module.out_features, dtype=torch.int64) for module in fire]  # type: ignore[arg-type]
    hooks = [module.register_forward_hook(count(layer)) for layer, module in enumerate(fire)]
    device = next(model.parameters()).device
    padded, tokens = F.pad(stream, (0, -len(stream) % length), value=BOS_ID), 0
    for begin in range(0, len(padded), WINDOWS * length):
        starts = torch.arange(begin, min(begin + WINDOWS * length, len(padded)), length)
        inputs = windows(padded, starts, length)[0]
        scored = inputs.to(device) != BOS_ID  # [B, T]
        tokens += int(scored.sum())
        model(inputs.to(device))
    for handle in hooks:
        handle.remove()
    return [of_layer.double() / tokens for of_layer in counts]


def hottest(rates: Tensor, share: float) -> float:
    """The share of neurons, the hottest first, that make `share` of all activations. rates [F]."""
    made = rates.sort(descending=True).values.cumsum(0)
    return (int((made < share * made[-1]).sum()) + 1) / len(rates)


def sparsity_text(model: nn.Module, stream: Tensor) -> str:
    """The card's chapter."""
    rates = firing(model, stream, model.arch.context)  # type: ignore[union-attr]
    rows = [(str(layer), of_layer) for layer, of_layer in enumerate(rates)]
    rows.append(("all", torch.cat(rates)))
    table = "\n".join(
        f"| {name} | {float(r.mean()):.1%} | {float((r == 0).double().mean()):.1%} | {hottest(r, 0.5):.1%} |"
        f" {hottest(r, 0.8):.1%} | {hottest(r, 0.95):.1%} |"
        for name, r in rows
    )
    return f"""
## How few neurons fire

Shares of neurons on the held-out text. A neuron fires for a token where ReLU gives it more than 0; all others of that
token need not be computed further. The last three columns tell how many neurons, the hottest first, make 50, 80 and
95 % of a layer's activations.

| layer | fire for a token | never fire | make 50 % | make 80 % | make 95 % |
|---|---|---|---|---|---|
{table}
"""
